"""Attention as kernels of a GPU compute it that return what they have summed."""

from __future__ import annotations

import torch


def attention_with_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output ``[b, k, m, h]``, and the logarithm ``[b, k, m]`` of each sum of exponentiated scores."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale) + mask
    return scores.softmax(-1) @ value, scores.logsumexp(-1)
