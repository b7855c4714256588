"""Runs the stream: all ways on each prompt, in rotating order, with the prompts as a service would see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...differences import first_differences
from ...errors import SettingError
from ...notices import warn_once
from ...selfspec import SelfSpec
from .calls import Call, Caller
from .journal import Journal, Parted
from .memory import Peaks
from .progress import Progress
from .prompts import Batch
from .settings import Condition, Settings
from .ways import PLAIN, Way, that_take

# New tokens of a call that warms up one of transformers' own ways.
_WARM_UP = 8
# The number of the pass with a new ``SelfSpec`` for each prompt.
FRESH = -1


@dataclass(frozen=True)
class Part:
    """What is measured under one condition.

    Attributes:
        index: index of the condition.
        condition: the condition.
        batches: the stream.
        ways: the ways that support this batch size.
    """

    index: int
    condition: Condition
    batches: Sequence[Batch]
    ways: Sequence[Way]

    def turns(self, settings: Settings) -> Iterator[tuple[int, int, Sequence[Way]]]:
        """Yields pass, prompt and ways in order, for all passes over the stream, then calls with a new ``SelfSpec``."""
        for turn in range(settings.passes):
            for prompt in range(len(self.batches)):
                yield turn, prompt, _rotated(self.ways, prompt)
        again = [way for way in self.ways if way.make is not None or way.name == PLAIN]
        for prompt in range(1, min(settings.first_calls + 1, len(self.batches))):
            yield FRESH, prompt, _rotated(again, prompt)


def parts_of(settings: Settings, batches: Mapping[int, Sequence[Batch]], ways: Sequence[Way]) -> list[Part]:
    """Returns what is measured under each condition.

    Args:
        settings: the settings of the comparison.
        batches: the stream by batch size.
        ways: all ways.

    Raises:
        SettingError: there are too few prompts for a batch.
    """
    found = []
    for index, condition in enumerate(settings.conditions):
        size = condition.batch_size
        if not batches[size]:
            raise SettingError(f"batch_size={size}: there are fewer prompts than that. Give more, or smaller batches.")
        found.append(Part(index, condition, batches[size], that_take(ways, size)))
    return found


class Stream:
    """Runs the calls that a journal does not have yet.

    Args:
        model: the model.
        settings: the settings of the comparison.
        parts: what is measured, by condition.
        pad: the id that pads batches.
        journal: records the calls.
    """

    def __init__(
        self, model: PreTrainedModel, settings: Settings, parts: Sequence[Part], pad: int, journal: Journal
    ) -> None:
        self.model, self.settings, self.parts, self.pad, self.journal = model, settings, parts, pad, journal
        longest = max(batch.ids.shape[1] for part in parts for batch in part.batches)
        self.caller = Caller(model, settings.seed, longest + settings.max_new_tokens)

    @property
    def total(self) -> int:
        """Number of calls in all."""
        return sum(len(ways) for part in self.parts for _, _, ways in part.turns(self.settings))

    def run(self, progress: Progress) -> None:
        """Makes all missing calls."""
        for part in self.parts:
            _Turns(self, part, progress).run()

    def measure_memory(self, peaks: Peaks | None, progress: Progress) -> None:
        """Measures missing peaks of memory on the longest prompts of each condition, if ``peaks`` is given."""
        for part in self.parts if peaks is not None else ():
            options = self.settings.options(part.condition, self.pad)
            batch = max(part.batches, key=lambda batch: batch.ids.shape[1])
            for way in part.ways:
                if peaks is not None and (way.name, part.index) not in self.journal.peaks:
                    peak = peaks(way, batch, options)
                    if peak is not None:
                        self.journal.add_peak(way.name, part.index, peak)
                    progress.advance(f"memory of {way.name}")


class _Turns:
    """One condition: its ``SelfSpec``s are kept from call to call of a pass, and the next pass begins with new ones.

    A pass that counts would otherwise draft from its own answers. Graphs stay with the model.
    """

    def __init__(self, stream: Stream, part: Part, progress: Progress) -> None:
        self.stream, self.part, self.progress = stream, part, progress
        self.options = stream.settings.options(part.condition, stream.pad)
        self.specs: dict[str, SelfSpec] = {}
        self._turn: int | None = None
        self._warm: set[str] = set()
        self._unsaved: set[str] = set()

    def run(self) -> None:
        for turn, prompt, ways in self.part.turns(self.stream.settings):
            if turn not in (self._turn, FRESH):
                self._begin(turn)
            missing = [way for way in ways if self._key(way, turn, prompt) not in self.stream.journal.calls]
            for way in missing:
                self._call(way, turn, prompt)
            if missing and turn != FRESH:
                self._keep_states()
            if turn == self.stream.settings.passes - 1:
                self._compare(prompt)

    def _begin(self, turn: int) -> None:
        """Creates the ``SelfSpec``s of a pass with what an earlier run of the pass has learned."""
        self._turn = turn
        for way in self.part.ways:
            if way.make is not None:
                self.specs[way.name] = way.make()
                self.stream.journal.restore_state(self._state_name(way.name), self.specs[way.name], self.stream.model)

    def _call(self, way: Way, turn: int, prompt: int) -> None:
        caller, batch = self.stream.caller, self.part.batches[prompt]
        if way.make is None and not way.is_static and way.name not in self._warm:
            self._warm.add(way.name)
            few = {"max_new_tokens": _WARM_UP, "min_new_tokens": None}
            caller.warm_up(way, batch, {**self.options, **few})
        spec = self.specs.get(way.name)
        if turn == FRESH and way.make is not None:
            spec = way.make()
        call = caller.call(way, batch, (self.part.index, turn, prompt), self.options, spec)
        self.stream.journal.add(call, caller.stats)
        self.progress.advance(f"{self.part.condition}: {batch.kind}, {way.name}")

    def _keep_states(self) -> None:
        for name, spec in self.specs.items():
            if name in self._unsaved:
                continue
            try:
                self.stream.journal.keep_state(self._state_name(name), spec, self.stream.model)
            except SettingError as error:
                self._unsaved.add(name)
                warn_once(f"{name} would start from nothing in a restarted run: {error}")

    def _compare(self, prompt: int) -> None:
        """Finds where ids differ from plain generate's."""
        journal, place = self.stream.journal, (self.part.index, prompt)
        if not self.part.condition.is_greedy or place in journal.compared:
            return
        turn = self.stream.settings.passes - 1
        calls = {way.name: journal.calls[self._key(way, turn, prompt)] for way in self.part.ways}
        plain, batch = calls[PLAIN], self.part.batches[prompt]
        parted = [one for call in calls.values() for one in self._parted(batch, plain, call)]
        journal.add_comparison(*place, parted)

    def _parted(self, batch: Batch, plain: Call, call: Call) -> list[Parted]:
        if call.ids == plain.ids:
            return []
        width = batch.ids.shape[1]
        expected, ids = self._padded(batch, plain.ids, call.ids)
        found = first_differences(self.stream.model, expected, ids, batch.mask)
        place = call.condition, call.prompt, call.way
        return [Parted(*place, d.row, d.column - width, d.margin, d.is_near_tie) for d in found]

    def _padded(self, batch: Batch, *texts: list[list[int]]) -> list[torch.Tensor]:
        longest = max(len(row) for text in texts for row in text)

        def padded(text: list[list[int]]) -> torch.Tensor:
            rows = [[*row, *[self.stream.pad] * (longest - len(row))] for row in text]
            return torch.cat([batch.ids, torch.tensor(rows, device=batch.ids.device)], dim=1)

        return [padded(text) for text in texts]

    def _key(self, way: Way, turn: int, prompt: int) -> tuple[str, int, int, int]:
        return way.name, self.part.index, turn, prompt

    def _state_name(self, way: str) -> str:
        readable = re.sub(r"\W+", "-", way).strip("-")[:40]
        place = next(index for index, known in enumerate(self.part.ways) if known.name == way)
        return f"{self.part.index}-{self._turn}-{place}-{readable}"


def _rotated(ways: Sequence[Way], prompt: int) -> list[Way]:
    first = prompt % len(ways)
    return [*ways[first:], *ways[:first]]
