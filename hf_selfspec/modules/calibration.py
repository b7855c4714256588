"""Calibration: thresholds from the confidences of tokens and whether these were right."""

from __future__ import annotations

import torch


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats ``[...]`` of logits ``[..., v]``."""
    shares = logits.softmax(-1)
    return -torch.special.xlogy(shares, shares).sum(-1)


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


def drafts(sure: list[bool], right: list[bool], most: int) -> tuple[int, int]:
    """Simulates drafting a text from its second token on; returns how many tokens are drafted and accepted.

    A draft of up to ``most`` tokens continues as long as tokens are sure, even past wrong ones, after which it is
    assumed to follow the text. After the accepted tokens comes one of the whole model.
    """
    drafted = accepted = 0
    start = 1  # the first token comes from the prefill
    while start < len(sure):
        limit = min(start + most, len(sure))
        stop = next((at for at in range(start, limit) if not sure[at]), limit)
        kept = next((at for at in range(start, stop) if not right[at]), stop)
        drafted, accepted = drafted + stop - start, accepted + kept - start
        start = kept + 1
    return drafted, accepted
