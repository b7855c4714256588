"""Calibration: thresholds from the confidences of tokens and whether these were right."""

from __future__ import annotations

from bisect import bisect_left

import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Returns the entropy in nats ``[...]`` of logits ``[..., v]``."""
    shares = logits.softmax(-1)
    return -torch.special.xlogy(shares, shares).sum(-1)


def threshold(sure: torch.Tensor, right: torch.Tensor, epsilon: float) -> float | None:
    """Returns the lowest threshold at or above which a share ``epsilon`` of the tokens is right (DSSD §3.4).

    Args:
        sure: ``[n]`` confidences.
        right: ``[n]`` whether each token is the whole model's first choice.
        epsilon: the required share.

    Returns:
        The threshold, ``None`` if there is none.
    """
    order = sure.argsort(descending=True)
    sorted_sure = sure[order]
    shares = right[order].double().cumsum(0) / torch.arange(1, len(sure) + 1, device=sure.device)
    # A threshold cannot separate tokens of equal confidence.
    last = torch.ones_like(sorted_sure, dtype=torch.bool)
    last[:-1] = sorted_sure[1:] != sorted_sure[:-1]
    enough = ((shares >= epsilon) & last).nonzero()
    return None if not len(enough) else sorted_sure[enough[-1, 0]].item()


def drafts(sure: torch.Tensor, right: torch.Tensor, most: int) -> tuple[int, int]:
    """Simulates drafting a text from its second token on; returns how many tokens are drafted and accepted.

    A draft continues as long as tokens are sure, even past wrong ones, after which it is assumed to follow the text.
    After the accepted tokens comes one of the whole model.

    Args:
        sure: ``[n]`` whether each token would be drafted.
        right: ``[n]`` whether it would be accepted if all drafted tokens before it are.
        most: maximum number of tokens in a draft.
    """
    unsure, wrong = ((~flags).nonzero()[:, 0].tolist() for flags in (sure, right))
    drafted = accepted = 0
    start = 1  # the first token comes from the prefill
    while start < len(sure):
        stop = min(_next(unsure, start, len(sure)), start + most)
        kept = min(_next(wrong, start, len(sure)), stop)
        drafted, accepted = drafted + stop - start, accepted + kept - start
        start = kept + 1
    return drafted, accepted


def _next(places: list[int], start: int, end: int) -> int:
    """The first of the ascending ``places`` at or after ``start``, ``end`` if there is none."""
    index = bisect_left(places, start)
    return places[index] if index < len(places) else end


def roc_auc(sure: torch.Tensor, right: torch.Tensor) -> float | None:
    """Area under the ROC curve: how often a right token is surer than a wrong one; ``None`` if one kind is missing."""
    right = right.bool()
    positives, negatives = int(right.sum()), int((~right).sum())
    if not positives or not negatives:
        return None
    values, ranks = torch.unique(sure.double(), return_inverse=True)
    counts = torch.bincount(ranks, minlength=len(values)).double()
    middle = counts.cumsum(0) - (counts - 1) / 2
    return ((middle[ranks][right].sum() - positives * (positives + 1) / 2) / (positives * negatives)).item()
