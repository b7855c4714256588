"""Greedy verification: a drafted token is kept if the full model's processed scores choose it too."""

from __future__ import annotations

import torch


def choose_greedy(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> tuple[int, int | None]:
    """The full model's token at one position, and which drafted one it confirms.

    Args:
        scores: ``[v]`` processed scores of the full model.
        drafted: tokens proposed for this position.
        q, num_drawn: not used; greedy drafts have no distribution.

    Returns:
        The token, and its index in ``drafted`` or ``None``.
    """
    token = int(scores.argmax())
    return token, drafted.index(token) if token in drafted else None
