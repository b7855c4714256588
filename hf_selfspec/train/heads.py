"""Fitting exit heads and calibrating them (DSSD §3.2-3.4)."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..errors import SettingError
from ..modules.heads import ExitHeads, Predictions, calibrate, confidence, default_layers
from ..validation import check_exit, check_flag
from .exits import FrozenModel, HiddenStates, Metric, agreement
from .fit import TrainedFit, as_function
from .texts import AT_ONCE, HELD_OUT, Tokenizer, continued, one_text_each

# Every hundredth from 0.5 on, and denser near 1: all tokens of a draft have to be right.
_EPSILONS = (*(step / 100 for step in range(50, 95)), *(step / 1000 for step in range(950, 1000)))
# The model continues the first one of so many parts of a row.
_PARTS = 4
_HEADS = 4


@dataclass(frozen=True, kw_only=True)
class HeadsFit(TrainedFit[ExitHeads], command="heads", function="fit_exit_heads"):
    """Fits DSSD's exit heads (§3.2) to a frozen model and calibrates their thresholds (§3.4).

    Each head learns the whole model's distribution. They are calibrated on what the model writes, greedily, after the
    first quarter of each held-out row.

    Args:
        model, tokenizer, dataset, block_size, args, callbacks, output_dir: see :func:`fit_adapter`.
        layers: exit layers; by default ``⌊k L / (K + 1)⌋`` for ``k = 1 .. K``, with the paper's ``K = 4``.
        rank: rank of the heads' linear layers: ``rank (d + v)`` parameters a head; ``None`` for full ones, ``d v``.
        copied: whether heads start with the weights of the model's own norm and head (without its bias, scale or
            soft-cap); they start at random by default, which the paper found to be better after long fits
            (copies stay over-confident).

    Returns:
        The heads, for ``SelfSpec.dssd(heads, epsilon)``; a warning is issued if they reach none of the accuracies.

    Raises:
        SettingError, SettingTypeError, UnsupportedModelError: see :func:`fit_adapter`; or there is too little text to
            hold any out.
    """

    layers: Sequence[int] | None = None
    rank: int | None = None
    copied: bool = False

    def check(self) -> None:
        super().check()
        name = self.function
        check_flag(f"{name}(copied)", self.copied)
        if self.block_size < 2:
            raise SettingError(
                f"{name}(block_size={self.block_size}) leaves the model nothing to write: give at least 2."
            )
        if self.copied and self.rank is not None:
            raise SettingError(f"{name} takes copied=True or a rank, not both.")

    def made(self, config: Any) -> ExitHeads:
        return ExitHeads(self.exit_layers(config), config.hidden_size, config.vocab_size, self.rank)

    def read(self, tokenizer: Tokenizer, dataset: Iterable[Any]) -> torch.Tensor:
        text = super().read(tokenizer, dataset)
        if len(text) < HELD_OUT:
            raise SettingError(
                f"{self.function} was given {len(text)} rows of {self.block_size} tokens, of which none can be held "
                f"out to calibrate on: give at least {HELD_OUT} rows."
            )
        return text

    def exit_layers(self, config: Any) -> list[int]:
        count = config.num_hidden_layers
        chosen = default_layers(count, _HEADS) or [1] if self.layers is None else list(self.layers)
        for layer in chosen:
            check_exit(self.function, "layers", layer, count)
        return chosen

    def module(self, frozen: FrozenModel) -> ExitHeads:
        module = super().module(frozen)
        if self.copied:
            for layer, head in zip(module.layers, module.heads, strict=True):
                norm, linear = cast(nn.Sequential, head)
                frozen.copy_head(cast(nn.Linear, linear))
                frozen.imitate_norm(cast(nn.RMSNorm, norm), layer)
        return module

    def loss(self, module: ExitHeads, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor:
        heads = range(len(module.layers))
        return torch.stack([_per_token(_divergence, frozen, module, head, states) for head in heads]).mean()

    def metrics(self, module: ExitHeads, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        return {
            f"agreement_at_layer_{layer}": _per_token(agreement, frozen, module, head, states)
            for head, layer in enumerate(module.layers)
        }

    def recipe(self, module: ExitHeads) -> dict[str, Any]:
        return {"exit layers": list(module.layers), "rank": self.rank, "copied": self.copied}

    def finish(self, module: ExitHeads, frozen: FrozenModel, held_out: torch.Tensor) -> None:
        calibration = calibrate(_predictions(frozen, module, held_out), _EPSILONS)
        module.about = module.about | {"calibration": calibration}
        module.about = module.about | {"figures": (module.about.get("figures") or {}) | module.figures()}
        if (rate := module.reached()) < _EPSILONS[0]:
            best = f"at best {rate} of their drafts is accepted" if rate else "no head is sure enough to draft a token"
            warnings.warn(
                f"{self.function}: these exit heads reach none of the accuracies from {_EPSILONS[0]} on ({best}), so "
                "SelfSpec.dssd cannot draft with them at such an epsilon. Fit them on more text, on text that is "
                "closer to what they are used for, for more epochs, or with copied=True.",
                stacklevel=3,
            )


fit_exit_heads = as_function(HeadsFit)


def _divergence(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` the Kullback-Leibler divergence of the draft's distribution from the whole model's."""
    return F.kl_div(drafted.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none").sum(-1)


def _per_token(metric: Metric, frozen: FrozenModel, heads: ExitHeads, head: int, states: HiddenStates) -> torch.Tensor:
    """``[b s]`` the values of a metric, from a head's logits and those of the whole model."""
    exits = states[f"states_{heads.layers[head]}"].float()
    return frozen.per_token(metric, partial(heads.logits, head), exits, states["final"])


@torch.no_grad()
def _predictions(frozen: FrozenModel, heads: ExitHeads, rows: torch.Tensor) -> list[Predictions]:
    """What the heads predict along the model's own continuation of each row's beginning."""

    def metrics(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return torch.stack([agreement(drafted, teacher), confidence(drafted)], -1)

    length = max(1, rows.shape[1] // _PARTS)
    settings, predictions = one_text_each(rows.shape[1] - length), []
    batches = [batch.tolist() for batch in rows[:, :length].split(AT_ONCE)]
    texts = [ids for batch in batches for ids in continued(frozen.model, batch, settings)]
    for ids in texts:
        states = frozen.hidden_states(torch.tensor([ids], device=frozen.device))
        values = [_per_token(metrics, frozen, heads, head, states) for head in range(len(heads.layers))]
        right, sure = torch.stack(values)[:, length - 1 : -1].cpu().unbind(-1)
        predictions.append((sure, right))
    return predictions
