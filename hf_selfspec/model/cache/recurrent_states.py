"""Recurrent states in our cache, addressed by slots as keys and values are.

What tokens feed into a state is kept in a log after a checkpoint at each row's root. The state at any slot of the log
follows from the checkpoint and the log, without a forward, so rolling back rejected tokens only means dropping their
entries. Rows may be at different slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...errors import unsupported
from ..layout import TreeLayout
from ..transfer import RowNumbers, Uploaded
from .recurrence import Convolution, Entries, Recurrence
from .recurrent_kernels import CONVOLUTION, check_convolution, current_turns

# Returns what a function returns, computed once for equal arguments.
Plan = Callable[..., Any]
_LEAST = 16  # columns that there is room for


class Timeline(NamedTuple):
    """The slots of a log, for each row. Logs that were in the same forwards have equal ones, so what follows from these
    is computed once for all, see :attr:`SpeculativeCache.plan`."""

    floor: tuple[int, ...]  # the first slot before which the state is known; its entry is in column 0
    root: tuple[int, ...]  # that of the checkpoint
    latest: tuple[int, ...]  # where the last forward began; if that is the root, so is the state
    ends: tuple[int, ...]  # after the last entry

    @classmethod
    def at(cls, slots: Sequence[int]) -> Timeline:
        """That of a log without entries."""
        return cls(*[tuple(slots)] * 4)

    def read(self, slots: Sequence[int]) -> tuple[str, slice, Uploaded | None, Timeline]:
        """Returns what leads to the state before the tokens at these slots (for slots older than the log, before its
        first entry): which of the log's states it begins with, the columns in between, which of them count
        ``[b, n]`` (``None``: all), and the timeline then."""
        slots = tuple(map(max, slots, self.floor))
        assert _is_before(slots, self.ends), "the log of a state has a gap"
        origin = next(name for name in ("latest", "root", "floor") if _is_before(getattr(self, name), slots))
        if (known := getattr(self, origin)) == slots:
            return origin, slice(0), None, self
        spans = [(start - floor, end - floor) for start, end, floor in zip(known, slots, self.floor, strict=True)]
        low, high = min(start for start, end in spans if end > start), max(end for _, end in spans)
        counted = [[start <= column < end for column in range(low, high)] for start, end in spans]
        kept = None if all(map(all, counted)) else Uploaded(counted)
        after = self._replace(latest=slots) if _is_before(self.root, slots) else self
        return origin, slice(low, high), kept, after

    def write(self, starts: Sequence[int], count: int) -> tuple[int, int | Uploaded, Timeline]:
        """Returns how many columns are needed for ``count`` tokens at these slots, in place of the entries there and
        after it, from the roots on; the first of theirs, or ``[b, count]`` where rows differ, -1 for none; and the
        timeline then."""
        assert _is_before(self.floor, starts), "a forward begins before the first state that is known"
        firsts = tuple(map(max, starts, self.root))
        assert _is_before(firsts, self.ends), "the log of a state has a gap"
        ends = tuple(max(start + count, first) for start, first in zip(starts, firsts, strict=True))
        latest = self.latest if _is_before(self.latest, firsts) else self.root
        depths = [start - floor for start, floor in zip(starts, self.floor, strict=True)]
        places: int | Uploaded = depths[0]
        if firsts != tuple(starts) or min(depths) < max(depths):
            rows = zip(depths, starts, self.root, strict=True)
            columns = ((depth, max(root - start, 0)) for depth, start, root in rows)
            places = Uploaded([[depth + t if t >= skip else -1 for t in range(count)] for depth, skip in columns])
        return max(depths) + count, places, self._replace(latest=latest, ends=ends)

    def shift(self, history: int) -> tuple[Uploaded | None, Timeline]:
        """Returns the columns ``[b, n]`` of the entries that stay, ``None`` for none, where at least ``history`` slots
        before the root do, and the timeline then."""
        rows = list(zip(self.floor, self.root, strict=True))
        # A row that has ended stays where it is, while the others continue.
        first = tuple(root - history if root - floor >= 2 * history else floor for floor, root in rows)
        gone = [(new - floor, root - floor) for new, (floor, root) in zip(first, rows, strict=True)]
        width = max(last - less for less, last in gone)
        columns = [[min(column + less, last) for column in range(width)] for less, last in gone]
        return Uploaded(columns) if width else None, self._replace(floor=first)

    def path(self, moves: Sequence[tuple[int, int, int]]) -> Uploaded:
        """The columns of moves ``(row, from slot, to slot)``."""
        floors = self.floor
        return Uploaded([(row, start - floors[row], end - floors[row]) for row, start, end in moves])

    def of_rows(self, kept: Sequence[int]) -> Timeline:
        return Timeline(*(tuple(slots[row] for row in kept) for slots in self))


class StateLog:
    """The states of a :class:`Timeline`, and what tokens feed into them."""

    def __init__(self, of: Any, plan: Plan, slots: Sequence[int], state: torch.Tensor) -> None:
        """``of`` is the :class:`Recurrence`, or the :class:`Convolution`, whose states these are."""
        self.of, self._plan = of, plan
        # [b, c, n, ...]: the first of the `n` is that of the floor's slot in each row, the last one is not read.
        self._entries: Entries = ()
        self.restart(slots, state)

    def restart(self, slots: Sequence[int], state: torch.Tensor) -> None:
        """Starts over with a state before these slots."""
        self.timeline = Timeline.at(slots)
        self.floor = self.root = self.latest = state

    def state_at(self, slots: Sequence[int]) -> torch.Tensor:
        """The state before the tokens at these slots; see :meth:`Timeline.read`."""
        origin, columns, kept, timeline = self._plan(Timeline.read, self.timeline, slots)
        state: torch.Tensor = getattr(self, origin)
        if columns.stop:
            entries = tuple(values[:, :, columns] for values in self._entries)
            state = self.of.advance(state, entries, kept and kept.on(entries[0].device))
            if timeline.latest != self.timeline.latest:
                self.latest, self.timeline = state, timeline
        return state

    def add(self, starts: Sequence[int], entries: Entries) -> None:
        """Adds what a forward fed into the state; see :meth:`Timeline.write`."""
        width, places, timeline = self._plan(Timeline.write, self.timeline, starts, count := entries[0].shape[2])
        self._make_room(width, entries)
        for values, new in zip(self._entries, entries, strict=True):
            if isinstance(places, int):
                values[:, :, places : places + count] = new
            else:
                values[_rows(values), :, places.on(values.device)] = new.transpose(1, 2)
        self.timeline = timeline
        if timeline.latest == timeline.root:
            self.latest = self.root

    def _make_room(self, width: int, entries: Entries) -> None:
        """Makes room for so many columns of entries like these."""
        before = self._entries or tuple(new[:, :, :0] for new in entries)
        types = [torch.promote_types(old.dtype, new.dtype) for old, new in zip(before, entries, strict=True)]
        if width >= before[0].shape[2] or types != [old.dtype for old in before]:
            size = max(_LEAST, 1 << width.bit_length())
            # Zeros: what does not count is masked by a product.
            pairs = zip(before, types, strict=True)
            self._entries = tuple(old.new_zeros(*old.shape[:2], size, *old.shape[3:], dtype=to) for old, to in pairs)
            for values, old in zip(self._entries, before, strict=True):
                values[:, :, : old.shape[2]] = old

    def keep_path(self, moves: tuple[tuple[int, int, int], ...]) -> None:
        """Moves entries of the last forward; see :meth:`SpeculativeCache.keep_path`."""
        for values in self._entries:
            rows, sources, targets = self._plan(Timeline.path, self.timeline, moves).on(values.device).unbind(1)
            values[rows, :, targets] = values[rows, :, sources]

    def commit(self, roots: tuple[int, ...], history: int) -> None:
        """Makes the state at these slots the checkpoint; at least ``history`` slots before them stay in the log."""
        self.root = self.latest = self.state_at(roots)
        self.timeline = Timeline(self.timeline.floor, roots, roots, roots)
        columns, timeline = self._plan(Timeline.shift, self.timeline, history)
        if timeline.floor != self.timeline.floor:
            self.floor, self.timeline = self.state_at(timeline.floor), timeline
            for values in self._entries if columns is not None else ():
                places = columns.on(values.device)
                values[:, :, : places.shape[1]] = values[_rows(values), :, places].transpose(1, 2)

    def keep_rows(self, kept: tuple[int, ...]) -> None:
        self.timeline = self._plan(Timeline.of_rows, self.timeline, kept)
        rows = self._plan(Uploaded, kept).on(self.root.device)
        states = self.floor, self.root, self.latest
        of_rows = {id(state): state[rows] for state in states}
        self.floor, self.root, self.latest = (of_rows[id(state)] for state in states)
        self._entries = tuple(values[rows] for values in self._entries)


def _rows(values: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(values), device=values.device)[:, None]


def _is_before(slots: Sequence[int], later: Sequence[int]) -> bool:
    return all(start <= end for start, end in zip(slots, later, strict=True))


@dataclass
class StateUpdate:
    """The tokens that the running forward feeds into recurrent states: prompts, of which some count, a line, a tree."""

    starts: tuple[int, ...]  # for each row the slot of the first token
    counts: RowNumbers | None = None  # for each row how many of a prompt count, None where all may be rolled back
    nodes: TreeLayout | None = None  # the tree that they form, None for a line
    is_scratch: bool = False  # whether nothing of it is kept

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes.hidden:
            # A line that is in the text already starts at the slot of its first token.
            self.starts = tuple(start - self.nodes.hidden for start in self.starts)
            self.nodes, self.is_scratch = None, True

    def kept(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Which of ``length`` tokens count ``[b, length]``, ``None`` for all."""
        if self.counts is None or min(self.counts) == length:
            return None
        return torch.arange(length, device=device) < self.counts.on(device).expand(len(self.counts), 1)

    def begin(self, log: StateLog | None) -> tuple[int, ...]:
        """For each row the slot of its first token in a log, if any; a row without tokens stays where it is."""
        if self.counts is None or log is None:
            return self.starts
        rows = zip(self.starts, self.counts, log.timeline.root, strict=True)
        return tuple(start if count else slot for start, count, slot in rows)

    def ends(self, starts: Sequence[int], length: int) -> tuple[int, ...]:
        """For each row the slot after its tokens."""
        counts = [length] * len(starts) if self.counts is None else self.counts
        return tuple(start + count for start, count in zip(starts, counts, strict=True))

    def add(self, log: StateLog, starts: Sequence[int], entries: Entries, kept: torch.Tensor | None) -> None:
        """Adds what the tokens feed into a state to its log; after a prompt the log starts over."""
        if self.counts is not None:
            log.restart(self.ends(starts, entries[0].shape[2]), log.of.advance(log.state_at(starts), entries, kept))
        elif not self.is_scratch:
            log.add(starts, entries)


class StateLayer(LinearAttentionCacheLayerMixin):
    """Recurrent states of one layer, to be combined with a layer for keys and values."""

    _cache: Any  # whose `state_update` is that of the running forward

    def init_states(self, number_of_states: int, recurrence: type[Recurrence] | None, name: str) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)
        # Models call `update_conv_state` for single tokens too, and see no state: `has_previous_state` stays false.
        self.record_past = True
        self._recurrence = recurrence
        self._model_name = name
        self._convolutions: dict[int, StateLog] = {}
        # For each state and call of the function, of which there may be several for one state.
        self._recurrent: dict[tuple[int, int], StateLog] = {}
        self._calls = 0  # of the function in the running forward
        self._has_parts = False

    def logs(self) -> list[StateLog]:
        return [*self._convolutions.values(), *self._recurrent.values()]

    def take_states(self, source: Any, slots: Sequence[int]) -> None:
        """Copies the states of a layer that an earlier ``generate`` returned, for each row before its slot."""
        for index, inputs in source.conv_states.items():
            if inputs is not None and source.has_previous_state[index]:
                width = source.conv_kernel_size[index] or inputs.shape[2]
                self._convolutions[index] = self._log(Convolution(width), slots, inputs[:, :, -width:].clone())
        for index, state in source.recurrent_states.items():
            if state is not None and source.has_previous_state[index]:
                assert self._recurrence is not None
                self._has_parts = state.dim() > self._recurrence().load(state, 0).dim()
                for part in range(state.shape[1] if self._has_parts else 1):
                    recurrence = self._recurrence()
                    loaded = recurrence.load(state.clone(), part)
                    self._recurrent[index, part] = self._log(recurrence, slots, loaded)

    def _log(self, of: Convolution | Recurrence, slots: Sequence[int], state: torch.Tensor) -> StateLog:
        return StateLog(of, self._cache.plan, slots, state)

    def hand_states(self, target: Any, slots: Sequence[int]) -> None:
        """Fills an empty layer with the states before these slots."""
        slots, stored = tuple(slots), dict[int, list[torch.Tensor]]()
        for index, log in self._convolutions.items():
            target.update_conv_state(log.state_at(slots), state_idx=index, conv_kernel_size=log.of.width)
        for (index, _), log in self._recurrent.items():
            stored.setdefault(index, []).append(log.of.store(log.state_at(slots)))
        for index, parts in stored.items():
            whole = torch.stack(parts, 1) if self._has_parts else parts[0]
            target.update_recurrent_state(whole, state_idx=index)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Returns inputs of a convolution ``[b, c, s]`` with those before them; the recurrence follows."""
        turns, update, width = current_turns(), self._cache.state_update, conv_kernel_size or 0
        if self._recurrence is not None:
            turns[self._recurrence.kernel], self._calls = partial(self._run, state_idx), 0
        if not width:
            raise unsupported(f"{self._model_name} keeps inputs of convolutions whose number is not known")
        if is_first := state_idx not in self._convolutions:
            state = conv_states.new_zeros(*conv_states.shape[:2], width)
            self._convolutions[state_idx] = self._log(Convolution(width), update.starts, state)
        log = self._convolutions[state_idx]
        state = log.state_at(starts := update.begin(log))
        update.add(log, starts, (conv_states,), update.kept(conv_states.shape[2], conv_states.device))
        if is_first:
            return conv_states
        if update.nodes is not None:
            windows = log.of.windows(state, conv_states, update.nodes)
            check_convolution(turns)

            def run(original: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                # At the end of each window [b * t, c, width], as [b, c, t].
                return original(windows, *args, **kwargs)[:, :, -1].unflatten(0, (len(inputs), -1)).transpose(1, 2)

            turns[CONVOLUTION] = run
        return torch.cat([state, conv_states], 2)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Ignores a state that the model has computed, since it is known already."""
        parts = [log for (index, _), log in self._recurrent.items() if index == state_idx]
        if self._recurrence is not None:
            current_turns().pop(self._recurrence.kernel, None)
        if not parts or self._calls != len(parts):
            raise unsupported(
                f"{self._model_name} computes its recurrent states in a way that is not known here, such as a kernel "
                "of its own, so they cannot be rolled back"
            )
        self._has_parts = recurrent_states.dim() > parts[0].root.dim()
        return recurrent_states

    def _run(self, state_idx: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        update: StateUpdate = self._cache.state_update
        key = state_idx, self._calls
        log = self._recurrent.get(key)
        recurrence: Recurrence = self._recurrence() if log is None else log.of  # type: ignore[misc]
        self._calls += 1
        arguments = dict(zip(recurrence.parameters, args, strict=False)) | kwargs
        first = arguments[recurrence.parameters[0]]
        length = first.shape[recurrence.token_dim]
        starts, kept = update.begin(log), update.kept(length, first.device)
        state = None if log is None else log.state_at(starts)
        if log is None or state is None or (update.counts is not None and recurrence.continues and length > 1):
            output, state = recurrence.prefill(original, state, kept, arguments)
            self._recurrent[key] = self._log(recurrence, update.ends(starts, length), state)
            return output, state
        output, entries = recurrence.step(state, update.nodes, arguments)
        update.add(log, starts, entries, kept)
        return output, state
