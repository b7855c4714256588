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


@dataclass
class _Segment:
    """What one forward fed into the state."""

    starts: list[int]  # for each row the slot of the first entry
    firsts: list[int]  # for each row the slot of the first entry that counts
    ends: list[int]  # for each row the slot after the last entry that counts
    entries: Entries  # [b, c, t, ...] tensors

    def cut(self, ends: list[int]) -> None:
        """Drops the entries from these slots on."""
        self.ends = [min(end, new) for end, new in zip(self.ends, ends, strict=True)]

    def reaches(self, slots: list[int]) -> bool:
        """Whether any row has an entry at or after its slot."""
        return any(end > max(first, slot) for first, end, slot in zip(self.firsts, self.ends, slots, strict=True))


class StateLog:
    """The checkpoint and the log of one state."""

    def __init__(self, advance: Advance) -> None:
        self.advance = advance
        # Points: the beginning of the log, the roots, and where the last forward began.
        self._floor: _Point | None = None
        self._root: _Point | None = None
        self._latest: _Point | None = None
        self._segments: list[_Segment] = []

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
        self._latest = None
        self._segments = []

    def state_at(self, slots: Sequence[int]) -> torch.Tensor:
        """The state before the tokens at these slots; for slots older than the log, before its first entry."""
        assert self._floor is not None
        assert self._root is not None
        slots = [max(slot, first) for slot, first in zip(slots, self._floor.slots, strict=True)]
        point = next(p for p in (self._latest, self._root, self._floor) if p is not None and _is_before(p.slots, slots))
        if point.slots == slots:
            return point.state
        entries, kept = self._between(point.slots, slots)
        state = self.advance(point.state, entries, kept)
        if _is_before(self._root.slots, slots):
            self._latest = _Point(slots, state)
        return state

    def add(self, starts: list[int], ends: list[int], entries: Entries) -> None:
        """Adds what a forward fed into the state, replacing the entries there and after it.

        Entries before the roots are not changed.
        """
        assert self._floor is not None
        assert self._root is not None
        assert _is_before(self._floor.slots, starts), "a forward begins before the first state that is known"
        firsts = [max(start, root) for start, root in zip(starts, self._root.slots, strict=True)]
        for segment in self._segments:
            segment.cut(firsts)
        if self._latest is not None and not _is_before(self._latest.slots, firsts):
            self._latest = None
        self._segments.append(_Segment(list(starts), firsts, list(ends), entries))

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves entries of the last forward; see :meth:`SpeculativeCache.keep_path`."""
        if self._segments:
            segment = self._segments[-1]
            for row, source, target in moves:
                start = segment.starts[row]
                for values in segment.entries:
                    values[row, :, target - start] = values[row, :, source - start]

    def commit(self, roots: Sequence[int], history: int) -> None:
        """Makes the state at these slots the checkpoint."""
        if self._root is None or self._floor is None:
            return
        self._root = _Point(list(roots), self.state_at(roots))
        self._latest = None
        if not history:
            self._floor, self._segments = self._root, []
            return
        # A row that has ended stays where it is, while the others continue.
        first = [
            root - history if root - floor >= 2 * history else floor
            for root, floor in zip(roots, self._floor.slots, strict=True)
        ]
        if first != self._floor.slots:
            self._floor = _Point(first, self.state_at(first))
        self._segments = [segment for segment in self._segments if segment.reaches(first)]

    def keep_rows(self, kept: list[int]) -> None:
        """Drops all rows but ``kept``."""
        for point in {id(p): p for p in (self._floor, self._root, self._latest) if p is not None}.values():
            point.slots = [point.slots[row] for row in kept]
            point.state = point.state[kept]
        for segment in self._segments:
            for name in ("starts", "firsts", "ends"):
                setattr(segment, name, [getattr(segment, name)[row] for row in kept])
            segment.entries = tuple(values[kept] for values in segment.entries)

    def _between(self, starts: list[int], ends: list[int]) -> tuple[Entries, torch.Tensor | None]:
        """Entries of the tokens from ``starts`` to before ``ends``, and which of them count ``[b, t]``."""
        pieces: list[tuple[Entries, list[tuple[int, int]]]] = []
        for segment in self._segments:
            spans = [
                (max(first, start) - base, max(min(last, end), first, start) - base)
                for base, first, last, start, end in zip(
                    segment.starts, segment.firsts, segment.ends, starts, ends, strict=True
                )
            ]
            if any(end > start for start, end in spans):
                low, high = min(start for start, end in spans if end > start), max(end for _, end in spans)
                taken = tuple(values[:, :, low:high] for values in segment.entries)
                pieces.append((taken, [(start - low, end - low) for start, end in spans]))
        found = [sum(spans[row][1] - spans[row][0] for _, spans in pieces) for row in range(len(starts))]
        assert found == [end - start for start, end in zip(starts, ends, strict=True)], "the log of a state has a gap"
        entries = tuple(
            parts[0] if len(parts) == 1 else torch.cat(parts, 2)
            for parts in zip(*(taken for taken, _ in pieces), strict=True)
        )
        return entries, _kept(pieces)


def _kept(pieces: list[tuple[Entries, list[tuple[int, int]]]]) -> torch.Tensor | None:
    """Which entries count ``[b, t]``, ``None`` for all."""
    masks = []
    for taken, spans in pieces:
        size = taken[0].shape[2]
        masks.append([[start <= index < end for index in range(size)] for start, end in spans])
    if all(all(map(all, mask)) for mask in masks):
        return None
    rows = [[value for mask in masks for value in mask[row]] for row in range(len(masks[0]))]
    return torch.tensor(rows, device=pieces[0][0][0].device)


def _is_before(slots: list[int], others: list[int]) -> bool:
    return all(slot <= other for slot, other in zip(slots, others, strict=True))
