"""From confidences, and whether tokens were right, to thresholds."""

from __future__ import annotations

from bisect import bisect_left

import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """``[...]`` entropy in nats of logits ``[..., v]``."""
    shares = logits.softmax(-1)
    return -torch.special.xlogy(shares, shares).sum(-1)


def threshold(sure: torch.Tensor, right: torch.Tensor, epsilon: float) -> float | None:
    """The loosest threshold at or beyond which a share ``epsilon`` of tokens is right (DSSD §3.4).

    Args:
        sure: ``[n]`` confidences.
        right: ``[n]`` whether each token is the whole model's first choice.
        epsilon: the wanted share.

    Returns:
        The threshold, ``None`` where there is none.
    """
    order = sure.argsort(descending=True)
    sorted_sure = sure[order]
    shares = right[order].double().cumsum(0) / torch.arange(1, len(sure) + 1, device=sure.device)
    # Tokens of one confidence stand or fall together.
    last = torch.ones_like(sorted_sure, dtype=torch.bool)
    last[:-1] = sorted_sure[1:] != sorted_sure[:-1]
    enough = ((shares >= epsilon) & last).nonzero()
    return None if not len(enough) else sorted_sure[enough[-1, 0]].item()


def drafts(sure: torch.Tensor, right: torch.Tensor, most: int) -> tuple[int, int]:
    """Drafted and accepted tokens, had a text been written with drafts from its second token on.

    Drafts go on over tokens that are sure, past wrong ones too, whose continuation is taken to be the text's; after the
    accepted ones there is one of the whole model.

    Args:
        sure: ``[n]`` whether each token would be drafted.
        right: ``[n]`` whether it would be accepted after right ones.
        most: tokens in a draft.
    """
    unsure, wrong = ((~flags).nonzero()[:, 0].tolist() for flags in (sure, right))
    drafted = accepted = 0
    start = 1  # the first token comes with the prompt
    while start < len(sure):
        stop = min(_next(unsure, start, len(sure)), start + most)
        kept = min(_next(wrong, start, len(sure)), stop)
        drafted, accepted = drafted + stop - start, accepted + kept - start
        start = kept + 1
    return drafted, accepted


def _next(places: list[int], start: int, end: int) -> int:
    """The first of rising places from ``start`` on, ``end`` if there is none."""
    index = bisect_left(places, start)
    return places[index] if index < len(places) else end


def roc_auc(sure: torch.Tensor, right: torch.Tensor) -> float | None:
    """Area under the ROC curve: how often a right token is surer than a wrong one; ``None`` without one of both."""
    right = right.bool()
    positives, negatives = int(right.sum()), int((~right).sum())
    if not positives or not negatives:
        return None
    values, ranks = torch.unique(sure.double(), return_inverse=True)
    counts = torch.bincount(ranks, minlength=len(values)).double()
    middle = counts.cumsum(0) - (counts - 1) / 2
    return ((middle[ranks][right].sum() - positives * (positives + 1) / 2) / (positives * negatives)).item()
