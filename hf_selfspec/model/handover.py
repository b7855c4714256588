"""Keys, values and states that a call takes over from an earlier one and leaves to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from .cache import SpeculativeCache
from .recurrences.states import StateLayer


def take_in(cache: SpeculativeCache, other: Cache, columns: torch.Tensor | None, slots: list[int]) -> None:
    """Copies a cache that an earlier ``generate`` returned: its ``columns`` ``[b, m]`` (``None``: all) go to slots
    ``0..m-1``, of which each row has ``slots``. The cursors do not change."""
    length = other.get_seq_length()
    for state, before in zip(cache.layers, other.layers, strict=False):
        if isinstance(state, StateLayer):
            state.take_states(before, slots)
    for index, source in enumerate(other.layers):
        if getattr(source, "keys", None) is None:
            continue
        layer = cache.layer(index)
        layer.lazy_initialization(source.keys, source.values)
        for bank, buffer, states in zip(layer.banks, layer.buffers(), (source.keys, source.values), strict=True):
            # A sliding-window layer has dropped its oldest tokens, which no window covers any more.
            whole = pad(states, (0, 0, length - states.shape[2], 0))
            if columns is not None:
                whole = _picked(whole, columns.to(states.device))
            buffer[:, :, : whole.shape[2]] = whole
            bank.filled = max(bank.filled, whole.shape[2])


def hand_back(
    cache: SpeculativeCache, other: Cache, columns: torch.Tensor | None, length: int, slots: Sequence[int]
) -> None:
    """Fills a ``DynamicCache`` as ``generate`` without us would have left it. ``columns`` ``[b, length]`` are
    slots, -1 for padding (``None``: all in order), ``slots`` the number of tokens of each row."""
    other.reset()
    for layer in other.layers:
        if getattr(layer, "is_initialized", False):
            # Older versions' `reset` leaves zeros, to which `update` would append.
            layer.keys = layer.values = None
            layer.is_initialized = False
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StateLayer):
            layer.hand_states(other.layers[index], slots)
        if not layer.is_initialized:
            continue
        pair = []
        for buffer in layer.buffers():
            if columns is None:
                pair.append(buffer[:, :, :length].clone())
            else:
                places = columns.to(buffer.device)
                picked = _picked(buffer, places.clamp(min=0))
                pair.append(picked.masked_fill((places < 0)[:, None, :, None], 0).contiguous())
        other.update(*pair, layer_idx=index)


def _picked(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys or values ``[b, k, n, h]`` in slots ``[b, n]``."""
    return states[torch.arange(len(states), device=states.device)[:, None], :, slots].transpose(1, 2)
