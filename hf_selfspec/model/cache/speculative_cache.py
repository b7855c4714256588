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
from ..graphs.captures import BufferPool, step_above
from ..layout import TreeLayout
from ..transfer import RowNumbers, upload
from .layers import LayerBuffers, RecurrentLayer, SpeculativeLayer
from .timeline import StateLog, StateUpdate, Timeline

# Capacities are multiples of the grain, so that prompts of similar lengths have keys of the same strides.
_GROWTH, _GRAIN = 1.25, 256
_GRAPH_GRAIN = 64  # of windows, where few shapes are wanted: room for the longest forward that is a graph, twice
# Layers whose keys share a buffer: views for all take 0.6 µs each, those of single layers 1.8 (torch 2.13). While
# buffers grow, so many layers are there twice.
_TOGETHER = 8
# Room beside the window, as its share and in slots, where no draft needs more: each token costs so many slots' copies.
_SHARE, _LEAST = 8, 16


class WriteRange:
    """Where forwards write, in slots of a buffer, and what attention reads there."""

    capacity = 0  # slots
    start = offset = 0  # the first that attention reads, and the slot of the text that it stands for
    bases: RowNumbers | None = None  # for each row the slot of the text that a buffer's first one is, None for 0
    # Slots that are there before and after a prompt that does not fit into the buffers, None for other forwards.
    overflow: tuple[int, int] | None = None
    next_bases: RowNumbers  # those after this forward
    fixed_slots: torch.Tensor | None = None  # [b, s] where a forward writes, where not at the cursors
    _slots: torch.Tensor | None = None

    def write_at(self, cursors: Sequence[int]) -> None:
        self.cursors = RowNumbers.of(cursors)
        self.max_cursor = max(cursors)
        self._slots = None

    def slots(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Slots ``[b, length]`` that a forward writes, ``None`` where all rows write at ``max_cursor``."""
        if self.cursors.are_equal:
            return None
        if self._slots is None or self._slots.device != device:
            self._slots = self.cursors.onwards(length, device)
        return self._slots


class Window(WriteRange):
    """The slots that layers with a window, or chunks, still see: the end of a text, from a ``base`` of each row on.

    Their buffers have room for a window and some tokens more. Forwards write there in line; where the room ends, the
    last window moves to the front. Of a prompt that is longer, attention gets the states themselves, and the buffers
    its end.
    """

    bases: RowNumbers

    def __init__(self, size: int, rows: int) -> None:
        self.size = size  # how many tokens see each other
        self.grain = 1  # of which capacities are multiples
        none = RowNumbers([0] * rows)
        # For each row the slot of the text that is the buffers' first (negative where other rows are longer), in this
        # forward and after it, and that of its last token.
        self.bases = self.next_bases = self.roots = none
        self.firsts, self.length, self.offset = none, 0, 0  # for each row the first slot that is read, and how many
        self.write_at(none)

    def seek(self, cursors: RowNumbers, new: int, counts: Sequence[int] | None, before: int, limit: int) -> None:
        """Makes room for ``new`` tokens from ``cursors`` on, in a prefill ``counts`` real ones in each row. In the text
        the first one is ``before`` slots further back. A buffer of the whole text would have ``limit`` slots."""
        self.bases, self.overflow, ends = self.next_bases, None, self.roots
        if counts is not None:  # rows whose prompt is over stay
            rows = zip(cursors, counts, self.roots, strict=True)
            self.roots = RowNumbers([cursor if count else root for cursor, count, root in rows])
            ends = RowNumbers([root + count for root, count in zip(self.roots, counts, strict=True)])
        if (needed := max(cursors.minus(self.bases)) + new) > self.capacity:
            self.reserve(limit)
        if needed > self.capacity:
            reach = min(self.size, max(self.roots))
            self.bases = self.roots.ahead(-reach)
            needed = max(cursors.minus(self.bases)) + new
            self.capacity = 0  # what a long draft needed is no longer held
            self.reserve(limit)
            if counts is None:
                self.capacity = max(self.capacity, -(-needed // self.grain) * self.grain)
            elif needed > self.capacity:
                self.overflow = reach, min(self.size, max(ends))
        self.next_bases, self.roots, origin = self.bases, ends, self.bases
        if self.overflow is not None:
            self.next_bases = self.roots.ahead(-self.overflow[1])
            origin = cursors.ahead(-self.overflow[0])
        self.write_at(cursors.minus(origin))
        self.start = max(min(self.cursors) - before - self.size + 1, 0)
        self.length = self.max_cursor + new - self.start
        self.firsts = origin.ahead(self.start)
        # As layers report it to transformers. Rows that differ in it have masks of their own, but what is made for all
        # slots up to the last one has to reach there, and the sizes must not be those of other layers.
        end = max(cursors) + new
        self.offset = self.firsts[0] if self.firsts.are_equal else max(end - self.length, 0) + 1

    def begin(self, roots: Sequence[int], limit: int) -> None:
        """Begins with a text before these slots."""
        self.roots = RowNumbers.of(roots)
        self.reserve(limit)
        self.bases = self.next_bases = self.roots.ahead(-min(self.size, max(roots)))

    def reserve(self, limit: int) -> None:
        """Makes the capacity that of a window and some tokens, at most ``limit`` slots."""
        room = max(self.size // _SHARE, _LEAST, self.grain)
        self.capacity = max(self.capacity, min(-(-(self.size + room) // self.grain) * self.grain, limit))

    def keep_rows(self, kept: Sequence[int]) -> None:
        for name in ("bases", "next_bases", "roots"):
            setattr(self, name, getattr(self, name).of_rows(kept))


class SpeculativeCache(Cache, WriteRange):
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
        self.shapes, self._buffers = shapes, list[LayerBuffers]()
        self.window = window  # what is kept in layers that see the last tokens alone
        self.capacity = self._text_slots = capacity
        self.write_at([0] * batch_size)
        self.pool: BufferPool | None = None  # where the buffers are, where graphs look for them
        self.owner = ""  # whose they are, where caches share a pool
        self.state_update, self.timeline = StateUpdate(0), Timeline(self)
        self.seeks = 0  # forwards so far
        self.recurrent: list[RecurrentLayer] = []  # the layers with recurrent states, which are those of one row
        # Whether code runs beside the model that the tests do not have: it gets all rows, but no keys and values.
        self.has_unknown_readers = False
        self.was_given = False  # whether a cache of the user's lacks what is here

    @property
    def _logs(self) -> list[StateLog]:
        return [log for layer in self.recurrent for log in layer.logs()]

    def look_back(self, slots: int) -> None:
        """Keeps recurrent states of the last ``slots`` slots of the text, at least those of generated tokens."""
        self.timeline.history = max(self.timeline.history, slots)

    def commit(self, roots: Sequence[int]) -> None:
        """Moves the checkpoint of recurrent states, and the end of windows, to these slots, one for each row."""
        if self.recurrent:
            self.timeline.commit(roots[0], self._logs)
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
            update = self.state_update = StateUpdate(self.cursors[0], counts is not None, nodes)
            end = self.cursors[0] + new_slots
            if update.is_prompt:  # the states before it are those of the logs
                self.timeline.restart(end)
            elif not update.is_scratch:
                self.timeline.reach(self.cursors[0], end, self._logs)
        self.seeks += 1
        if (needed := self.max_cursor + new_slots) > self.capacity:
            self.capacity = max(needed, int(self.capacity * _GROWTH))
        self.round_up()
        if self.window is not None:
            self.window.grain = 1 if self.pool is None else _GRAPH_GRAIN
            before = first_node + (nodes.hidden if nodes is not None else 0)
            self.window.seek(self.cursors, new_slots, counts, before, self.capacity)

    def round_up(self) -> None:
        """Makes the capacity one of those that are in use, of which there are few for graphs."""
        self.capacity = -(-self.capacity // _GRAIN) * _GRAIN if self.pool is None else step_above(self.capacity)

    def stay(self) -> None:
        """Lowers the capacity to the slots that there are, after memory for more has run out."""
        for buffers in self._buffers:
            buffers.write_range.capacity = min(buffers.write_range.capacity, buffers.of[0].shape[2])

    def free(self) -> None:
        """Frees the memory."""
        self.layers.clear()
        self.recurrent.clear()
        self._buffers.clear()

    def buffers_for(self, name: str, layer: int, states: torch.Tensor) -> LayerBuffers:
        """Where a layer's keys, or values, are to be: with those of further layers that are expected to be alike."""
        of_layer = [buffers for buffers in self._buffers if buffers.name == name and layer in buffers.numbers]
        for buffers in of_layer:
            if buffers.fits(states):
                return buffers
        layers, shape = [layer], self.shapes[layer] if layer < len(self.shapes) else None
        if shape is not None and not of_layer:
            layers = [later for later in range(layer, len(self.shapes)) if self.shapes[later] == shape][:_TOGETHER]
        self._buffers.append(LayerBuffers(self, self.layers[layer].write_range, name, layers, states))
        return self._buffers[-1]

    def release(self, layer: SpeculativeLayer, name: str) -> None:
        """Frees what a layer keeps, as soon as no other one shares the buffer."""
        buffers = layer.by_name.pop(name)
        del buffers.numbers[layer.index]
        if not buffers.numbers:
            self._buffers.remove(buffers)

    def addresses(self) -> tuple[int, ...]:
        """Where the buffers of keys and values, grown to the capacity and without unknown slots, and logs are, and how
        large: a pool gives those of any size the same address."""
        for buffers in self._buffers:
            buffers.fill(self.capacity)
        addresses = (buffers.of[0].data_ptr() for buffers in self._buffers)
        window = 0 if self.window is None else self.window.capacity
        sizes = self.capacity, window, self.timeline.room, len(self.written)
        return *sizes, *addresses, *(address for log in self._logs for address in log.addresses)

    @property
    def is_filled(self) -> bool:
        """Whether any layer keeps something of the text."""
        return bool(self.written or self._logs)

    @property
    def written(self) -> list[Any]:
        """The layers that keep something; some models have others, too."""
        return [layer for layer in self.layers if layer.is_initialized]

    @contextmanager
    def written_at(
        self, slots: torch.Tensor, bases: Any = None, count: Any = None, nodes: TreeLayout | None = None
    ) -> Iterator[None]:
        """Makes forwards write to slots ``[b, s]`` of the buffers as they are, whatever the cursors are; those of
        windows begin at slots ``bases`` ``[b, 1]``, and recurrent states have ``count`` ``[1]`` entries before them."""
        self.fixed_slots, self.fixed_rows = slots, torch.arange(len(slots), device=slots.device)[:, None]
        update = self.state_update
        if self.window is not None:
            self.window.fixed_slots = slots - bases
        if self.recurrent:
            self.state_update = StateUpdate.of_graph(count, slots.shape[1], nodes, self.timeline.room)
        try:
            yield
        finally:
            self.fixed_slots, self.state_update = None, update
            if self.window is not None:
                self.window.fixed_slots = None

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
        self.write_at(self.cursors.of_rows(kept))
        if self.window is not None:
            self.window.keep_rows(kept)
        for buffers in self._buffers:
            buffers.keep_rows(kept)

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves accepted tokens' keys and values, for each ``(row, from slot, to slot)``."""
        if not moves:
            return
        places: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        parts: list[StateLog | LayerBuffers] = [*self._logs, *self._buffers]
        for part in parts:
            key = device, bases = part.device, part.bases
            if key not in places:
                base_of = [0] * len(self.cursors) if bases is None else bases
                numbers = [(row, start - base_of[row], end - base_of[row]) for row, start, end in moves]
                places[key] = upload(numbers, device).unbind(1)
            part.keep_path(*places[key])


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
            layer.write_range, layer.is_sliding = window, True
    return cache


def window_of(layer: Any) -> int | None:
    """How many tokens a layer of a dynamic cache lets see each other, ``None`` for all."""
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def _shape_of(like: Any, attention: nn.Module | None) -> Hashable | None:
    """What is equal in layers whose keys and values have the same shape and device, ``None`` where that is unknown."""
    parts = () if attention is None else attention.modules()  # whose `parameters` take twice as long
    weight = next((each for part in parts for each in part._parameters.values() if each is not None), None)
    is_recurrent = isinstance(like, LinearAttentionCacheLayerMixin)
    return None if weight is None else (is_recurrent, window_of(like) is None, weight.shape, weight.device)
