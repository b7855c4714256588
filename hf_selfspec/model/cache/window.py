"""Which slots of a text a cache keeps: all, or those that layers with a window, or chunks, still see.

The buffers of such layers have room for a window and some tokens more. Forwards write there in line; where the room
ends, the last window moves to the front. Of a prompt that is longer, attention gets the states themselves, and the
buffers its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..transfer import RowNumbers

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
    """The end of a text, from a ``base`` of each row on."""

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
            setattr(self, name, rows_of(getattr(self, name), kept))


def rows_of(numbers: RowNumbers, kept: Sequence[int]) -> RowNumbers:
    """The numbers of these rows."""
    return RowNumbers([numbers[row] for row in kept])
