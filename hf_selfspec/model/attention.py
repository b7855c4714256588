"""Scaled dot-product attention for a few queries against a long cache, without copying keys or values."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which the query heads that share a key head stand in line as further queries of that head.

    Transformers' sdpa path repeats every key and value head for each query head when there is a mask and more than
    one query; at 8k context that copy costs several times the attention itself.

    Args:
        module: the attention block.
        query: ``[b, k*g, s, h]`` with ``g`` query heads per key head.
        key, value: ``[b, k, n, h]``.
        attention_mask: ``[b, 1, s, n]`` boolean or additive, or ``None`` when every query sees every key.
        dropout, scaling: as in transformers' attention interface.

    Returns:
        ``[b, s, k*g, h]`` and ``None`` for the attention weights.
    """
    b, heads, s, h = query.shape
    k = key.shape[1]
    fits = s == 1 if attention_mask is None else attention_mask.shape[1] == 1
    if k == heads or not fits or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    group = heads // k
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, group, 1)
    output = scaled_dot_product_attention(
        query.reshape(b, k, group * s, h), key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(b, heads, s, value.shape[-1]).transpose(1, 2).contiguous(), None
