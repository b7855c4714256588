"""Recurrent states in our cache, addressed by slots as keys and values are.

What tokens feed into a state is kept in a log after a checkpoint at each row's root. The state at any slot of the log
follows from the checkpoint and the log, without a forward, so rolling back rejected tokens only means dropping their
entries. Rows may be at different slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...errors import unsupported
from ..layout import TreeLayout
from ..transfer import RowNumbers, Uploads
from .recurrence import Advance, Convolution, Entries, Recurrence
from .recurrent_kernels import current_turn


@dataclass
class _Point:
    """A state, and for each row the slot of the token that comes next."""

    slots: list[int]
    state: torch.Tensor

    def keep_rows(self, kept: list[int], uploads: Uploads) -> None:
        self.slots = [self.slots[row] for row in kept]
        self.state = self.state[uploads.of(kept, self.state.device)]


class StateLog:
    """The checkpoint and the log of one state, empty before :meth:`restart`."""

    floor: _Point  # the beginning of the log, the first slot before which the state is known
    root: _Point
    _latest: _Point  # where the last forward began

    def __init__(self, advance: Advance, uploads: Uploads) -> None:
        self.advance, self._uploads = advance, uploads
        self._entries: Entries = ()  # [b, c, t, ...]: the first is that of the floor's slot in each row
        self._ends: list[int] = []  # for each row the slot after the last entry

    @property
    def is_empty(self) -> bool:
        return not self._ends

    def restart(self, slots: list[int], state: torch.Tensor) -> None:
        """Starts over with a state before these slots."""
        self.floor = self.root = self._latest = _Point(list(slots), state)
        self._entries, self._ends = (), list(slots)

    def state_at(self, slots: Sequence[int]) -> torch.Tensor:
        """The state before the tokens at these slots; for slots older than the log, before its first entry."""
        floors = self.floor.slots
        slots = [max(slot, floor) for slot, floor in zip(slots, floors, strict=True)]
        point = next(p for p in (self._latest, self.root, self.floor) if _is_before(p.slots, slots))
        if point.slots == slots:
            return point.state
        assert _is_before(slots, self._ends), "the log of a state has a gap"
        spans = [(start - floor, end - floor) for start, end, floor in zip(point.slots, slots, floors, strict=True)]
        low, high = min(start for start, end in spans if end > start), max(end for _, end in spans)
        entries, kept = tuple(values[:, :, low:high] for values in self._entries), None
        if any(span != (low, high) for span in spans):
            counted = [[start <= t < end for t in range(low, high)] for start, end in spans]
            kept = self._uploads.of(counted, entries[0].device)
        state = self.advance(point.state, entries, kept)
        if _is_before(self.root.slots, slots):
            self._latest = _Point(slots, state)
        return state

    def add(self, starts: Sequence[int], entries: Entries) -> None:
        """Adds what a forward fed into the state, in place of the entries there and after it, from the roots on."""
        floors, count = self.floor.slots, entries[0].shape[2]
        assert _is_before(floors, starts), "a forward begins before the first state that is known"
        firsts = [max(start, root) for start, root in zip(starts, self.root.slots, strict=True)]
        assert _is_before(firsts, self._ends), "the log of a state has a gap"
        if not _is_before(self._latest.slots, firsts):
            self._latest = self.root
        depths = [first - floor for first, floor in zip(firsts, floors, strict=True)]
        skipped = [first - start for first, start in zip(firsts, starts, strict=True)]
        self._ends = [max(start + count, first) for start, first in zip(starts, firsts, strict=True)]
        before = self._entries or tuple(values[:, :, :0] for values in entries)
        if max(skipped) == 0 and min(depths) == max(depths):
            self._entries = tuple(
                torch.cat([old[:, :, : depths[0]], new], 2) if depths[0] else new
                for old, new in zip(before, entries, strict=True)
            )
            return
        size, width = before[0].shape[2], max(end - floor for end, floor in zip(self._ends, floors, strict=True))
        columns = [
            [t if t < depth else min(size + t - depth + skip, size + count - 1) for t in range(width)]
            for depth, skip in zip(depths, skipped, strict=True)
        ]
        joined = (torch.cat([old, new], 2) for old, new in zip(before, entries, strict=True))
        self._entries = self._picked(tuple(joined), columns)

    def keep_path(self, moves: list[tuple[int, int, int]]) -> None:
        """Moves entries of the last forward; see :meth:`SpeculativeCache.keep_path`."""
        floors = self.floor.slots
        for values in self._entries:
            numbers = [(row, start - floors[row], end - floors[row]) for row, start, end in moves]
            rows, sources, targets = self._uploads.of(numbers, values.device).unbind(1)
            values[rows, :, targets] = values[rows, :, sources]

    def commit(self, roots: Sequence[int], history: int) -> None:
        """Makes the state at these slots the checkpoint; at least ``history`` slots before them stay in the log."""
        if self.is_empty:
            return
        state = self.state_at(roots)
        if not history:
            self.restart(list(roots), state)
            return
        self.root = self._latest = _Point(list(roots), state)
        # A row that has ended stays where it is, while the others continue.
        floors = self.floor.slots
        first = [
            root - history if root - floor >= 2 * history else floor for root, floor in zip(roots, floors, strict=True)
        ]
        if first != floors:
            self.floor = _Point(first, self.state_at(first))
            last = self._entries[0].shape[2] - 1
            width = max(end - new for end, new in zip(self._ends, first, strict=True))
            gone = [new - old for new, old in zip(first, floors, strict=True)]
            self._entries = self._picked(self._entries, [[min(t + less, last) for t in range(width)] for less in gone])

    def keep_rows(self, kept: list[int]) -> None:
        for point in {id(point): point for point in (self.floor, self.root, self._latest)}.values():
            point.keep_rows(kept, self._uploads)
        self._ends = [self._ends[row] for row in kept]
        self._entries = tuple(values[self._uploads.of(kept, values.device)] for values in self._entries)

    def _picked(self, entries: Entries, columns: list[list[int]]) -> Entries:
        device = entries[0].device
        rows, places = torch.arange(len(columns), device=device)[:, None], self._uploads.of(columns, device)
        return tuple(values[rows, :, places].transpose(1, 2) for values in entries)


def _is_before(slots: Sequence[int], later: Sequence[int]) -> bool:
    return all(start <= end for start, end in zip(slots, later, strict=True))


@dataclass
class StateUpdate:
    """The tokens that the running forward feeds into recurrent states: prompts, of which some count, a line, a tree."""

    starts: Sequence[int]  # for each row the slot of the first token
    counts: RowNumbers | None = None  # for each row how many of a prompt count, None where all may be rolled back
    nodes: TreeLayout | None = None  # the tree that they form, None for a line
    is_scratch: bool = False  # whether nothing of it is kept

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes.hidden:
            # A line that is in the text already starts at the slot of its first token.
            self.starts = [start - self.nodes.hidden for start in self.starts]
            self.nodes, self.is_scratch = None, True

    def kept(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Which of ``length`` tokens count ``[b, length]``, ``None`` for all."""
        if self.counts is None or min(self.counts) == length:
            return None
        return torch.arange(length, device=device) < self.counts.on(device).expand(len(self.counts), 1)

    def begin(self, log: StateLog) -> Sequence[int]:
        """For each row the slot of its first token in a log; a row without tokens stays where it is."""
        if self.counts is None or log.is_empty:
            return self.starts
        return [
            start if count else slot
            for start, count, slot in zip(self.starts, self.counts, log.root.slots, strict=True)
        ]

    def ends(self, starts: Sequence[int], length: int) -> list[int]:
        """For each row the slot after its tokens."""
        counts = [length] * len(starts) if self.counts is None else self.counts
        return [start + count for start, count in zip(starts, counts, strict=True)]

    def add(self, log: StateLog, starts: Sequence[int], entries: Entries, kept: torch.Tensor | None) -> None:
        """Adds what the tokens feed into a state to its log; after a prompt the log starts over."""
        if self.counts is not None:
            log.restart(self.ends(starts, entries[0].shape[2]), log.advance(log.state_at(starts), entries, kept))
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
        self._convolutions: dict[int, tuple[Convolution, StateLog]] = {}
        # A function may be called several times for one state.
        self._recurrent: dict[int, list[tuple[Recurrence, StateLog]]] = {}
        self._calls = 0  # of the function in the running forward
        self._has_parts = False
        self._taken_over: dict[int, _Point] = {}  # what was taken over, of states that no forward has read yet

    def logs(self) -> list[StateLog]:
        recurrent = (log for states in self._recurrent.values() for _, log in states)
        return [*(log for _, log in self._convolutions.values()), *recurrent]

    def take_states(self, source: Any, slots: list[int]) -> None:
        """Copies the states of a layer that an earlier ``generate`` returned, for each row before its slot."""
        for index, inputs in source.conv_states.items():
            if inputs is not None and source.has_previous_state[index]:
                convolution = Convolution(source.conv_kernel_size[index] or inputs.shape[2])
                log = StateLog(convolution.advance, self._cache.uploads)
                log.restart(slots, inputs[:, :, -convolution.width :].clone())
                self._convolutions[index] = convolution, log
        for index, state in source.recurrent_states.items():
            if state is not None and source.has_previous_state[index]:
                self._taken_over[index] = _Point(list(slots), state.clone())

    def keep_rows(self, kept: list[int]) -> None:
        for log in self.logs():
            log.keep_rows(kept)
        for point in self._taken_over.values():
            point.keep_rows(kept, self._cache.uploads)

    def hand_states(self, target: Any, slots: Sequence[int]) -> None:
        """Fills an empty layer with the states before these slots."""
        for index, point in self._taken_over.items():
            if index not in self._recurrent:  # the prompt's first token was the last
                target.update_recurrent_state(point.state, state_idx=index)
        for index, (convolution, log) in self._convolutions.items():
            target.update_conv_state(log.state_at(slots), state_idx=index, conv_kernel_size=convolution.width)
        for index, states in self._recurrent.items():
            stored = [recurrence.store(log.state_at(slots)) for recurrence, log in states]
            whole = torch.stack(stored, 1) if self._has_parts else stored[0]
            target.update_recurrent_state(whole, state_idx=index)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Returns inputs of a convolution ``[b, c, s]`` with those before them; the recurrence follows."""
        turn, update, width = current_turn(), self._cache.state_update, conv_kernel_size or 0
        if self._recurrence is not None:
            turn.recurrence, self._calls = partial(self._run, state_idx), 0
        if not width:
            raise unsupported(f"{self._model_name} keeps inputs of convolutions whose number is not known")
        if state_idx not in self._convolutions:
            convolution = Convolution(width)
            self._convolutions[state_idx] = convolution, StateLog(convolution.advance, self._cache.uploads)
        convolution, log = self._convolutions[state_idx]
        length = conv_states.shape[2]
        starts, kept = update.begin(log), update.kept(length, conv_states.device)
        if log.is_empty:
            empty = conv_states.new_zeros(*conv_states.shape[:2], width)
            log.restart(update.ends(starts, length), convolution.advance(empty, (conv_states,), kept))
            return conv_states
        state = log.state_at(starts)
        update.add(log, starts, (conv_states,), kept)
        if update.nodes is not None:
            windows = convolution.windows(state, conv_states, update.nodes)
            turn.check()

            def run(original: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                # At the end of each window [b * t, c, width], as [b, c, t].
                return original(windows, *args, **kwargs)[:, :, -1].unflatten(0, (len(inputs), -1)).transpose(1, 2)

            turn.convolution = run
        return torch.cat([state, conv_states], 2)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Ignores a state that the model has computed, since it is known already."""
        states, turn = self._recurrent.get(state_idx, []), current_turn()
        turn.recurrence = None
        if not states or self._calls != len(states):
            raise unsupported(
                f"{self._model_name} computes its recurrent states in a way that is not known here, such as a kernel "
                "of its own, so they cannot be rolled back"
            )
        self._has_parts = recurrent_states.dim() > states[0][1].root.state.dim()
        return recurrent_states

    def _run(self, state_idx: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        update: StateUpdate = self._cache.state_update
        recurrence, log = self._state(state_idx, self._calls)
        self._calls += 1
        arguments = dict(zip(recurrence.parameters, args, strict=False)) | kwargs
        first = arguments[recurrence.parameters[0]]
        length = first.shape[recurrence.token_dim]
        starts, kept = update.begin(log), update.kept(length, first.device)
        state = None if log.is_empty else log.state_at(starts)
        if state is None or (update.counts is not None and recurrence.continues and length > 1):
            output, state = recurrence.prefill(original, state, kept, arguments)
            log.restart(update.ends(starts, length), state)
            return output, state
        output, entries = recurrence.step(state, update.nodes, arguments)
        update.add(log, starts, entries, kept)
        return output, state

    def _state(self, state_idx: int, part: int) -> tuple[Recurrence, StateLog]:
        states = self._recurrent.setdefault(state_idx, [])
        if part == len(states):
            assert self._recurrence is not None
            recurrence = self._recurrence()
            log = StateLog(recurrence.advance, self._cache.uploads)
            if state_idx in self._taken_over:
                point = self._taken_over[state_idx]
                log.restart(point.slots, recurrence.load(point.state, part))
            states.append((recurrence, log))
        return states[part]
