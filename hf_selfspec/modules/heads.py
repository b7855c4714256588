"""Exit heads with calibrated thresholds (DSSD §3.2-3.4)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from ..errors import SettingError, brief
from ..model.linear import FewTokenLinear
from ..validation import check_share
from .draft_module import About, DraftModule

# Most tokens of a draft (DSSD §4.1).
_LONGEST = 32


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """The negative entropy in nats ``[...]`` of logits ``[..., v]``, which in the paper told right tokens from wrong
    ones better than the highest probability and its margin over the next one (DSSD §3.4)."""
    shares = logits.softmax(-1)
    return torch.special.xlogy(shares, shares).sum(-1)


def default_layers(num_layers: int, heads: int) -> list[int]:
    """``⌊k L / (K + 1)⌋`` for ``k = 1 .. K`` (DSSD §3.2), each once."""
    return sorted({layer for k in range(1, heads + 1) if (layer := k * num_layers // (heads + 1)) >= 1})


class ExitHeads(DraftModule):
    """A norm and a linear layer after each of some layers, and the confidence from which each head is trusted.

    Args:
        layers: exit layers ``ℓ_1 < ... < ℓ_K``.
        hidden_size: ``d``.
        vocabulary: ``v``.
        rank: rank of the linear layer as a product of two, with ``rank (d + v)`` parameters a head; ``None`` for a
            single matrix, with ``d v``.
        norm_eps: epsilon of the norms, between 0 and 1.
        about: see :class:`DraftModule`; ``about["calibration"]`` is what :func:`calibrate` returned.

    Raises:
        SettingError: the layers are not in increasing order.
    """

    kind, usage, source = "set of exit heads", "SelfSpec.dssd({!r})", "DynamicExit"

    def __init__(
        self,
        layers: list[int] | tuple[int, ...],
        hidden_size: int,
        vocabulary: int,
        rank: int | None = None,
        norm_eps: float = 1e-6,
        about: About = None,
    ) -> None:
        super().__init__(about)
        if not layers or list(layers) != sorted(set(map(int, layers))) or layers[0] < 1:
            raise SettingError(f"ExitHeads(layers) needs exit layers from 1 on, in increasing order, got {layers!r}.")
        self.layers, self.vocabulary = tuple(layers), vocabulary

        def linear() -> nn.Module:
            last = FewTokenLinear(rank or hidden_size, vocabulary, bias=False)
            return nn.Sequential(nn.Linear(hidden_size, rank, bias=False), last) if rank else last

        self.heads = nn.ModuleList(nn.Sequential(nn.RMSNorm(hidden_size, norm_eps), linear()) for _ in layers)

    def logits(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """``[..., v]`` logits of a head for the states ``[..., d]`` that left the layers before it."""
        module = self.heads[head]
        return module(states.to(next(module.parameters()).dtype))

    @property
    def calibration(self) -> dict[str, Any]:
        calibration = self.about.get("calibration")
        if not calibration:
            raise SettingError(
                "these exit heads have no thresholds: fit them with fit_exit_heads, which calibrates them."
            )
        return dict(calibration)

    def draft_thresholds(self, epsilon: float) -> list[float]:
        """For each head the least confidence at which drafted tokens were accepted often enough, infinite if never.

        A draft is accepted up to its first wrong token, so this is stricter than each head being right as often. Raises
        if the rate ``epsilon`` was never reached.
        """
        check_share("epsilon", epsilon, zero=False, one=True)
        thresholds, rates = self._calibrated()
        enough = np.flatnonzero(rates >= epsilon - 1e-9)
        if not len(enough):
            raise SettingError(
                f"epsilon={epsilon} is more than these exit heads reach: when they were calibrated, at best "
                f"{self.reached()} of what they drafted was accepted. Ask for less, or fit them on more text, or text "
                "that is closer to what they are used for."
            )
        return np.nan_to_num(thresholds[:, enough[0]], nan=math.inf).tolist()

    def reached(self) -> float:
        """The highest acceptance rate that drafts had, 0 where no head was ever sure enough to draft."""
        return math.floor(1000 * self._calibrated()[1].max()) / 1000

    def figures(self) -> dict[str, float]:
        """The model card's lines about the calibration."""
        return {"drafts accepted at best": self.reached()}

    def _calibrated(self) -> tuple[np.ndarray, np.ndarray]:
        """The thresholds ``[K, n]``, NaN for none, and the acceptance rates ``[n]`` that drafts had with them."""
        calibration = self.calibration
        try:
            tables = calibration["thresholds"], calibration["acceptance"]
            thresholds, rates = (np.array(table, dtype=float) for table in tables)
            if thresholds.shape != (len(self.layers), len(rates)):
                raise ValueError(f"thresholds of the shape {thresholds.shape}")
        except (KeyError, TypeError, ValueError) as error:
            raise SettingError(
                f"the calibration of these {len(self.layers)} exit heads is not one that fit_exit_heads has written "
                f"({brief(repr(error))}). Fit them again."
            ) from error
        return thresholds, np.nan_to_num(rates)


# What heads predict along one text: their confidence [K, n], and whether they are right [K, n].
Predictions = tuple[torch.Tensor, torch.Tensor]


def calibrate(texts: Sequence[Predictions], epsilons: Sequence[float]) -> dict[str, Any]:
    """Finds ``thresholds`` ``[K][epsilons]`` and ``acceptance`` ``[epsilons]`` (DSSD §3.4.1)."""
    sure, right = (torch.cat(each, 1) for each in zip(*texts, strict=True))
    thresholds = [[threshold(*pair, epsilon) for epsilon in epsilons] for pair in zip(sure, right, strict=True)]
    acceptance = [_acceptance(texts, limits) for limits in zip(*thresholds, strict=True)]
    return {"epsilons": list(epsilons), "tokens": right.shape[1], "thresholds": thresholds, "acceptance": acceptance}


def threshold(sure: torch.Tensor, right: torch.Tensor, epsilon: float) -> float | None:
    """The lowest of confidences ``[n]`` at or above which a share ``epsilon`` is right, if there is one (DSSD §3.4)."""
    order = sure.argsort(descending=True)
    sorted_sure = sure[order]
    shares = right[order].double().cumsum(0) / torch.arange(1, len(sure) + 1, device=sure.device)
    # A threshold cannot separate tokens of equal confidence.
    last = torch.ones_like(sorted_sure, dtype=torch.bool)
    last[:-1] = sorted_sure[1:] != sorted_sure[:-1]
    enough = ((shares >= epsilon) & last).nonzero()
    return None if not len(enough) else sorted_sure[enough[-1, 0]].item()


def _drafts(sure: list[bool], right: list[bool]) -> tuple[int, int]:
    """Simulates drafting a text; returns how many tokens are drafted, and how many of these accepted."""
    drafted = accepted = 0
    start = 1  # the first token comes from the prefill
    while start < len(sure):
        limit = min(start + _LONGEST, len(sure))
        stop = next((at for at in range(start, limit) if not sure[at]), limit)
        kept = next((at for at in range(start, stop) if not right[at]), stop)
        drafted, accepted = drafted + stop - start, accepted + kept - start
        start = kept + 1
    return drafted, accepted


def _acceptance(texts: Sequence[Predictions], limits: Sequence[float | None]) -> float | None:
    """Acceptance rate, had the texts been drafted with these thresholds; ``None`` where nothing would be."""
    finite = [math.inf if limit is None else limit for limit in limits]
    bounds = torch.tensor(finite, device="cpu", dtype=torch.float32)[:, None]
    drafted = accepted = 0
    for confidences, is_right in texts:
        sure = confidences >= bounds
        right = is_right.bool().gather(0, sure.byte().argmax(0, keepdim=True))[0]  # of the first head that is sure
        in_text, kept = _drafts(sure.any(0).tolist(), right.tolist())
        drafted, accepted = drafted + in_text, accepted + kept
    return accepted / drafted if drafted else None
