"""Buffers of keys or values, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..transfer import RowNumbers
from .window import Window, WriteRange, rows_of

_INTEGERS = {2: torch.int16, 4: torch.int32}
# Slots that are filled at once.
_FILLED = 64


class LayerBuffers:
    """Keys, or values, of layers of one shape: ``[n, b, k, slots, h]``, valid up to the end that the cache tracks."""

    def __init__(
        self, cache: Any, write_range: WriteRange, name: str, layers: Sequence[int], states: torch.Tensor
    ) -> None:
        self.numbers = {layer: number for number, layer in enumerate(layers)}
        self.zeroed_to = 0  # slots that hold numbers in all rows; what is in the others is not known
        self._cache, self.write_range, self.name = cache, write_range, name
        self._window = write_range if isinstance(write_range, Window) else None
        self.bases = write_range.bases
        self._opened: tuple[int, int] | None = None  # the forward that the views are for
        # For each layer what attention reads, and where it writes.
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slots: torch.Tensor | None = None  # [b, k, s, h] to which it writes there, where rows differ
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

    def fits(self, states: torch.Tensor) -> bool:
        (b, k, _, h), (_, *rows, _, width) = states.shape, self._buffer.shape
        return ([b, k], h, states.dtype, states.device) == (rows, width, self._buffer.dtype, self._buffer.device)

    def write(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Writes ``[b, k, s, h]`` at the cursors, and returns all that attention reads, up to the furthest one."""
        if self._opened != (forward := (self._cache.seeks, states.shape[2])):
            self._open(forward[1])
            self._opened = forward
        view, target = self._views[self.numbers[layer]]
        if (window := self._window) is not None and window.overflow is not None:
            before, after = window.overflow
            whole = torch.cat([target[:, :, :before], states], dim=2) if before else states
            target[:, :, :after] = _shifted(whole, window.next_bases.minus(window.bases), after)
            return whole[:, :, window.start :]
        if self._slots is None:
            target.copy_(states)
        else:
            target.scatter_(2, self._slots, states.to(self._buffer.dtype).view(target.dtype))
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
        if self._window is not None and self._window.overflow is not None:
            self.bases, end = self._window.next_bases, self._window.overflow[1]
            self._views = [(buffer[:, :, :end], buffer) for buffer in self.of]
            return
        if slots is None:
            self._slots, targets = None, self._buffer.narrow(3, start, length).unbind(0)
        else:
            b, k, _, h = self.of[0].shape
            # As integers: a CPU scatters 16-bit floats by way of two copies of all. Into parts of buffers, too.
            targets = tuple(buffer.view(_INTEGERS.get(buffer.itemsize, buffer.dtype)) for buffer in self.of)
            self._slots = slots[:, None, :, None].expand(b, k, length, h)
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
        self.bases = self.bases and rows_of(self.bases, kept)

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
