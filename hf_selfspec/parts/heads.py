"""Exit heads with calibrated thresholds (DSSD §3.2-3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from ..calibration import entropy, roc_auc, threshold
from ..errors import SettingError
from ..settings import check_count, check_share
from .part import Part


def _top(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).amax(-1)


def _margin(logits: torch.Tensor) -> torch.Tensor:
    first, second = logits.softmax(-1).topk(2, -1).values.unbind(-1)
    return first - second


# How sure a distribution is, from logits [..., v]; more is surer, so entropy counts negatively.
METRICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "entropy": lambda logits: -entropy(logits),
    "probability": _top,
    "margin": _margin,
}


def default_layers(num_layers: int, heads: int) -> list[int]:
    """``⌊k L / (K + 1)⌋`` for ``k = 1 .. K`` (DSSD §3.2), each once."""
    return sorted({layer for k in range(1, heads + 1) if (layer := k * num_layers // (heads + 1)) >= 1})


class ExitHeads(Part):
    """A norm and a linear layer behind each of some layers, and from which confidence on each is believed.

    Args:
        layers: exit layers ``ℓ_1 < ... < ℓ_K``.
        hidden_size: ``d``.
        vocabulary: ``v``.
        rank: of the linear layer as a product of two; ``None`` for a whole one, ``d v`` numbers a head instead of
            ``rank (d + v)``.
        norm_eps: of the norms.
        about: see :class:`Part`; ``about["calibration"]`` is what :meth:`calibrate` found.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    kind = "set of exit heads"

    def __init__(
        self,
        layers: list[int] | tuple[int, ...],
        hidden_size: int,
        vocabulary: int,
        rank: int | None = None,
        norm_eps: float = 1e-6,
        about: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("vocabulary", vocabulary), ("rank", rank or 1)):
            check_count(f"ExitHeads({name})", value)
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1:
            raise SettingError(f"ExitHeads(layers) needs exit layers from 1 on that rise, got {layers!r}.")
        self.layers = tuple(layers)
        self.about = about or {}

        def linear() -> nn.Module:
            if rank is None:
                return nn.Linear(hidden_size, vocabulary, bias=False)
            return nn.Sequential(nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, vocabulary, bias=False))

        self.heads = nn.ModuleList(nn.Sequential(nn.RMSNorm(hidden_size, norm_eps), linear()) for _ in layers)

    def logits(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """``[..., v]`` what a head says of the states ``[..., d]`` that left the layers before it."""
        module = self.heads[head]
        found: torch.Tensor = module(states.to(next(module.parameters()).dtype))
        return found

    @property
    def metric(self) -> str:
        """By what confidence is measured."""
        return str(self._calibration["metric"])

    @property
    def _calibration(self) -> dict[str, Any]:
        found = self.about.get("calibration")
        if not found:
            raise SettingError("these exit heads have no thresholds: calibrate them, see fit_exit_heads.")
        return dict(found)

    def thresholds(self, epsilon: float) -> list[float]:
        """For each head the least confidence at which it was right often enough.

        Args:
            epsilon: how often, from 0 to 1; the next higher accuracy that was calibrated counts.

        Returns:
            Confidences by :attr:`metric`; infinite for a head that never was.

        Raises:
            SettingError: no accuracy as high was calibrated.
        """
        check_share("epsilon", epsilon, zero=False, one=True)
        calibration = self._calibration
        known = calibration["epsilons"]
        index = next((index for index, value in enumerate(known) if value >= epsilon - 1e-9), None)
        if index is None:
            raise SettingError(f"epsilon={epsilon} is above all accuracies that were calibrated, up to {known[-1]}.")
        return [math.inf if head[index] is None else head[index] for head in calibration["thresholds"]]


def calibrate(
    sure: dict[str, list[torch.Tensor]], right: list[torch.Tensor], epsilons: list[float], metric: str
) -> dict[str, Any]:
    """Thresholds of each head, and how well each metric tells right from wrong.

    Args:
        sure: for each metric and head ``[n]`` confidences.
        right: for each head ``[n]`` whether each token is the whole model's first choice.
        epsilons: accuracies, rising.
        metric: the one that thresholds are for.
    """
    return {
        "metric": metric,
        "epsilons": epsilons,
        "thresholds": [
            [threshold(confidences, correct, epsilon) for epsilon in epsilons]
            for confidences, correct in zip(sure[metric], right, strict=True)
        ],
        "auc": {
            name: [roc_auc(confidences, correct) for confidences, correct in zip(heads, right, strict=True)]
            for name, heads in sure.items()
        },
        "tokens": len(right[0]),
    }
