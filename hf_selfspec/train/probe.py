"""Fitting a probe of acceptance (AdaSPEED §II.B)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..modules.linear_probe import LinearProbe
from ..validation import check_exit
from .exits import FrozenModel, HiddenStates, agreement
from .fit import TrainedFit, as_function


@dataclass(frozen=True, kw_only=True)
class ProbeFit(TrainedFit[LinearProbe], command="probe", function="fit_probe"):
    """Fits AdaSPEED's probe (§II.B), which predicts from an exit's state whether the token drafted there is accepted.

    Its labels are whether the exit's first choice is the whole model's.

    Args:
        model, tokenizer, dataset, block_size, args, callbacks, output_dir: see :func:`fit_adapter`.
        exit_layer: the exit layer ``E``.

    Returns:
        The probe, for ``SelfSpec.adaspeed(probe=probe)``.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`.
    """

    exit_layer: int

    def exit_layers(self, config: Any) -> Sequence[int]:
        check_exit(self.function, "exit_layer", self.exit_layer, config.num_hidden_layers)
        return (self.exit_layer,)

    def made(self, config: Any) -> LinearProbe:
        return LinearProbe(self.exit_layer, config.hidden_size)

    def loss(self, module: LinearProbe, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        scores = module.scores(states[f"states_{self.exit_layer}"]).flatten()
        return F.binary_cross_entropy_with_logits(scores, self._labels(frozen, states))

    def metrics(self, module: LinearProbe, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        scores, label = module.scores(states[f"states_{self.exit_layer}"]).flatten(), self._labels(frozen, states)
        sure = scores.sigmoid()
        return {"accuracy": (sure > 0.5) * label + (sure <= 0.5) * (1 - label), "accepted": label}

    def recipe(self, module: LinearProbe) -> dict[str, Any]:
        return {"exit layer": self.exit_layer}

    @torch.no_grad()
    def _labels(self, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        """``[b s]`` whether the token drafted at the exit is accepted."""
        return frozen.per_token(agreement, frozen.own_head, states[f"exits_{self.exit_layer}"], states["final"])


fit_probe = as_function(ProbeFit)
