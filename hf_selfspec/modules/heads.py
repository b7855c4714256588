"""Exit heads with calibrated thresholds (DSSD §3.2-3.4)."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from ..errors import SettingError, SettingTypeError, brief
from ..model.kernels.linear import FewTokenLinear
from ..validation import MOST_LAYERS, MOST_WIDTH, check_count, check_share
from .draft_module import About, DraftModule

# Most tokens of a draft (DSSD §4.1).
_LONGEST = 32


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats ``[...]`` of logits ``[..., v]``."""
    shares = logits.softmax(-1)
    return -torch.special.xlogy(shares, shares).sum(-1)


# The confidence of a distribution, from logits [..., v]; higher is surer, so the entropy is negated.
METRICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "entropy": lambda logits: -entropy(logits),
    "probability": lambda logits: logits.softmax(-1).amax(-1),
    "margin": lambda logits: -logits.softmax(-1).topk(2, -1).values.diff()[..., 0],
}


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
        about: About = None,
    ) -> None:
        super().__init__()
        check_count("ExitHeads(hidden_size)", hidden_size, most=MOST_WIDTH)
        check_count("ExitHeads(vocabulary)", vocabulary, most=MOST_WIDTH)
        if rank is not None:
            check_count("ExitHeads(rank)", rank, most=MOST_WIDTH)
        if not isinstance(layers, (list, tuple)):
            raise SettingTypeError(f"ExitHeads(layers) must be a list of exit layers, got {layers!r}.")
        for layer in layers:
            check_count("ExitHeads(layers): a layer", layer, most=MOST_LAYERS)
        if not layers or list(layers) != sorted(set(layers)):
            raise SettingError(f"ExitHeads(layers) needs exit layers from 1 on, in increasing order, got {layers!r}.")
        check_share("ExitHeads(norm_eps)", norm_eps, zero=False, one=False)
        self.layers, self.vocabulary = tuple(layers), vocabulary
        self.about = about  # which depends on the layers

        def linear() -> nn.Module:
            last = FewTokenLinear(rank or hidden_size, vocabulary, bias=False)
            return nn.Sequential(nn.Linear(hidden_size, rank, bias=False), last) if rank else last

        self.heads = nn.ModuleList(nn.Sequential(nn.RMSNorm(hidden_size, norm_eps), linear()) for _ in layers)

    def _check_about(self, name: str, about: dict[str, Any]) -> None:
        if not (calibration := about.get("calibration")):
            return
        try:
            rates, limits = [calibration["epsilons"], *calibration["acceptance"].values()], calibration["thresholds"]
            rows = np.array([*rates, *chain(*(limits[metric] for metric in METRICS))], dtype=float)  # of equal length
            is_right = {calibration["metric"], *limits} == METRICS.keys() and len(rows) == 4 + 3 * len(self.layers)
        except (TypeError, KeyError, ValueError, AttributeError):
            is_right = False
        if not is_right:
            raise SettingError(
                f"{name}['calibration'] is not one that calibrate_exit_heads has written for {len(self.layers)} heads, "
                f"got {brief(repr(calibration))}."
            )

    def logits(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """``[..., v]`` logits of a head for the states ``[..., d]`` that left the layers before it."""
        module = self.heads[head]
        return module(states.to(next(module.parameters()).dtype))

    @property
    def metric(self) -> str:
        return str(self.calibration["metric"])

    @property
    def calibration(self) -> dict[str, Any]:
        calibration = self.about.get("calibration")
        if not calibration:
            raise SettingError("these exit heads have no thresholds: calibrate them, see calibrate_exit_heads.")
        return dict(calibration)

    def draft_thresholds(self, epsilon: float, metric: str | None = None) -> list[float]:
        """For each head the least confidence at which drafted tokens were accepted often enough, infinite if never.

        A draft is accepted up to its first wrong token, so this is stricter than each head being right as often. Raises
        if the rate ``epsilon`` was never reached.
        """
        too_high = (
            f"is more than these exit heads reach: when they were calibrated, at best {self.reached(metric)} of what "
            "they drafted was accepted. Ask for less, fit them on more text, or calibrate them on text that is closer "
            "to what they are used for."
        )
        check_share("epsilon", epsilon, zero=False, one=True)
        index = next((index for index, rate in enumerate(self._rates(metric)) if rate >= epsilon - 1e-9), None)
        if index is None:
            raise SettingError(f"epsilon={epsilon} {too_high}")
        return [math.inf if head[index] is None else head[index] for head in self._by_metric("thresholds", metric)]

    def reached(self, metric: str | None = None) -> float:
        """The highest acceptance rate that drafts had, 0 where no head was ever sure enough to draft."""
        return math.floor(1000 * max(self._rates(metric))) / 1000

    def figures(self) -> dict[str, float]:
        """The model card's lines about the calibration."""
        means = {f"ROC AUC of {name}": round(auc, 4) for name, auc in _mean_auc(self.calibration["auc"]).items()}
        return means | {"drafts accepted at best": self.reached()}

    def _rates(self, metric: str | None) -> list[float]:
        return [rate or 0.0 for rate in self._by_metric("acceptance", metric)]

    def _by_metric(self, table: str, metric: str | None) -> list[Any]:
        check_metric("exit heads", metric)
        return list(self.calibration[table][metric or self.metric])


def check_metric(name: str, metric: str | None) -> None:
    """Raises if there is no such metric of confidence."""
    if metric is not None and (not isinstance(metric, str) or metric not in METRICS):
        raise SettingError(f"{name}(metric) must be one of {sorted(METRICS)} or None, got {metric!r}.")


# What heads predict along one text: by metric the confidence [K, n], and whether they are right [K, n].
Predictions = tuple[dict[str, torch.Tensor], torch.Tensor]


def calibrate(texts: Sequence[Predictions], epsilons: Sequence[float], metric: str | None = None) -> dict[str, Any]:
    """Finds ``thresholds`` ``[K][epsilons]``, ``acceptance`` ``[epsilons]`` and ``auc`` ``[K]`` (DSSD §3.4.1)."""
    right = torch.cat([right for _, right in texts], 1)
    tables: dict[str, dict[str, Any]] = {"thresholds": {}, "acceptance": {}, "auc": {}}
    for name in METRICS:
        pairs = list(zip(torch.cat([sure[name] for sure, _ in texts], 1), right, strict=True))
        thresholds = [[threshold(*pair, epsilon) for epsilon in epsilons] for pair in pairs]
        tables["thresholds"][name] = thresholds
        tables["acceptance"][name] = [_acceptance(texts, name, limits) for limits in zip(*thresholds, strict=True)]
        tables["auc"][name] = [_roc_auc(*pair) for pair in pairs]
    means = _mean_auc(tables["auc"])
    chosen = metric or max(METRICS, key=lambda name: means.get(name, 0.0))
    return {"epsilons": list(epsilons), "tokens": right.shape[1], "metric": chosen, **tables}


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


def _roc_auc(sure: torch.Tensor, right: torch.Tensor) -> float | None:
    """How often a right token is surer than a wrong one; ``None`` if all are right, or all wrong."""
    from sklearn.metrics import roc_auc_score  # takes a second to import

    labels = right.bool().tolist()
    return float(roc_auc_score(labels, sure.tolist())) if len(set(labels)) == 2 else None


def _mean_auc(auc: dict[str, list[float | None]]) -> dict[str, float]:
    defined = {name: [value for value in values if value is not None] for name, values in auc.items()}
    return {name: mean(values) for name, values in defined.items() if values}


def _acceptance(texts: Sequence[Predictions], metric: str, limits: Sequence[float | None]) -> float | None:
    """Acceptance rate, had the texts been drafted with these thresholds; ``None`` where nothing would be."""
    finite = [math.inf if limit is None else limit for limit in limits]
    bounds = torch.tensor(finite, device="cpu", dtype=torch.float32)[:, None]
    drafted = accepted = 0
    for confidence, is_right in texts:
        sure = confidence[metric] >= bounds
        right = is_right.bool().gather(0, sure.byte().argmax(0, keepdim=True))[0]  # of the first head that is sure
        in_text, kept = _drafts(sure.any(0).tolist(), right.tolist())
        drafted, accepted = drafted + in_text, accepted + kept
    return accepted / drafted if drafted else None
