"""A KV cache written in place, so that rejecting a draft costs nothing.

Each layer has one buffer for keys and one for values. In every row the slot of a token is its position in the text, so
a forward writes at a cursor of each row, and what lies beyond the cursor is simply overwritten later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from .layout import TreeLayout
from .recurrences import SERVED
from .recurrences.states import StateLayer, StateLog, StateUpdate
from .traceable import ChangingNumber, Place, size_for, step_above
from .transfer import RowNumbers, upload

# Capacities are multiples of the grain, so that prompts of similar lengths have keys of the same strides.
_GROWTH, _GRAIN = 1.25, 256


class _SpeculativeLayer(CacheLayerMixin):
    """Keys and values of one layer: ``[b, k, slots, h]``, valid up to the end that the cache tracks."""

    is_sliding = False

    def __init__(self, cache: SpeculativeCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.filled = 0  # slots that hold numbers in all rows; what is in the others is not known
        self.keys = self._buffer("keys", key_states)
        self.values = self._buffer("values", value_states)
        self.is_initialized = True

    def _buffer(self, name: str, states: torch.Tensor) -> torch.Tensor:
        b, k, _, h = states.shape
        shape, place = (b, k, self._cache.capacity, h), self._cache.place
        if place is None:
            return states.new_empty(shape)
        return place.buffer((name, self._cache.layers.index(self)), shape, states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, length = self._cache, key_states.shape[2]
        start, end, places = cache.max_cursor, cache.max_cursor + length, cache.places(length, key_states.device)
        if cache.fixed_slots is not None:
            end = self.keys.shape[2]
        elif places is None and start <= self.filled:
            self.grow()
            self.filled = max(self.filled, end)
        else:
            self.fill(-(-end // _GRAIN) * _GRAIN)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if places is None:
                buffer.narrow(2, start, length).copy_(states)  # half the host time of slices
            elif cache.fixed_slots is None:  # half the time of the other way
                buffer.scatter_(2, places[1][:, None, :, None].expand_as(states), states)
            else:
                # Torch's compiler does this in place; with `scatter_` it would copy the whole buffer twice.
                rows, slots = places
                buffer[rows, :, slots] = states.transpose(1, 2)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def fill(self, end: int) -> None:
        """Fills slots up to ``end``: a NaN in a masked value still reaches the output through 0 * NaN."""
        self.grow()
        if end > self.filled and self._cache.place is None:  # those of a place begin with zeros
            for buffer in (self.keys, self.values):
                buffer[:, :, self.filled : end] = 0
            self.filled = min(end, self.keys.shape[2])

    def grow(self) -> None:
        if self.keys.shape[2] < self._cache.capacity:
            self.keys, self.values = self._grown("keys", self.keys), self._grown("values", self.values)

    def _grown(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        before = buffer if self._cache.place is None else buffer.clone()  # the larger one may lie in the same memory
        grown = self._buffer(name, before)
        grown[:, :, : before.shape[2]] = before
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._cache.fixed_slots is not None:
            return self._cache.capacity, 0
        return self._cache.max_cursor + query_length, 0

    def get_seq_length(self) -> Any:
        return self._cache.max_cursor if self._cache.fixed_slots is None else ChangingNumber()

    def get_max_length(self) -> int:
        return -1


class _RecurrentLayer(_SpeculativeLayer, StateLayer):
    """Recurrent states of one layer, with keys and values if it has attention, too."""


class SpeculativeCache(Cache):
    """In-place KV cache with one write cursor per row, frozen while a forward runs."""

    def __init__(self, num_layers: int, batch_size: int, capacity: int) -> None:
        super().__init__(layers=[_SpeculativeLayer(self) for _ in range(num_layers)])
        self.capacity = self._text_slots = capacity
        self.cursors = RowNumbers([0] * batch_size)
        self.max_cursor = 0
        self.fixed_slots: torch.Tensor | None = None  # [b, s] where a forward writes, where not at the cursors
        self.has_few_sizes = False  # only few capacities are used, and so only few shapes of forwards
        self.place: Place | None = None  # where the buffers are, where that matters
        self.state_update = StateUpdate(self.cursors)
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._history = 0
        self.has_states = False  # recurrent ones

    @property
    def _logs(self) -> list[StateLog]:
        layers = self.layers if self.has_states else []
        return [log for layer in layers if isinstance(layer, _RecurrentLayer) for log in layer.logs()]

    def look_back(self, slots: int) -> None:
        """Keeps recurrent states of the last ``slots`` slots of the text, at least those of generated tokens."""
        self._history = max(self._history, slots)

    def first_slots(self) -> list[int]:
        """For each row the first slot at which a forward can begin; 0 unless older recurrent states were dropped."""
        known = [log.floor.slots for log in self._logs if not log.is_empty]
        return [max(slots) for slots in zip([0] * len(self.cursors), *known, strict=True)]

    def commit(self, roots: Sequence[int]) -> None:
        """Moves the checkpoint of recurrent states to these slots, one for each row."""
        for log in self._logs:
            log.commit(roots, self._history)

    def reserve(self, slots: int) -> None:
        """Reserves at least ``slots`` slots after the longest text that the initial capacity was for."""
        if self.has_few_sizes:
            slots = size_for(slots) or slots  # graphs pad tokens
        self.capacity = max(self.capacity, self._text_slots + slots)

    def seek(
        self,
        cursors: Sequence[int],
        new_slots: int,
        counts: Sequence[int] | None = None,
        nodes: TreeLayout | None = None,
    ) -> None:
        """Sets where each row's next forward writes its tokens, and makes room there; see :class:`StateUpdate`."""
        self.cursors = RowNumbers.of(cursors)
        if self.has_states:
            self.state_update = StateUpdate.of(self.cursors, counts, nodes)
        self.max_cursor = max(cursors)
        self._places = None
        if (needed := self.max_cursor + new_slots) > self.capacity:
            self.capacity = max(needed, int(self.capacity * _GROWTH))
        self.capacity = step_above(self.capacity) if self.has_few_sizes else -(-self.capacity // _GRAIN) * _GRAIN

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of keys and values of all layers that have any, grown to the capacity, without unknown slots."""
        for layer in self._written:
            layer.fill(self.capacity)
        return [buffer for layer in self._written for buffer in (layer.keys, layer.values)]

    @property
    def _written(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]

    @contextmanager
    def written_at(self, slots: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Makes forwards write to slots ``[b, s]`` of these buffers, see :meth:`buffers`, whatever the cursors are."""
        layers = self._written
        before = [(layer.keys, layer.values) for layer in layers]
        self.fixed_slots = slots
        try:
            for index, layer in enumerate(layers):
                layer.keys, layer.values = buffers[2 * index : 2 * index + 2]
            yield
        finally:
            self.fixed_slots = None
            for layer, (keys, values) in zip(layers, before, strict=True):
                layer.keys, layer.values = keys, values

    def places(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows ``[b, 1]`` and slots ``[b, length]`` of the forward, ``None`` where all write at ``max_cursor``."""
        if self.fixed_slots is not None:
            return torch.arange(len(self.fixed_slots), device=device)[:, None], self.fixed_slots
        if self.cursors.are_equal:
            return None
        if self._places is None or self._places[1].device != device:
            rows = torch.arange(len(self.cursors), device=device)[:, None]
            self._places = rows, self.cursors.onwards(length, device)
        return self._places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values ``[b, k, s, h]`` at the cursors, and returns all up to the furthest one."""
        while len(self.layers) <= layer_idx:
            self.layers.append(_SpeculativeLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    def keep_rows(self, kept: list[int]) -> None:
        self.cursors = RowNumbers([self.cursors[row] for row in kept])
        self._places = None
        rows: torch.Tensor | None = None
        for layer in self._written:
            device = layer.keys.device
            rows = upload(kept, device) if rows is None else rows.to(device)
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        for log in self._logs:
            log.keep_rows(kept)

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves accepted tokens' keys and values, for each ``(row, from slot, to slot)``."""
        if not moves:
            return
        for log in self._logs:
            log.keep_path(moves)
        places: torch.Tensor | None = None
        for layer in self._written:
            device = layer.keys.device
            places = upload(moves, device) if places is None else places.to(device)
            rows, source, target = places.unbind(1)
            for buffer in (layer.keys, layer.values):
                buffer[rows, :, target] = buffer[rows, :, source]

    def take_in(self, other: Cache, columns: torch.Tensor | None, slots: list[int]) -> None:
        """Copies a cache that an earlier ``generate`` returned: its ``columns`` ``[b, m]`` (``None``: all) go to slots
        ``0..m-1``, of which each row has ``slots``. The cursors do not change."""
        length = other.get_seq_length()
        for state, before in zip(self.layers, other.layers, strict=False):
            if isinstance(state, _RecurrentLayer):
                state.take_states(before, slots)
        for index, source in enumerate(other.layers):
            if getattr(source, "keys", None) is None:
                continue
            while len(self.layers) <= index:
                self.layers.append(_SpeculativeLayer(self))
            layer = self.layers[index]
            layer.lazy_initialization(source.keys, source.values)
            for buffer, states in ((layer.keys, source.keys), (layer.values, source.values)):
                # A sliding-window layer has dropped its oldest tokens, which no window covers any more.
                kept = states.shape[2]
                whole = states.new_zeros(*states.shape[:2], length, states.shape[3])
                whole[:, :, length - kept :] = states
                if columns is not None:
                    whole = _picked(whole, columns.to(states.device))
                buffer[:, :, : whole.shape[2]] = whole
            layer.filled = max(layer.filled, whole.shape[2])

    def hand_back(self, other: Cache, columns: torch.Tensor | None, length: int, slots: Sequence[int]) -> None:
        """Fills a ``DynamicCache`` as ``generate`` without us would have left it. ``columns`` ``[b, length]`` are
        slots, -1 for padding (``None``: all in order), ``slots`` the number of tokens of each row."""
        other.reset()
        for layer in other.layers:
            if getattr(layer, "is_initialized", False):
                # Older versions' `reset` leaves zeros, to which `update` would append.
                layer.keys = layer.values = None
                layer.is_initialized = False
        for index, layer in enumerate(self.layers):
            if isinstance(layer, _RecurrentLayer):
                layer.hand_states(other.layers[index], slots)
            if not layer.is_initialized:
                continue
            pair = []
            for buffer in (layer.keys, layer.values):
                if columns is None:
                    pair.append(buffer[:, :, :length].clone())
                else:
                    places = columns.to(buffer.device)
                    picked = _picked(buffer, places.clamp(min=0))
                    pair.append(picked.masked_fill((places < 0)[:, None, :, None], 0).contiguous())
            other.update(*pair, layer_idx=index)


def cache_for(model: PreTrainedModel, batch_size: int, capacity: int, like: Cache | None = None) -> SpeculativeCache:
    """Returns the cache that a model needs; ``like`` is its own, ``None`` for a new one."""
    like = DynamicCache(config=model.config.get_text_config(decoder=True)) if like is None else like
    cache = SpeculativeCache(len(like.layers), batch_size, capacity)
    if model.config.model_type in SERVED:
        cache.has_states, recurrence = True, SERVED[model.config.model_type]
        for index, layer in enumerate(like.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                cache.layers[index] = states = _RecurrentLayer(cache)
                states.init_states(layer.number_of_states, recurrence, type(model).__name__)
    return cache


def _picked(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys or values ``[b, k, n, h]`` in slots ``[b, n]``."""
    return states[torch.arange(len(states), device=states.device)[:, None], :, slots].transpose(1, 2)
