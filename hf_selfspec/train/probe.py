"""Fitting a probe of acceptance (AdaSPEED §II.B)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..errors import SettingError
from ..modules.linear_probe import LinearProbe
from ..validation import check_exit, check_flag
from .exits import FrozenModel, HiddenStates, agreement
from .fit import TrainedFit, as_function


@dataclass(frozen=True, kw_only=True)
class ProbeFit(TrainedFit[LinearProbe], command="probe", function="fit_probe"):
    """Fits AdaSPEED's probe (§II.B), which predicts from an exit's state whether the token drafted there is accepted.

    Labels depend on the decoding mode: whether the exit's first choice is the whole model's (greedy), or the
    probability ``Σ min(p, q)`` that a token drawn from the exit's distribution is accepted (sampling).

    Args:
        model, tokenizer, dataset, block_size, args, callbacks, output_dir: see :func:`fit_adapter`.
        exit_layer: the exit layer ``E``.
        do_sample: whether tokens are sampled, with ``temperature``, ``top_k`` and ``top_p`` as in ``generate``.
        temperature, top_k, top_p: settings of sampling.

    Returns:
        The probe, for ``SelfSpec.adaspeed(probe=probe)``.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`.
    """

    exit_layer: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        super().check()
        check_flag("fit_probe(do_sample)", self.do_sample)
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1.0, None, None):
            raise SettingError(
                "fit_probe(temperature, top_k or top_p) has no effect without do_sample=True: add it, or leave it out."
            )
        self._warpers()

    def exit_layers(self, config: Any) -> Sequence[int]:
        check_exit(self.function, "exit_layer", self.exit_layer, config.num_hidden_layers)
        return (self.exit_layer,)

    def made(self, config: Any) -> LinearProbe:
        return LinearProbe(self.exit_layer, config.hidden_size, self.do_sample)

    def loss(self, module: LinearProbe, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        scores = module.scores(states[f"states_{self.exit_layer}"]).flatten()
        return F.binary_cross_entropy_with_logits(scores, self._labels(frozen, states))

    def metrics(self, module: LinearProbe, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        scores, label = module.scores(states[f"states_{self.exit_layer}"]).flatten(), self._labels(frozen, states)
        sure = scores.sigmoid()
        return {"accuracy": (sure > 0.5) * label + (sure <= 0.5) * (1 - label), "accepted": label}

    def recipe(self, module: LinearProbe) -> dict[str, Any]:
        drawn = f"drawn, temperature {self.temperature}, top-k {self.top_k}, top-p {self.top_p}"
        return {"exit layer": self.exit_layer, "decoding": drawn if self.do_sample else "greedy"}

    @torch.no_grad()
    def _labels(self, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        """``[b s]`` the probability that the token drafted at the exit is accepted."""
        warpers = self._warpers()

        def overlap(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            ids = torch.zeros(len(drafted), 0, dtype=torch.long, device=drafted.device)
            q, p = (warpers(ids, logits).softmax(-1) for logits in (drafted, teacher))
            return torch.minimum(p, q).sum(-1)

        metric, exits = overlap if self.do_sample else agreement, states[f"exits_{self.exit_layer}"]
        return frozen.per_token(metric, frozen.own_head, exits, states["final"])

    def _warpers(self) -> LogitsProcessorList:
        try:
            warpers = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
            if self.top_k:
                warpers.append(TopKLogitsWarper(self.top_k))
            if self.top_p is not None:
                warpers.append(TopPLogitsWarper(self.top_p))
        except (TypeError, ValueError) as error:
            raise SettingError(f"fit_probe(temperature, top_k, top_p): {error}") from error
        return warpers


fit_probe = as_function(ProbeFit)
