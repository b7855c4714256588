"""Attention masks for tokens at arbitrary positions: ragged rows, windows and token trees in one rule.

Transformers describes each mask (causal, sliding window, chunks) as a function of a query's and a key's position and
expands it over a rectangle of consecutive ones. While a :class:`Geometry` is active in the current thread, the same
function is expanded over the real positions instead, and tokens of a draft tree see their ancestors only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import grouped_attention
from .layout import TreeLayout
from .prompt import Holes
from .transfer import RowNumbers

# sdpa's kernels on a GPU need a multiple of this many numbers from each row of a mask to the next.
_ALIGNED = 8


@dataclass
class Geometry:
    """The positions of the tokens of one forward.

    Attributes:
        query_positions: ``[b, s]`` position of each token that runs.
        length: ``n``, number of cache slots.
        key_positions: ``[b, n]`` position of the token in each slot, ``None`` where it is the slot's number.
        is_even: whether all rows are at the same positions.
        is_fixed: whether masks are for any positions of the tokens, so that there always is one.
        visible: ``[b, s, n]`` what a token may see at most, or ``None`` where positions alone decide.
        grouped: masks, each with its layout for grouped query heads once that was made.
    """

    query_positions: torch.Tensor
    length: int
    key_positions: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    is_even: bool = False
    is_fixed: bool = False
    grouped: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        positions: torch.Tensor,
        cursors: RowNumbers,
        nodes: TreeLayout | None,
        first_node: int,
        holes: Holes | None,
    ) -> Geometry:
        """The geometry of tokens at positions ``[b, s]``, which may be nodes of a tree; see :meth:`Target.step`."""
        device = positions.device
        length = max(cursors) + positions.shape[1]
        keys: torch.Tensor | None = None
        visible: torch.Tensor | None = None
        if nodes is not None:
            # The slots of the tree: from each row's first node on, one per node, in order.
            slots = cursors.on(device) - first_node + torch.arange(nodes.size, device=device)
            keys, visible = nodes.keys(slots.expand(len(cursors), -1), length, first_node)
        if holes is not None:
            keys = torch.arange(length, device=device)[None] if keys is None else keys
            positions, keys = holes.at(positions), holes.at(keys)
        return cls(positions, length, keys, visible, cursors.are_equal and holes is None)

    def for_groups(self, mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
        """Lays out ``mask`` ``[b, 1, s, n]`` as ``[b, 1, group * s, n]`` for query heads one after another, additive.

        Done once per forward, with rows aligned as GPUs need them: sdpa would convert a boolean mask, and pad one of
        another width, in each layer.
        """
        key = (id(mask), group, dtype)
        if key not in self.grouped:
            b, _, s, n = mask.shape
            wide = mask.new_zeros((b, 1, group, s, -(-n // _ALIGNED) * _ALIGNED), dtype=dtype)
            if mask.dtype is torch.bool:
                wide[..., :n].masked_fill_(~mask[:, :, None], -torch.inf)
            else:
                wide[..., :n] = mask[:, :, None]
            laid_out = wide.view(b, 1, group * s, -1)[..., :n]
            if mask.device != self.query_positions.device:
                return laid_out  # a model over several devices copies the mask for each layer
            # The mask itself is kept too: once it is freed, another one could get its id.
            self.grouped[key] = mask, laid_out
        return self.grouped[key][1]


def padded_mask(padding: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the attention mask ``[b, length]`` of left-padded prompts ``[b, m]`` and all tokens after them."""
    missing = length - padding.shape[1]
    if missing <= 0:
        return padding[:, :length]
    return torch.cat([padding, padding.new_ones(padding.shape[0], missing)], dim=1)


class _Current(threading.local):
    geometry: Geometry | None = None


_current = _Current()


@contextmanager
def at_positions(geometry: Geometry | None) -> Iterator[None]:
    """Builds masks from ``geometry`` in this thread (``None``: as transformers builds them)."""
    previous = _current.geometry
    _current.geometry = geometry
    try:
        yield
    finally:
        _current.geometry = previous


def _speculative_mask(original: Callable[..., Any], additive: bool) -> Callable[..., Any]:
    def mask(
        *args: Any,
        mask_function: Callable[..., torch.Tensor],
        allow_is_causal_skip: bool = True,
        local_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        geometry = _current.geometry
        if geometry is None:
            return original(
                *args,
                mask_function=mask_function,
                allow_is_causal_skip=allow_is_causal_skip,
                local_size=local_size,
                dtype=dtype,
                **kwargs,
            )
        b, s = geometry.query_positions.shape
        n = geometry.length
        last = s == 1 and (b == 1 or geometry.is_even) and geometry.visible is None
        everything = last and (local_size is None or n <= local_size)
        if everything and allow_is_causal_skip and not additive and not geometry.is_fixed:
            return None
        keys, device = geometry.key_positions, geometry.query_positions.device
        if keys is None:
            keys = torch.arange(n, device=device)[None]
        batch = torch.arange(b, device=device)[:, None, None, None]
        # Masks are the same for all heads, so the row indices can be passed as head indices.
        allowed = mask_function(
            batch, batch[0, 0, 0, 0], geometry.query_positions[:, None, :, None], keys[:, None, None, :]
        ).expand(b, 1, s, n)
        if geometry.visible is not None:
            allowed = allowed & geometry.visible[:, None]
        if not additive:
            return allowed
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(dtype).min)

    return mask


def _speculative_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        geometry = _current.geometry
        if geometry is None:
            return original(module, query, key, value, *args, **kwargs)
        return grouped_attention(geometry.for_groups, module, query, key, value, *args, **kwargs)

    return attention


_lock = threading.Lock()
_users = 0
# Each interface, with what it had of its own by the names that were replaced; ``None`` where it had nothing.
_replaced: tuple[tuple[Any, dict[str, Any]], ...] = ((ALL_MASK_ATTENTION_FUNCTIONS, {}), (ALL_ATTENTION_FUNCTIONS, {}))


def served_attention() -> list[str]:
    """Returns the names of the attention implementations that are served, all flash kernels among them.

    Those of the kernels hub are registered by the names of their repositories once a model uses them.
    """
    names = list(ALL_MASK_ATTENTION_FUNCTIONS)
    # "paged|..." needs a paged cache.
    return [
        name for name in names if name in ("eager", "sdpa", "flex_attention") or ("flash" in name and "|" not in name)
    ]


@contextmanager
def speculative_attention() -> Iterator[None]:
    """Lets transformers' attention obey the :class:`Geometry` of the thread; threads without one are not affected.

    Every fused implementation (sdpa, flash, flex) is replaced by sdpa while a geometry is active, since the others take
    no mask of this kind; eager attention keeps its own code and gets the additive mask that it expects.
    """
    global _users
    with _lock:
        _replace()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore()


def _replace() -> None:
    """Replaces what was not yet: a kernel may have been registered since another thread's generation began."""
    for interface, before in _replaced:
        for name in served_attention():
            if name in before or name not in interface:
                continue
            before[name], original = interface._local_mapping.get(name), interface[name]
            if interface is ALL_ATTENTION_FUNCTIONS:
                interface[name] = _speculative_attention(original)
            else:
                interface[name] = _speculative_mask(original, additive=name == "eager")


def _restore() -> None:
    for interface, before in _replaced:
        for name, own in before.items():
            if own is not None:
                interface[name] = own
            else:
                interface._local_mapping.pop(name, None)
        before.clear()
