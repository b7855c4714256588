"""One recurrent state, addressed by slots as keys and values are.

What tokens feed into the state is kept in a log after a checkpoint at each row's root. The state at any slot of the log
follows from the checkpoint and the log, without a forward, so rolling back rejected tokens only means dropping their
entries. Rows may be at different slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .recurrence import Advance, Entries


@dataclass
class _Point:
    """A state, and for each row the slot of the token that comes next."""

    slots: list[int]
    state: torch.Tensor


class StateLog:
    """The checkpoint and the log of one state."""

    def __init__(self, advance: Advance) -> None:
        self.advance = advance
        # Points: the beginning of the log, the roots, and where the last forward began.
        self._floor: _Point | None = None
        self._root: _Point | None = None
        self._latest: _Point | None = None
        self._entries: Entries = ()  # [b, c, t, ...]: the first is that of the floor's slot in each row
        self._ends: list[int] = []  # for each row the slot after the last entry

    @property
    def is_empty(self) -> bool:
        """Whether no state is known yet."""
        return self._root is None

    @property
    def slots(self) -> list[int]:
        """For each row the slot of its root."""
        assert self._root is not None
        return self._root.slots

    @property
    def first_slots(self) -> list[int]:
        """For each row the first slot before which the state is known."""
        assert self._floor is not None
        return self._floor.slots

    @property
    def state(self) -> torch.Tensor:
        """The state at the roots."""
        assert self._root is not None
        return self._root.state

    def restart(self, slots: list[int], state: torch.Tensor) -> None:
        """Starts over with a state before these slots."""
        self._floor = self._root = _Point(list(slots), state)
        self._latest, self._entries, self._ends = None, (), list(slots)

    def state_at(self, slots: Sequence[int]) -> torch.Tensor:
        """The state before the tokens at these slots; for slots older than the log, before its first entry."""
        slots = [max(slot, first) for slot, first in zip(slots, self.first_slots, strict=True)]
        points = (self._latest, self._root, self._floor)
        point = next(p for p in points if p is not None and _is_before(p.slots, slots))
        if point.slots == slots:
            return point.state
        entries, kept = self._between(point.slots, slots)
        state = self.advance(point.state, entries, kept)
        if _is_before(self.slots, slots):
            self._latest = _Point(slots, state)
        return state

    def add(self, starts: Sequence[int], entries: Entries) -> None:
        """Adds what a forward fed into the state, in place of the entries there and after it, from the roots on."""
        assert _is_before(self.first_slots, starts), "a forward begins before the first state that is known"
        firsts = [max(start, root) for start, root in zip(starts, self.slots, strict=True)]
        assert _is_before(firsts, self._ends), "the log of a state has a gap"
        if self._latest is not None and not _is_before(self._latest.slots, firsts):
            self._latest = None
        count = entries[0].shape[2]
        floors = self.first_slots
        known = [first - floor for first, floor in zip(firsts, floors, strict=True)]
        skipped = [first - start for first, start in zip(firsts, starts, strict=True)]
        self._ends = [max(start + count, first) for start, first in zip(starts, firsts, strict=True)]
        before = self._entries or tuple(values[:, :, :0] for values in entries)
        if max(skipped) == 0 and min(known) == max(known):
            self._entries = tuple(
                torch.cat([old[:, :, : known[0]], new], 2) if known[0] else new
                for old, new in zip(before, entries, strict=True)
            )
            return
        size, width = before[0].shape[2], max(end - floor for end, floor in zip(self._ends, floors, strict=True))
        columns = [
            [t if t < here else min(size + t - here + skip, size + count - 1) for t in range(width)]
            for here, skip in zip(known, skipped, strict=True)
        ]
        joined = (torch.cat([old, new], 2) for old, new in zip(before, entries, strict=True))
        self._entries = _picked(tuple(joined), columns)

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves entries of the last forward; see :meth:`SpeculativeCache.keep_path`."""
        for row, source, target in moves:
            floor = self.first_slots[row]
            for values in self._entries:
                values[row, :, target - floor] = values[row, :, source - floor]

    def commit(self, roots: Sequence[int], history: int) -> None:
        """Makes the state at these slots the checkpoint; at least ``history`` slots before them stay in the log."""
        if self._root is None or self._floor is None:
            return
        self._root = _Point(list(roots), self.state_at(roots))
        self._latest = None
        if not history:
            self.restart(self._root.slots, self._root.state)
            return
        # A row that has ended stays where it is, while the others continue.
        first = [
            root - history if root - floor >= 2 * history else floor
            for root, floor in zip(roots, self._floor.slots, strict=True)
        ]
        if first == self._floor.slots:
            return
        gone = [new - old for new, old in zip(first, self._floor.slots, strict=True)]
        self._floor = _Point(first, self.state_at(first))
        last = self._entries[0].shape[2] - 1
        width = max(end - new for end, new in zip(self._ends, first, strict=True))
        self._entries = _picked(self._entries, [[min(t + less, last) for t in range(width)] for less in gone])

    def keep_rows(self, kept: list[int]) -> None:
        """Drops all rows but ``kept``."""
        for point in {id(p): p for p in (self._floor, self._root, self._latest) if p is not None}.values():
            point.slots = [point.slots[row] for row in kept]
            point.state = point.state[kept]
        self._ends = [self._ends[row] for row in kept]
        self._entries = tuple(values[kept] for values in self._entries)

    def _between(self, starts: list[int], ends: list[int]) -> tuple[Entries, torch.Tensor | None]:
        """Entries of the tokens from ``starts`` to before ``ends``, and which of them count ``[b, t]``."""
        assert _is_before(ends, self._ends), "the log of a state has a gap"
        spans = [(start - floor, end - floor) for start, end, floor in zip(starts, ends, self.first_slots, strict=True)]
        low, high = min(start for start, end in spans if end > start), max(end for _, end in spans)
        entries = tuple(values[:, :, low:high] for values in self._entries)
        if all(span == (low, high) for span in spans):
            return entries, None
        kept = [[start <= t < end for t in range(low, high)] for start, end in spans]
        return entries, torch.tensor(kept, device=entries[0].device)


def _picked(entries: Entries, columns: list[list[int]]) -> Entries:
    """For each row these of its entries."""
    device = entries[0].device
    rows, places = torch.arange(len(columns), device=device)[:, None], torch.tensor(columns, device=device)
    return tuple(values[rows, :, places].transpose(1, 2) for values in entries)


def _is_before(slots: Sequence[int], others: Sequence[int]) -> bool:
    return all(slot <= other for slot, other in zip(slots, others, strict=True))
