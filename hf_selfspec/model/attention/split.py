"""Attention of few tokens over many keys on a GPU, where kernels that take a mask do not split the keys.

Such a kernel runs one block for each row and key head, 8 of them where an H200 could run 132, and each walks all keys.
Here parts of the keys are further heads of the same kernel, and their results are put together by the logarithms of the
sums that it returns. Five tokens of 32 query heads and 8 key heads in bfloat16, microseconds a layer in a graph on an
H200 (torch 2.11): 26.6 and 28.6 in parts over 1k keys, 89 and 35 over 4k, 176 and 50 over 8k, 721 and 102 over 32k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

# Maps queries [b, k, m, h], keys and values [b, k, n, h], an additive mask [b, k, m, n] and a scale to the output
# [b, k, m, h] and the logarithm [b, k, m] of the sum of exponentiated scores.
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# sdpa's kernels on a GPU need a multiple of this many numbers from each row of a mask to the next.
ALIGNED = 8
# The fewest keys that are split, the fewest of a part, and the most bytes that masks of parts may take, which are
# repeated for each key head.
_FEWEST_KEYS, _FEWEST_OF_PART, _MOST_BYTES = 1024, 256, 2**26
# What is added to the scores of hidden keys: with infinity, a part without any other key would be undefined.
_HIDDEN = -1e30


def _efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    output, sums, *_ = efficient(query, key, value, mask, True, scale=scale)
    return output, sums[..., : query.shape[2]]


def parts_for(query: torch.Tensor, key: torch.Tensor) -> int:
    """Into how many parts keys ``[b, k, n, h]`` are split for queries ``[b, k, m, h]``, 1 for as they are."""
    is_large = query.is_cuda and key.shape[2] >= _FEWEST_KEYS and query.dtype is not torch.float64
    return _parts(query.device, query.dtype, *query.shape, key.shape[2]) if is_large else 1


@lru_cache
def _parts(device: torch.device, dtype: torch.dtype, b: int, k: int, m: int, h: int, n: int) -> int:
    if b * k * m * n * dtype.itemsize > _MOST_BYTES:
        return 1
    blocks, parts = torch.cuda.get_device_properties(device).multi_processor_count, 1
    while n % (2 * parts * ALIGNED) == 0 and n // (2 * parts) >= _FEWEST_OF_PART and b * k * parts < blocks:
        parts *= 2
    shapes = ((b, k * parts, m, h), (b, k * parts, n // parts, h), (b, k * parts, m, n // parts))
    queries, keys, masks = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    return parts if can_use_efficient_attention(SDPAParams(queries, keys, keys, masks, 0.0, False, False)) else 1


def masks_of_parts(mask: torch.Tensor, heads: int, parts: int) -> torch.Tensor:
    """Lays out an additive mask ``[b, 1, m, n]`` as ``[b, heads * parts, m, n / parts]``."""
    b, _, m, n = mask.shape
    finite = mask.clamp(min=max(_HIDDEN, torch.finfo(mask.dtype).min))
    each = finite.view(b, 1, m, parts, n // parts).transpose(2, 3)
    return each.expand(b, heads, parts, m, n // parts).flatten(1, 2)


def attention_in_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: torch.Tensor,
    scale: float | None,
    kernel: Kernel = _efficient_attention,
) -> torch.Tensor:
    """The output ``[b, k, m, h]`` of attention, for ``masks`` of parts, see :func:`masks_of_parts`."""
    (b, k, m, h), n, parts = query.shape, key.shape[2], masks.shape[1] // query.shape[1]
    keys, values = (states.view(b, k, parts, n // parts, -1).flatten(1, 2) for states in (key, value))
    queries = query[:, :, None].expand(b, k, parts, m, h).flatten(1, 2)
    output, sums = kernel(queries, keys, values, masks, scale)
    shares = sums.view(b, k, parts, m, 1).softmax(2)
    return (output.view(b, k, parts, m, -1) * shares).sum(2).to(output.dtype)


def takes_lines(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a kernel that splits keys knows by itself which of them tokens at a text's end see."""
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, key, key, None, 0.0, False, True))
