"""What the tokens of one text feed into recurrent states, addressed by slots as keys and values are.

It is kept in a log after a checkpoint. The state at any slot of the log follows from both, without a forward, so
rolling back rejected tokens only means dropping their entries.

Captured forwards find states and entries at fixed places, and are told how many entries there are. Ids were plain's on
the pretended device of the tests; no GPU has run that yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layout import TreeLayout
from .recurrence import Entries

# How far forwards reach beyond the root: a draft's tokens, and those that a size is filled with. In a pool, after how
# many slots logs drop their entries.
_AHEAD, _SPAN = 40, 24
_GRAIN = 64  # logs have room for multiples of it


@dataclass(eq=False)
class Timeline:
    """The slots of a text that all its logs share."""

    cache: Any  # whose `pool` has states and entries where graphs look for them
    floor: int = 0  # the slot of the first entries, before which logs have a state of their own
    root: int = 0  # that of the text's last token
    end: int = 0  # after the last entry
    history: int = 0  # slots before the root that stay in logs
    room: int = 0  # entries that a log has memory for

    def restart(self, slot: int) -> None:
        """Starts over with states before this slot."""
        self.floor = self.root = self.end = slot
        self._reserve(2 * self.history + _SPAN + _AHEAD)

    def _reserve(self, count: int) -> None:
        self.room = max(self.room, -(-count // _GRAIN) * _GRAIN)

    def reach(self, start: int, end: int, logs: Sequence[StateLog]) -> None:
        """Begins a forward over these slots."""
        assert start <= self.end, "the logs of states have a gap"
        self.end = max(self.end, end)
        if end - self.floor > self.room:
            self._reserve(end - self.floor)
            for log in logs:
                log.make_room()

    def commit(self, root: int, logs: Sequence[StateLog]) -> None:
        """Drops entries from this slot on, and such as are older than the history; in a pool, where forwards find their
        states from the floor on, only now and then, since each log takes launches for that."""
        self.root = self.end = root
        is_over = root - self.floor >= 2 * self.history + (0 if self.cache.pool is None else _SPAN)
        for log in logs:
            log.commit(root, root - self.history if is_over else None)
        if is_over:
            self.floor = root - self.history


class StateLog:
    """A state before the first slot of a timeline, and what the tokens from there on feed into it."""

    state: torch.Tensor  # before the floor

    def __init__(self, of: Any, timeline: Timeline, name: Hashable, state: torch.Tensor) -> None:
        """``of`` is the :class:`Recurrence`, or the :class:`Convolution`, whose states these are."""
        self.of, self.timeline, self._name = of, timeline, name
        self._entries: list[torch.Tensor] = []  # [1, c, n, ...] from the floor's slot on, with room for more
        self.restart(state)

    def restart(self, state: torch.Tensor) -> None:
        """Starts over with the state before the timeline's first slot."""
        self.state = self._placed("state", state.clone())
        # Slots with the states before them: the last root's, and where the last forward began; the same in a pool.
        self._root = self._latest = self.timeline.floor, self.state
        self.make_room()

    def _placed(self, name: Hashable, values: torch.Tensor) -> torch.Tensor:
        """The values in the pool, if there is one; other names have other memory."""
        cache = self.timeline.cache
        if cache.pool is None:
            return values
        return cache.pool.buffer((cache.owner, self._name, name), tuple(values.shape), values).copy_(values)

    @property
    def bases(self) -> tuple[int]:
        """The slot of the first entry."""
        return (self.timeline.floor,)

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def addresses(self) -> tuple[int, ...]:
        return self.state.data_ptr(), *(values.data_ptr() for values in self._entries)

    def state_at(self, slot: int) -> torch.Tensor:
        """The state before the token at a slot (for slots older than the log, before its first entry)."""
        floor = self.timeline.floor
        slot = max(slot, floor)
        assert slot <= self.timeline.end, "the log of a state has a gap"
        known, state = next((begun for begun in (self._latest, self._root) if begun[0] <= slot), (floor, self.state))
        if known < slot:
            columns = slice(known - floor, slot - floor)
            state = self.of.advance(state, tuple(values[:, :, columns] for values in self._entries))
            if slot >= self.timeline.root and self.timeline.cache.pool is None:
                self._latest = slot, state
        return state

    def before(self, update: StateUpdate) -> torch.Tensor:
        """The state before the first token of a forward."""
        if update.is_prompt:  # after which the timeline begins
            return self.state
        if update.count is None or update.there is None:
            return self.state_at(update.start)
        return self.of.after(self.state, self._entries, update.count, update.there)

    def add(self, update: StateUpdate, entries: Entries) -> None:
        """Adds what the tokens of a forward feed into the state, in place of the entries there and after them; those
        before the root stay."""
        pairs = [(values.dtype, new.dtype) for values, new in zip(self._entries, entries, strict=True)]
        if any(torch.promote_types(*pair) != pair[0] for pair in pairs):
            if update.columns is not None:
                raise RuntimeError("tokens feed more exact numbers into a state than before")
            self.make_room(entries)
        if update.columns is not None:
            for values, new in zip(self._entries, entries, strict=True):
                values.index_copy_(2, update.columns, new.to(values.dtype))
            return
        floor, start = self.timeline.floor, update.start
        first, end = max(start, self.timeline.root), start + entries[0].shape[2]
        assert floor <= start, "the log of a state begins later"
        for values, new in zip(self._entries, entries, strict=True):
            values[:, :, first - floor : end - floor] = new[:, :, first - start :]
        if self._latest[0] > first:
            self._latest = self._root

    def make_room(self, new: Entries = ()) -> None:
        """Makes room for the timeline's entries, which are to hold numbers like ``new``."""
        before, state = self._entries, self.state
        if before and self.timeline.room <= before[0].shape[2] and not new:
            return
        like = new or before or [state] * 4
        shapes = zip(self.of.shapes(state, self.timeline.room), like, before or like, strict=False)
        empty = [state.new_zeros(shape, dtype=torch.promote_types(to.dtype, old.dtype)) for shape, to, old in shapes]
        for values, old in zip(empty, before, strict=False):
            values[:, :, : old.shape[2]] = old
        self._entries = [self._placed(number, values) for number, values in enumerate(empty)]

    def keep_path(self, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Moves entries of the last forward from column to column; see :meth:`SpeculativeCache.keep_path`."""
        for values in self._entries:
            values.index_copy_(2, target, values.index_select(2, source))

    def commit(self, root: int, first: int | None) -> None:
        """Makes the state at a root the checkpoint, and a later slot the ``first`` one, ``None`` for the same."""
        timeline = self.timeline
        if timeline.cache.pool is None:
            self._root = self._latest = root, self.state_at(root)
        if first is not None:
            state = self.state_at(first)
            if first < root:
                for values in self._entries:
                    values[:, :, : root - first] = values[:, :, first - timeline.floor : root - timeline.floor].clone()
            if timeline.cache.pool is None:
                self.state = state
            else:
                self.state.copy_(state)
                self._root = self._latest = first, self.state


@dataclass
class StateUpdate:
    """The tokens that the running forward feeds into recurrent states: a piece of a prompt, a line, or a tree."""

    start: int  # the slot of the first one
    is_prompt: bool = False  # whether nothing of it is rolled back
    nodes: TreeLayout | None = None  # the tree that they form, None for a line
    is_scratch: bool = False  # whether nothing of it is kept
    # In a graph, for which slots are values of a device: how many entries are before it [1], which these are [n] of
    # all that there is room for, and the columns [t] of its own.
    count: torch.Tensor | None = None
    there: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes.hidden:
            # A line that is in the text already starts at the slot of its first token.
            self.start -= self.nodes.hidden
            self.nodes, self.is_scratch = None, True

    @classmethod
    def of_graph(cls, count: torch.Tensor, length: int, nodes: TreeLayout | None, room: int) -> StateUpdate:
        """That of ``length`` tokens after ``count`` ``[1]`` entries of logs with this room."""
        there = torch.arange(room, device=count.device) < count
        columns = count + torch.arange(length, device=count.device)
        return cls(0, nodes=nodes, count=count, there=there, columns=columns)

    def add(self, log: StateLog, entries: Entries) -> None:
        """Adds what the tokens feed into a state to its log; after a prompt the log starts over."""
        if self.is_prompt:
            log.restart(log.of.advance(log.before(self), entries))
        elif not self.is_scratch:
            log.add(self, entries)
