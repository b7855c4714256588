"""Greedy verification: a drafted token is kept if the full model's processed scores choose it too."""

from __future__ import annotations

import torch

from ..model.logits import best_tokens


def choose_greedy(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> tuple[int, int | None]:
    """Returns the full model's token at one position, and the index of the drafted token it confirms, or ``None``."""
    token = int(best_tokens(scores))
    return token, drafted.index(token) if token in drafted else None
