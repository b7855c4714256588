"""A KV cache written in place, so that rejecting a draft costs nothing.

Each layer has one buffer for keys and one for values. In every row the slot of a token is its position in the text, so
a forward writes at a cursor of each row, and what lies beyond the cursor is simply overwritten later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ..anatomy import Anatomy
from ..graphs.shapes import BufferPool, step_above
from ..layout import TreeLayout
from ..transfer import RowNumbers, Uploads, upload
from .layer_buffers import Bank
from .layers import RecurrentLayer, SpeculativeLayer
from .recurrent_states import StateLog, StateUpdate
from .window import Extent, Window, rows_of

# Capacities are multiples of the grain, so that prompts of similar lengths have keys of the same strides.
_GROWTH, _GRAIN = 1.25, 256
_GRAPH_GRAIN = 64  # of windows, where few shapes are wanted: room for the longest forward that is a graph, twice
# Layers whose keys share a buffer: views for all take 0.6 µs each, those of single layers 1.8 (torch 2.13). While
# buffers grow, so many layers are there twice.
_TOGETHER = 8


class SpeculativeCache(Cache, Extent):
    """In-place KV cache with one write cursor per row, frozen while a forward runs."""

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        capacity: int,
        shapes: Sequence[Hashable | None] = (),
        window: Window | None = None,
    ) -> None:
        """``shapes`` are equal for layers whose keys and values have the same shape and device, ``None`` if unknown."""
        super().__init__(layers=[SpeculativeLayer(self) for _ in range(num_layers)])
        self.shapes, self._banks = shapes, list[Bank]()
        self.window = window  # what is kept in layers that see the last tokens alone
        self.capacity = self._text_slots = capacity
        self.write_at([0] * batch_size)
        self.pool: BufferPool | None = None  # where the buffers are, where graphs look for them
        self.owner = ""  # whose they are, where caches share a pool
        self.state_update, self.uploads = StateUpdate(self.cursors), Uploads()
        self.seeks = 0  # forwards so far
        self._buffers: tuple[Hashable, list[torch.Tensor]] = None, []  # of all layers, and what they depend on
        self._history = 0
        self.recurrent: list[RecurrentLayer] = []  # the layers with recurrent states
        # Whether code runs beside the model that the tests do not have: it gets all rows, but no keys and values.
        self.has_unknown_readers = False
        self.was_given = False  # whether a cache of the user's lacks what is here

    @property
    def has_few_sizes(self) -> bool:
        """Whether only few capacities are used, and so only few shapes of forwards."""
        return self.pool is not None

    @property
    def _logs(self) -> list[StateLog]:
        return [log for layer in self.recurrent for log in layer.logs()]

    def look_back(self, slots: int) -> None:
        """Keeps recurrent states of the last ``slots`` slots of the text, at least those of generated tokens."""
        self._history = max(self._history, slots)

    def commit(self, roots: Sequence[int]) -> None:
        """Moves the checkpoint of recurrent states, and the end of windows, to these slots, one for each row."""
        for log in self._logs:
            log.commit(roots, self._history)
        if self.window is not None:
            self.window.roots = RowNumbers.of(roots)

    def reserve(self, slots: int) -> None:
        """Reserves at least ``slots`` slots after the longest text that the initial capacity was for."""
        self.capacity = max(self.capacity, self._text_slots + slots)

    def seek(
        self,
        cursors: Sequence[int],
        new_slots: int,
        counts: Sequence[int] | None = None,
        nodes: TreeLayout | None = None,
        first_node: int = 0,
    ) -> None:
        """Sets where each row's next forward writes its tokens, and makes room there; see :class:`StateUpdate`."""
        self.write_at(cursors)
        if self.recurrent:
            self.state_update = StateUpdate(self.cursors, None if counts is None else RowNumbers.of(counts), nodes)
        self.seeks += 1
        if (needed := self.max_cursor + new_slots) > self.capacity:
            self.capacity = max(needed, int(self.capacity * _GROWTH))
        self.round_up()
        if self.window is not None:
            self.window.grain = _GRAPH_GRAIN if self.has_few_sizes else 1
            before = first_node + (nodes.hidden if nodes is not None else 0)
            self.window.seek(self.cursors, new_slots, counts, before, self.capacity)

    def round_up(self) -> None:
        """Makes the capacity one of those that are in use."""
        self.capacity = step_above(self.capacity) if self.has_few_sizes else -(-self.capacity // _GRAIN) * _GRAIN

    def stay(self) -> None:
        """Lowers the capacity to the slots that there are, after memory for more has run out."""
        for bank in self._banks:
            bank.extent.capacity = min(bank.extent.capacity, bank.of[0].shape[2])
        self._buffers = None, []

    def let_go(self) -> None:
        """Frees the memory."""
        self.layers.clear()
        self.recurrent.clear()
        self._banks.clear()
        self._buffers = None, []

    def bank(self, name: str, layer: int, states: torch.Tensor) -> Bank:
        """Where a layer's keys, or values, are to be: with those of further layers that are expected to be alike."""
        of_layer = [bank for bank in self._banks if bank.name == name and layer in bank.numbers]
        for bank in of_layer:
            if bank.fits(states):
                return bank
        layers, shape = [layer], self.shapes[layer] if layer < len(self.shapes) else None
        if shape is not None and not of_layer:
            layers = [later for later in range(layer, len(self.shapes)) if self.shapes[later] == shape][:_TOGETHER]
        self._banks.append(Bank(self, self.layers[layer].extent, name, layers, states))
        return self._banks[-1]

    def release(self, layer: SpeculativeLayer, name: str) -> None:
        """Frees what a layer keeps, as soon as no other one shares the buffer."""
        bank = layer.banks.pop(name)
        self._buffers = None, []
        del bank.numbers[layer.index]
        if not bank.numbers:
            self._banks.remove(bank)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of keys and values of all layers that have any, grown to the capacity, without unknown slots."""
        key = self.capacity, len(self.cursors), len(self._banks), self.pool
        if self.window is not None or self._buffers[0] != key:
            for bank in self._banks:
                bank.fill(self.capacity)
            self._buffers = key, [buffer for layer in self.written for buffer in layer.buffers()]
        return self._buffers[1]

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers are."""
        return tuple(bank.of[0].data_ptr() for bank in self._banks)

    @property
    def is_filled(self) -> bool:
        """Whether any layer keeps something of the text."""
        return bool(self.written) or not all(log.is_empty for log in self._logs)

    @property
    def written(self) -> list[Any]:
        """The layers that keep something; some models have others, too."""
        return [layer for layer in self.layers if layer.is_initialized]

    @contextmanager
    def written_at(self, slots: torch.Tensor, buffers: Sequence[torch.Tensor], bases: Any = None) -> Iterator[None]:
        """Makes forwards write to slots ``[b, s]`` of these buffers, see :meth:`buffers`, whatever the cursors are;
        those of windows begin at slots ``bases`` ``[b, 1]``."""
        self.fixed_slots, self.fixed_rows = slots, torch.arange(len(slots), device=slots.device)[:, None]
        if self.window is not None:
            self.window.fixed_slots = slots - bases
        try:
            for index, layer in enumerate(self.written):
                layer.buffers_of_graphs = tuple(buffers[2 * index : 2 * index + 2])
            yield
        finally:
            self.fixed_slots = None
            if self.window is not None:
                self.window.fixed_slots = None
            for layer in self.written:
                layer.buffers_of_graphs = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values ``[b, k, s, h]`` at the cursors, and returns all up to the furthest one."""
        return self.layer(layer_idx).update(key_states, value_states)

    def layer(self, index: int) -> Any:
        while len(self.layers) <= index:
            self.layers.append(SpeculativeLayer(self))
        return self.layers[index]

    def keep_rows(self, kept: list[int]) -> None:
        self.write_at(rows_of(self.cursors, kept))
        if self.window is not None:
            self.window.keep_rows(kept)
        for bank in self._banks:
            bank.keep_rows(kept)
        for layer in self.recurrent:
            layer.keep_rows(kept)

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves accepted tokens' keys and values, for each ``(row, from slot, to slot)``."""
        if not moves:
            return
        for log in self._logs:
            log.keep_path(moves)
        places: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        for bank in self._banks:
            key = device, bases = bank.of[0].device, bank.bases
            if key not in places:
                base_of = [0] * len(self.cursors) if bases is None else bases
                numbers = [(row, start - base_of[row], end - base_of[row]) for row, start, end in moves]
                places[key] = upload(numbers, device).unbind(1)
            bank.keep_path(*places[key])


def cache_for(
    model: PreTrainedModel,
    anatomy: Anatomy,
    batch_size: int,
    capacity: int,
    like: Cache | None = None,
    moves: bool = False,
) -> SpeculativeCache:
    """Returns the cache that a model needs; ``like`` is its own, ``None`` for a new one. If keys and values come from
    there, and go back, each layer has its own buffers."""
    like = DynamicCache(config=model.config.get_text_config(decoder=True)) if like is None else like
    shapes = [] if moves else [_shape_of(*blocks) for blocks in zip(like.layers, anatomy.attention, strict=False)]
    windows = [window_of(layer) for layer in like.layers]
    window = Window(max(filter(None, windows)), batch_size) if any(windows) else None
    cache = SpeculativeCache(len(like.layers), batch_size, capacity, shapes, window)
    for index, layer in enumerate(like.layers):
        if anatomy.kernels is not None and isinstance(layer, LinearAttentionCacheLayerMixin):
            cache.layers[index] = states = RecurrentLayer(cache)
            states.init_states(layer.number_of_states, anatomy.kernels.recurrence, anatomy.model_name)
            cache.recurrent.append(states)
    for layer, size in zip(cache.layers, windows, strict=True):
        if size is not None:
            layer.extent, layer.is_sliding = window, True
    return cache


def window_of(layer: Any) -> int | None:
    """How many tokens a layer of a dynamic cache lets see each other, ``None`` for all."""
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def _shape_of(like: Any, attention: nn.Module | None) -> Hashable | None:
    """What is equal in layers whose keys and values have the same shape and device, ``None`` where that is unknown."""
    weight = None if attention is None else next(attention.parameters(), None)
    is_recurrent = isinstance(like, LinearAttentionCacheLayerMixin)
    return None if weight is None else (is_recurrent, window_of(like) is None, weight.shape, weight.device)
