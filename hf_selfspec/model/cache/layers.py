"""A layer of the cache: buffers of keys, or values, written in place, and how models see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ...errors import unsupported
from ..forks import cached_property
from ..graphs.captures import ChangingNumber
from ..transfer import RowNumbers
from .recurrent_states import StateLayer

# Slots that are filled at once.
_FILLED = 64


class LayerBuffers:
    """Keys, or values, of layers of one shape: ``[n, b, k, slots, h]``, valid up to the end that the cache tracks."""

    def __init__(self, cache: Any, write_range: Any, name: str, layers: Sequence[int], states: torch.Tensor) -> None:
        self.numbers = {layer: number for number, layer in enumerate(layers)}
        self.zeroed_to = 0  # slots that hold numbers in all rows; what is in the others is not known
        self._cache, self.write_range, self.name = cache, write_range, name
        self.bases = write_range.bases
        self._opened: tuple[int, int] | None = None  # the forward that the views are for
        # For each layer what attention reads, and where it writes.
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._places: torch.Tensor | None = None  # [b k s] where it writes there, where rows differ
        self._allocate(states)

    def _allocate(self, like: torch.Tensor) -> None:
        """Makes buffers for states like these ``[b, k, any, h]``."""
        self._views, self._opened = [], None
        b, k, _, h = like.shape
        shape, pool = (len(self.numbers), b, k, self.write_range.capacity, h), self._cache.pool
        if pool is None:
            self._keep((like.new_empty if self.bases is None else like.new_zeros)(shape))
        else:
            self._keep(pool.buffer((self._cache.owner, self.name, *self.numbers), shape, like))

    def _keep(self, buffer: torch.Tensor) -> None:
        self._buffer, self._opened = buffer, None
        self.of: tuple[torch.Tensor, ...] = buffer.unbind(0)

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def fits(self, states: torch.Tensor) -> bool:
        (b, k, _, h), (_, *rows, _, width) = states.shape, self._buffer.shape
        return ([b, k], h, states.dtype, states.device) == (rows, width, self._buffer.dtype, self._buffer.device)

    def write(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Writes ``[b, k, s, h]`` at the cursors, and returns all that attention reads, up to the furthest one."""
        if self._opened != (forward := (self._cache.seeks, states.shape[2])):
            self._open(forward[1])
            self._opened = forward
        view, target = self._views[self.numbers[layer]]
        if (overflow := self.write_range.overflow) is not None:
            before, after = overflow
            window: Any = self.write_range
            whole = torch.cat([target[:, :, :before], states], dim=2) if before else states
            target[:, :, :after] = _shifted(whole, window.next_bases.minus(window.bases), after)
            return whole[:, :, window.start :]
        if self._places is None:
            target.copy_(states)
        else:  # for 8 rows in half the time of `scatter_`, which copies 16-bit floats twice besides
            target.index_copy_(0, self._places, states.reshape(-1, target.shape[1]).to(target.dtype))
        return view

    def latest(self, layer: int) -> torch.Tensor | None:
        """What the layer has given to attention in the last forward, ``None`` before the first one."""
        return self._views[self.numbers[layer]][0] if self._views else None

    def _open(self, length: int) -> None:
        write_range, start = self.write_range, self.write_range.max_cursor
        end, slots = start + length, write_range.slots(length, self._buffer.device)
        if start or self.zeroed_to:
            self.fill(-(-end // _FILLED) * _FILLED)
        else:  # prompts go through all layers
            self.grow()
            self.zeroed_to = end
        if write_range.overflow is not None:
            self.bases, end = write_range.next_bases, write_range.overflow[1]
            self._views = [(buffer[:, :, :end], buffer) for buffer in self.of]
            return
        if slots is None:
            self._places, targets = None, self._buffer.narrow(3, start, length).unbind(0)
        else:
            b, k, capacity, h = self.of[0].shape
            heads = torch.arange(b * k, device=slots.device).view(b, k, 1) * capacity
            self._places = (heads + slots[:, None]).flatten()
            targets = tuple(buffer.view(-1, h) for buffer in self.of)
        views = self._buffer.narrow(3, write_range.start, end - write_range.start).unbind(0)
        self._views = list(zip(views, targets, strict=True))

    def fill(self, end: int) -> None:
        """Fills slots up to ``end``: a NaN in a masked value still reaches the output through 0 * NaN."""
        self.grow()
        if end > self.zeroed_to and self._cache.pool is None:  # those of a pool begin with zeros
            self._buffer[:, :, :, self.zeroed_to : end] = 0
            self.zeroed_to = min(end, self._buffer.shape[3])

    def grow(self) -> None:
        """Makes the buffers those of the write_range: as large, and from the same slots of the text on."""
        before, wanted, bases = self._buffer, self.write_range.capacity, self.write_range.bases
        has_moved, length = self.bases != bases, self._buffer.shape[3]
        if bases is not None and self.bases is not None and has_moved:
            before = _shifted(before, bases.minus(self.bases), length)
        if has_moved or (length < wanted and self._cache.pool is not None):
            before = before.clone()  # it may lie in the same memory
        if length < wanted or (length > wanted and bases is not None):
            self._allocate(before[0])
        if before is not self._buffer:
            self._buffer[:, :, :, : before.shape[3]] = before[:, :, :, :wanted]
            self.bases = bases

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Keeps these rows, of which each is at its place already or behind all places; no memory is needed."""
        end = self.zeroed_to if self.bases is None else None
        for row, before in enumerate(kept):
            if row != before:
                self._buffer[:, row, :, :end] = self._buffer[:, before, :, :end]
        self._keep(self._buffer[:, : len(kept)])
        self.bases = self.bases and self.bases.of_rows(kept)

    def keep_path(self, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._buffer.shape[1] == 1:  # in a fifth of the time
            self._buffer.index_copy_(3, target, self._buffer.index_select(3, source))
        else:
            self._buffer[:, rows, :, target] = self._buffer[:, rows, :, source]


def _shifted(states: torch.Tensor, shifts: RowNumbers, count: int) -> torch.Tensor:
    """Of states ``[*n, b, k, m, h]`` at most ``count`` from each row's shift on; junk where there are none."""
    length = states.shape[-2]
    if shifts.are_equal and shifts[0] >= 0:
        return states.narrow(-2, shifts[0], min(count, length - shifts[0]))
    places = (shifts.on(states.device) + torch.arange(count, device=states.device)).clamp(0, length - 1)
    return states.gather(-2, places[:, None, :, None].expand(*states.shape[:-2], count, states.shape[-1]))


def _private(name: str) -> Any:
    """The keys, or values, ``[b, k, n, h]`` so far, drafted ones among them, for hooks."""

    def read(layer: SpeculativeLayer) -> torch.Tensor | None:
        if layer._cache.has_unknown_readers:
            raise unsupported(f"code beside the model reads the {name} in the cache, which are drafts' as well")
        buffers = layer.by_name.get(name)
        return None if buffers is None else buffers.latest(layer.index)

    def replace(layer: SpeculativeLayer, states: torch.Tensor | None) -> None:
        if states is not None:
            raise unsupported(
                "code beside the model, such as a hook that compresses the cache, replaces its keys or values, which "
                "hold drafts, too"
            )

    return property(read, replace)


class SpeculativeLayer(CacheLayerMixin):
    """What is kept of each token: keys, values, and keys of an indexer that chooses what attention sees."""

    is_sliding = False
    keys, values = _private("keys"), _private("values")

    def __init__(self, cache: Any) -> None:
        self._cache = self.write_range = cache  # which part of the text is kept
        super().__init__()
        self.by_name: dict[str, Any] = {}  # where that is, by name
        self._indexed, self._length = -1, 0  # the last forward in which its indexer had its turn, and the slots then

    @cached_property
    def index(self) -> int:
        index: int = self._cache.layers.index(self)
        return index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers_for("keys", key_states)
        self.buffers_for("values", value_states)
        self.is_initialized = True

    def buffers_for(self, name: str, states: torch.Tensor) -> Any:
        """Where states ``[b, k, s, h]`` are kept."""
        if name not in self.by_name:
            self.by_name[name] = self._cache.buffers_for(name, self.index, states)
        return self.by_name[name]

    def buffer(self, name: str) -> torch.Tensor:
        """The buffer ``[b, k, slots, h]`` of a name."""
        buffers = self.by_name[name]
        buffer: torch.Tensor = buffers.of[buffers.numbers[self.index]]
        return buffer

    def buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[b, k, slots, h]``."""
        return self.buffer("keys"), self.buffer("values")

    def before(self, slots: RowNumbers) -> tuple[torch.Tensor, ...]:
        """Keys and values ``[b, k, n, h]`` of tokens before each row's slot of the text that one there sees, aligned
        right, with junk in front where rows have fewer."""
        count, bases = max(slots), self.by_name["keys"].bases
        if bases is not None:
            count, slots = min(count, self.write_range.size - 1), slots.minus(bases)
        return tuple(_shifted(buffer, slots.ahead(-count), count) for buffer in self.buffers())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (slots := self.write_range.fixed_slots) is not None:
            for buffer, states in zip(buffers := self.buffers(), (key_states, value_states), strict=True):
                buffer[self._cache.fixed_rows, :, slots] = states.transpose(1, 2)
            return buffers
        keys, values = self.by_name["keys"], self.by_name["values"]
        return keys.write(self.index, key_states), values.write(self.index, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.write_range.fixed_slots is not None:
            return self.write_range.capacity, self._cache.capacity if self.is_sliding else 0
        return self.write_range.max_cursor + query_length - self.write_range.start, self.write_range.offset

    def get_seq_length(self) -> Any:
        if self._cache.fixed_slots is not None:
            return ChangingNumber()
        # Before a layer's update, masks ask for what was there; after it, indexers for what is there now.
        return self._length if self._indexed == self._cache.seeks else self._cache.max_cursor

    def get_max_length(self) -> int:
        return -1

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Writes an indexer's keys ``[b, s, h]`` at the cursors, and returns all up to the furthest one."""
        states = indexer_key_states[:, None]
        keys: torch.Tensor = self.buffers_for("indexer", states).write(self.index, states)
        self._indexed, self._length = self._cache.seeks, keys.shape[2]
        return keys[:, 0]

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions ``[n, b, s]`` of the tokens before the running forward, to which models append theirs."""
        start = self._cache.max_cursor
        return self.buffer("positions")[:, :, :start, 0].transpose(0, 1) if start else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor) -> None:
        states = position_ids[..., self._cache.max_cursor :].transpose(0, 1)[..., None]
        self.buffers_for("positions", states).write(self.index, states)


class RecurrentLayer(SpeculativeLayer, StateLayer):
    """Recurrent states of one layer, with keys and values if it has attention, too."""
