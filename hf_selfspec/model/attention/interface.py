"""Attention for a few tokens at arbitrary positions: ragged rows, windows and token trees in one rule.

Transformers describes each mask (causal, sliding window, chunks) as a function of a query's and a key's position and
expands it over a rectangle of consecutive ones. While a :class:`MaskSpec` is active in the current thread, the same
function is expanded over the real positions instead, and tokens of a draft tree see their ancestors only. Keys and
values are not copied for the query heads that share them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import unsupported
from ..cache.speculative_cache import Window
from ..internals import registered
from ..layout import StepTokens
from ..module_tools import libraries_of
from ..patching import InstanceForwards, PerThread, SharedChange
from ..transfer import RowNumbers
from .exact import View, attention_of_each, views_of
from .split import ALIGNED, attention_in_parts, masks_of_parts, parts_for, takes_lines

# How many masks of a forward are kept in another layout; those of sparse attention differ in every layer.
_KEPT_MASKS = 8
# The number of queries up to which all heads of a group share one call.
_FEW = 64
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
_ORIGINAL = "_hf_selfspec_original"  # the attribute of our functions that holds what each replaces
# The arguments that transformers 5.17 to 5.24 passes for a mask besides those that :meth:`MaskSpec.mask` reads, and
# that follow from the positions.
_IMPLIED = {
    *("batch_size", "q_length", "q_offset", "attention_mask", "device"),
    *("allow_is_bidirectional_skip", "allow_torch_fix", "use_vmap"),
}


@dataclass
class MaskSpec:
    """What the masks of one forward follow from: the positions of its tokens."""

    query_positions: torch.Tensor  # [b, s] position of each token that runs
    length: int  # n, number of cache slots
    key_positions: torch.Tensor | None = None  # [b, n] of the token in each slot, None where it is the slot's number
    visible: torch.Tensor | None = None  # [b, s, n] what a token may see at most, or None where positions alone decide
    is_even: bool = False  # whether all rows are at the same positions
    is_fixed: bool = False  # whether masks are for any positions of the tokens, so that there always is one
    alone: StepTokens | None = None  # the tokens of one row, where each counts as if it were alone, see ``exact.py``
    offset: int = 0  # slot of the text that the first cache slot stands for, as layers report it
    window: MaskSpec | None = None  # that of layers which keep the last tokens alone
    limit: int | None = None  # how many of them one token sees at most
    # By the ids of masks, which are kept with them, since a later mask could get the id of one that was freed.
    views: dict[int, tuple[torch.Tensor, list[View]]] = field(default_factory=dict)  # what tokens see alone
    served: set[int] = field(default_factory=set)  # ids of the modules whose attention has used `views`
    lines: dict[int, torch.Tensor] = field(default_factory=dict)  # masks in which a token sees all up to its own slot
    grouped: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # layouts for query heads

    @classmethod
    def of(cls, step: StepTokens, positions: torch.Tensor, window: Window | None, is_exact: bool = False) -> MaskSpec:
        """The spec of a forward's tokens at positions ``[b, s]``, which may be nodes of a tree."""
        spec = cls._read(step, positions, max(step.starts) + positions.shape[1], None)
        if window is not None:
            spec.window = cls._read(step, positions, window.length, window.firsts)
            spec.window.offset, spec.window.limit = window.offset, window.size
        if is_exact:
            spec.alone = (spec.window or spec).alone = step
        return spec

    @classmethod
    def _read(cls, step: StepTokens, positions: torch.Tensor, length: int, firsts: RowNumbers | None) -> MaskSpec:
        """The spec for layers whose attention reads ``length`` slots from each row's first on (``None``: from 0)."""
        device, cursors, nodes = positions.device, step.starts, step.nodes
        spec = cls(positions, length, is_even=cursors.are_equal)
        if nodes is not None:
            # The slots of the tree: from each row's first node on, one per node, in order.
            starts = cursors if firsts is None else cursors.minus(firsts)
            slots = starts.on(device) - step.first_node + torch.arange(nodes.size, device=device)
            spec.key_positions, spec.visible = nodes.keys(slots.expand(len(cursors), -1), length, step.first_node)
        elif not (firsts is None or firsts.are_equal):
            spec.key_positions = torch.arange(length, device=device)[None]
        if firsts is not None:
            spec.is_even &= firsts.are_equal
            spec.begin_at(firsts.on(device), min(firsts) < 0)
        return spec

    def begin_at(self, firsts: torch.Tensor, is_before: bool = True) -> None:
        """Makes slots ``firsts`` ``[b, 1]`` of the text the first ones, and hides those before the text, which the
        windows of short rows have."""
        if self.key_positions is None:
            return
        self.key_positions = self.key_positions + firsts
        if is_before:
            is_text = (self.key_positions >= 0)[:, None].expand(-1, self.query_positions.shape[1], -1)
            self.visible = is_text if self.visible is None else self.visible & is_text
            self.key_positions = self.key_positions.clamp(min=0)

    def mask(
        self,
        additive: bool,
        mask_function: Callable[..., torch.Tensor],
        allow_is_causal_skip: bool = True,
        local_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        config: Any = None,
        **others: Any,
    ) -> torch.Tensor | None:
        """Expands a function of positions to the mask ``[b, 1, s, n]``, ``None`` where every token sees everything."""
        if unknown := sorted(others.keys() - _IMPLIED):
            raise unsupported(
                f"the model has masks made with {', '.join(unknown)}, which this version of hf_selfspec does not know",
                "Take another version of transformers",
            )
        (b, s), n = self.query_positions.shape, self.length
        is_last = s == 1 and (b == 1 or self.is_even) and self.visible is None
        # A chunk may begin between slots that a window of its size covers.
        is_chunk = local_size == getattr(config, "attention_chunk_size", None)
        is_cut = (self.offset > 0 and is_chunk) or self.key_positions is not None
        sees_all = is_last and (local_size is None or (n <= local_size and not is_cut))
        if sees_all and allow_is_causal_skip and not additive and not self.is_fixed and self.alone is None:
            return None
        keys, device = self.key_positions, self.query_positions.device
        if keys is None:
            keys = torch.arange(self.offset, self.offset + n, device=device)[None]
        batch = torch.arange(b, device=device)[:, None, None, None]
        # Masks are the same for all heads, so the row indices can be passed as head indices.
        allowed = mask_function(
            batch, batch[0, 0, 0, 0], self.query_positions[:, None, :, None], keys[:, None, None, :]
        ).expand(b, 1, s, n)
        if self.visible is not None:
            allowed = allowed & self.visible[:, None]
        if not additive:
            is_line = mask_function is causal_mask_function and self.is_even and keys is not self.key_positions
            if is_line and not self.is_fixed and self.visible is None:
                self.lines[id(allowed)] = allowed
            return allowed
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(dtype).min)

    def for_groups(
        self, mask: torch.Tensor, group: int, dtype: torch.dtype, heads: int = 1, parts: int = 1
    ) -> torch.Tensor:
        """Lays out ``mask`` ``[b, 1, s, n]`` as ``[b, 1, group * s, n]`` for grouped query heads, additive, once per
        forward, with rows aligned as sdpa on a GPU needs them, and for so many ``parts`` of the keys of each head."""
        key = (id(mask), group, dtype, heads, parts)
        if key not in self.grouped:
            b, _, s, n = mask.shape
            wide = mask.new_zeros((b, 1, group, s, -(-n // ALIGNED) * ALIGNED), dtype=dtype)
            if mask.dtype is torch.bool:
                wide[..., :n].masked_fill_(~mask[:, :, None], -torch.inf)
            else:
                wide[..., :n] = mask[:, :, None]
            laid_out = wide.view(b, 1, group * s, -1)[..., :n]
            if parts > 1:
                laid_out = masks_of_parts(laid_out, heads, parts)
            if mask.device != self.query_positions.device:
                return laid_out  # a model over several devices copies the mask for each layer
            if len(self.grouped) == _KEPT_MASKS:
                self.grouped.pop(next(iter(self.grouped)))
            self.grouped[key] = mask, laid_out
        return self.grouped[key][1]


_current = PerThread[MaskSpec]()
# Builds masks from a spec in this thread (``None``: as transformers builds them).
at_positions = _current.during


def _speculative_mask(original: Callable[..., Any], additive: bool) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        spec = _current.now
        if spec is None:
            return original(*args, **kwargs)
        if args:  # as nobody in transformers calls it
            kwargs |= inspect.signature(original).bind_partial(*args).arguments
        sizes, of_layer = (kwargs.pop("kv_length"), kwargs.pop("kv_offset", 0)), spec
        if spec.window is not None and sizes == (spec.window.length, spec.window.offset):
            of_layer = spec.window
        expanded = of_layer.mask(additive, **kwargs)
        if spec.alone is not None and expanded is not None:
            views = views_of(spec.alone, original, of_layer.offset, of_layer.limit, **kwargs)
            spec.views[id(expanded)] = expanded, views
        return expanded

    return mask


def _speculative_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    is_of_others = not is_of_transformers(original)

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        spec = _current.now
        if spec is None or is_of_others or not is_sdpa_of_torch():
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        _, views = spec.views.get(id(attention_mask), (None, None))
        if views is not None and kwargs.get("position_bias") is None:
            spec.served.add(id(module))
            return attention_of_each(original, views, module, query, key, value, *args, **kwargs)
        return grouped_attention(spec, module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def attention_functions(implementation: str) -> list[Any]:
    """Returns the functions for masks and attention that are registered for an implementation, below ours."""
    functions = (interface.get(implementation) for interface in (ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS))
    return [getattr(function, _ORIGINAL, function) for function in functions]


def is_of_transformers(function: Any) -> bool:
    """Returns whether an attention function is transformers' own, or none."""
    return function is None or {*libraries_of(function)} == {"transformers"}


def is_sdpa_of_torch() -> bool:
    """Returns whether sdpa, which attention may call, is torch's own."""
    return isinstance(functional.scaled_dot_product_attention, BuiltinFunctionType)


_served = SharedChange()


def served_attention() -> list[str]:
    """The names of the attention implementations that are served, all flash kernels among them."""
    usual, names = ("eager", "sdpa", "flex_attention"), list(ALL_MASK_ATTENTION_FUNCTIONS)
    return [name for name in names if name in usual or ("flash" in name and "|" not in name)]  # "paged|..." is another


def speculative_attention() -> AbstractContextManager[None]:
    """Lets attention obey the :class:`MaskSpec` of the thread; sdpa then replaces the fused implementations."""
    return _served.of(masking_utils, add=_replace)


def _replace(forwards: InstanceForwards) -> None:
    """Replaces functions that are not ours yet: some may have been registered since another thread's call began."""
    for name in served_attention():
        for interface, wrapped in (
            (ALL_MASK_ATTENTION_FUNCTIONS, partial(_speculative_mask, additive=name == "eager")),
            (ALL_ATTENTION_FUNCTIONS, _speculative_attention),
        ):
            if (original := interface.get(name)) is not None and not hasattr(original, _ORIGINAL):
                ours = wrapped(original)
                setattr(ours, _ORIGINAL, original)
                forwards.put(registered(interface), name, ours)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None
) -> torch.Tensor:
    """Torch's attention with an additive mask ``[b, 1, s, n]`` or none, where that would be cuDNN's by the next kernel:
    cuDNN builds a plan for each new shape (23 to 37 ms on an H100) and keeps all of them, and shapes change in every
    round. Torch's switches for it are those of all threads. Prompts go through the kernels of plain ``generate``."""
    if query.is_cuda and not torch.is_grad_enabled() and torch._fused_sdp_choice(query, key, value, mask) == _CUDNN:
        kernels, aten = torch.backends.cuda, torch.ops.aten
        inputs = kernels.SDPAParams(query, key, value, mask, 0.0, False, False)
        if kernels.can_use_flash_attention(inputs):
            return aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]
        if kernels.can_use_efficient_attention(inputs):
            mask = None if mask is None else mask.expand(*query.shape[:3], -1)
            return aten._scaled_dot_product_efficient_attention(query, key, value, mask, False, scale=scale)[0]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def grouped_attention(
    spec: MaskSpec,
    module: Any,
    query: torch.Tensor,  # [b, k*g, s, h]
    key: torch.Tensor,  # [b, k, n, h], as the values
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [b, 1, s, n] boolean or additive, None when every query sees every key
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in which the query heads that share a key head are laid out as further queries of that head, since at
    8k context copies of the keys would cost several times the attention itself."""
    b, heads, s, h = query.shape
    k = key.shape[1]
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None or sinks is not None:
        return _capped_attention(query, key, value, attention_mask, dropout, scaling, softcap, sinks)
    sees_all = s == 1 or kwargs.get("is_causal") is False
    fits = sees_all if attention_mask is None else attention_mask.shape[1] == 1
    if not fits or kwargs.get("position_bias") is not None or dropout > 0.0:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    group = heads // k
    if id(attention_mask) in spec.lines and takes_lines(query, key):
        of_lines = partial(functional.scaled_dot_product_attention, scale=scaling, enable_gqa=group > 1)
        line = of_lines(query, key, value, attn_mask=causal_lower_right(s, key.shape[2]))
        return line.transpose(1, 2).contiguous(), None
    if s > _FEW:
        # Of many queries, as in a prompt that is continued, the heads of a group go through one after another: the mask
        # would be as large again for each of them.
        if attention_mask is not None:
            attention_mask = spec.for_groups(attention_mask, 1, query.dtype)
        parts_of = query.reshape(b, k, group, s, h).unbind(2)
        output = torch.stack([sdpa(part, key, value, attention_mask, scaling) for part in parts_of], dim=2)
    else:
        queries = query.reshape(b, k, group * s, h)
        if attention_mask is None:
            output = sdpa(queries, key, value, None, scaling)
        elif spec.is_fixed and (parts := parts_for(queries, key)) > 1:
            masks = spec.for_groups(attention_mask, group, query.dtype, k, parts)
            output = attention_in_parts(queries, key, value, masks, scaling)
        else:
            output = sdpa(queries, key, value, spec.for_groups(attention_mask, group, query.dtype), scaling)
    if s == 1:
        return output.reshape(b, 1, heads, -1), None
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
    output = functional.dropout(weights, dropout).reshape(b, k, heads // k * s, -1) @ value
    return output.view(b, heads, s, -1).transpose(1, 2).contiguous(), None
