"""Scaled dot-product attention for a few queries against a long cache, without copying keys or values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .patching import InstanceForwards, SharedChange

# The number of queries up to which all heads of a group share one call.
_FEW = 64


_without_cudnn = SharedChange()


def without_cudnn_attention() -> AbstractContextManager[None]:
    """Switches cuDNN's attention off, for all threads, until the last one leaves.

    Torch prefers it in 16 bits on Hopper and newer GPUs. It builds a plan for each new shape and stride of its inputs
    (23 to 37 ms on an H100) and keeps all of them, and shapes change in every round.
    """

    def switch_off(forwards: InstanceForwards) -> None:
        was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
        forwards.afterwards(lambda: torch.backends.cuda.enable_cudnn_sdp(was_enabled))
        torch.backends.cuda.enable_cudnn_sdp(was_enabled and not _others_enabled())

    return _without_cudnn.of(torch.backends, switch_off)


def _others_enabled() -> bool:
    """Whether attention has another kernel than cuDNN's: a caller may have chosen that one alone."""
    of = torch.backends.cuda
    return of.flash_sdp_enabled() or of.mem_efficient_sdp_enabled() or of.math_sdp_enabled()


def grouped_attention(
    for_groups: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor],  # see :meth:`MaskSpec.for_groups`
    module: Any,
    query: torch.Tensor,  # [b, k*g, s, h]
    key: torch.Tensor,  # [b, k, n, h], as the values
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [b, 1, s, n] boolean or additive, None when every query sees every key
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which the query heads that share a key head are laid out as further queries of that head.

    Transformers' sdpa path repeats every key and value head for each query head when there is a mask and more than
    one query; at 8k context that copy costs several times the attention itself.
    """
    b, heads, s, h = query.shape
    k = key.shape[1]
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        return _capped_attention(query, key, value, attention_mask, dropout, scaling, softcap, sinks)
    fits = s == 1 if attention_mask is None else attention_mask.shape[1] == 1
    apart = not fits or kwargs.get("position_bias") is not None
    group = heads // k
    # Of many queries, as in a prompt that is continued, the heads of a group go through one after another: the mask
    # would be as large again for each of them.
    together = group if s <= _FEW else 1
    if attention_mask is not None and not apart:
        attention_mask = for_groups(attention_mask, together, query.dtype)
    if apart or group == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    parts = query.reshape(b, k, group // together, together * s, h).unbind(2) if together < group else None
    found = [
        scaled_dot_product_attention(part, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
        for part in parts or (query.reshape(b, k, group * s, h),)
    ]
    output = found[0] if len(found) == 1 else torch.stack(found, dim=2)
    return output.reshape(b, heads, s, value.shape[-1]).transpose(1, 2).contiguous(), None


def _capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [k*g] score of each head's sink
) -> tuple[torch.Tensor, None]:
    """Attention with soft-capped scores (Gemma 2) or attention sinks (gpt-oss), which sdpa does not support."""
    b, heads, s, h = query.shape
    k = key.shape[1]
    scores = query.reshape(b, k, heads // k * s, h) @ key.transpose(2, 3)
    scores = scores.view(b, heads, s, -1) * (h**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(b, -1, s, 1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    output = torch.nn.functional.dropout(weights, dropout).reshape(b, k, heads // k * s, -1) @ value
    return output.view(b, heads, s, -1).transpose(1, 2).contiguous(), None
