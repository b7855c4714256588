"""Recorded streams played against the controller: known texts, known costs, no model and no clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hf_selfspec.batch import Draft, Verdict
from hf_selfspec.drafts import Drafter, controlled
from hf_selfspec.drafts.controlled import ControlledDrafter
from hf_selfspec.drafts.controller import Arms, ArmStats, Controller, Curves
from hf_selfspec.drafts.free.free import FreeDrafts
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.successors import Successors
from hf_selfspec.model.logits import WIDTH, Logits

# Seconds of rounds with 0, 1, 2, ... drafted tokens of a row, in plain rounds, by the number of tokens of all rows.
TABLES = {
    "EPYC": ((1, 1.0), (2, 1.13), (3, 1.17), (4, 1.4), (8, 1.67), (16, 1.7), (32, 2.6), (64, 5.0), (256, 19.0)),
    "Xeon": ((1, 1.0), (2, 1.35), (3, 1.5), (4, 1.65), (8, 2.2), (16, 3.0), (32, 4.5), (64, 8.0), (256, 30.0)),
    "bfloat16": ((1, 1.0), (2, 1.04), (4, 1.06), (8, 1.2), (16, 1.5), (32, 2.0), (64, 3.4), (256, 12.0)),
    "flat": ((1, 1.0), (64, 1.1), (256, 1.3)),
}


def seconds_of(table: str, tokens: int) -> float:
    """The time of a forward over so many tokens of all rows; between those of the table it rises evenly."""
    points = TABLES[table]
    for (few, less), (many, more) in itertools.pairwise(points):
        if tokens <= many:
            return less + (more - less) * (tokens - few) / (many - few)
    return points[-1][1] * tokens / points[-1][0]


@dataclass
class Stream:
    """One recorded text: the prompt, what the model generated, and its likeliest tokens at each step."""

    prompt: list[int]
    new: list[int]
    tops: list[tuple[list[int], list[float]]] = field(repr=False)


class _Source(Drafter):
    """Another source: right with a fixed probability for each token, at a price in plain rounds."""

    def __init__(self, replay: Replay, length: int, rate: Callable[[int], float], price: float, promised: float | None):
        self.replay, self.length, self.rate, self.price = replay, length, rate, price
        self.expected_speedup = promised
        self.random, self.whole = random.Random(1), length if replay.is_whole else 0

    def propose(self, text: Any, max_new: list[int]) -> Draft:
        self.replay.now += self.price
        tokens, lengths, width = [], [], min(self.length, max(max_new))
        for row, count in enumerate(max_new):
            done = self.replay.done[row]
            known = self.replay.streams[row].new[done : done + width]
            right = self.rate(done)
            drafted = [token if self.random.random() < right else -2 - token for token in known]
            lengths.append(min(len(known), count))
            tokens.append([*drafted, *[0] * (width - len(drafted))])
        drafting = [done for done, count in zip(self.replay.done, max_new, strict=True) if count]
        self.replay.widths.append((min(drafting, default=0), width))
        return Draft(torch.tensor(tokens), lengths) if any(lengths) else Draft.none(text)


class _Free(FreeDrafts):
    """Free drafts whose planning, and learning from logits, take time."""

    replay: Replay

    def plan(self, *given: Any) -> Any:
        self.replay.now += self.replay.awake / 2
        return super().plan(*given)

    def learn(self, text: Any, verdicts: list[Verdict], tops: Any) -> None:
        self.replay.now += 0.0 if tops is None else self.replay.awake / 2
        super().learn(text, verdicts, tops)


class Replay:
    """Plays streams, as one batch, against the controller.

    Args:
        table: what forwards cost.
        sources: for each other source its name, draft length, rate by position, price and promise.
        free: whether there are free drafts.
        on_cpu: whether the first guesses of costs are those for a CPU, by default as in the table.
        awake: what planning and learning of a round take, in plain rounds.

    Attributes:
        is_whole: whether drafts of other sources are made in one forward, and end with nothing but their number.
        widths: where the row that is the last was, and how many tokens these drafts had.
        disturbed: by number of the round, seconds for which something else kept the machine busy.
    """

    def __init__(
        self,
        table: str,
        sources: Sequence[tuple[str, int, Callable[[int], float], float, float | None]] = (),
        free: bool = True,
        on_cpu: bool | None = None,
        awake: float = 0.04,
    ) -> None:
        self.on_cpu = table != "flat" if on_cpu is None else on_cpu
        self.table, self.sources, self.has_free, self.awake = table, sources, free, awake
        self.now, self.random = 0.0, random.Random(0)
        self.arms, self.curves, self.texts = Arms(ArmStats), Curves(), LookupFindings()
        self.streams: Sequence[Stream] = ()
        self.active = SimpleNamespace(kept=[])
        self.is_whole, self.widths = False, list[tuple[int, int]]()
        self.disturbed: dict[int, float] = {}
        self.done: list[int] = []
        self.timeline: list[tuple[int, float]] = []

    def play(self, streams: Sequence[Stream]) -> float:
        """Tokens per second over all streams, divided by those without drafts; fills ``timeline`` (tokens, seconds)."""
        self.streams, self.done = streams, [0] * len(streams)
        begun, self.timeline = self.now, [(0, 0.0)]
        with self._patched():
            drafter = self._drafter()
            while active := sum(self._left(row) > 0 for row in range(len(streams))):
                self._round(drafter, active)
                self.timeline.append((sum(self.done), self.now - begun))
            drafter.finish(self._text())
        # Without drafts all rows advance together.
        steps = range(max(len(stream.new) for stream in streams))
        plain = sum(seconds_of(self.table, sum(len(stream.new) > step for stream in streams)) for step in steps)
        return plain / (self.now - begun)

    def _left(self, row: int) -> int:
        return len(self.streams[row].new) - self.done[row]

    def _text(self) -> Any:
        tokens = [[*s.prompt, *s.new[:done]] for s, done in zip(self.streams, self.done, strict=True)]
        lengths = [len(row) for row in tokens]
        base = [0] * len(tokens)
        return SimpleNamespace(batch_size=len(tokens), lengths=lengths, base=base, ids=_Ids(tokens), no_draft=None)

    def _drafter(self) -> ControlledDrafter:
        session: Any = SimpleNamespace(
            target=SimpleNamespace(
                unrepresentative_forwards=0,
                padding=None,
                cache=SimpleNamespace(reserve=lambda count: None),
                now=lambda: self.now,
                active_rows=self.active,
                full_plan=None,
                model=SimpleNamespace(),
            ),
            grammars=(),
            stop=None,
            scorer=SimpleNamespace(do_sample=False),
            anatomy=SimpleNamespace(tree=True),
            is_tensor_parallel=False,
            max_draft=25,
            cap_by_logit_memory=lambda tokens: tokens,
            vocabulary=1 << 16,
            num_rows=1,
        )
        controller = Controller(self.arms, self.curves, "replay", self.on_cpu)
        free = _Free(self.texts if self.has_free else None, session, controller, 31)
        free.replay = self
        others: Any = {name: _Source(self, *settings) for name, *settings in self.sources}
        return ControlledDrafter(session, free, others)

    def _round(self, drafter: ControlledDrafter, active: int) -> None:
        text = self._text()
        self.active.kept = [row for row in range(len(self.streams)) if self._left(row)]
        max_new = [max(self._left(row) - 1, 0) for row in range(len(self.streams))]
        draft = drafter.propose(text, max_new)
        self.now += seconds_of(self.table, active * (draft.size + 1)) * self.random.gauss(1, 0.02)
        self.now += self.disturbed.get(len(self.timeline), 0.0)
        verdicts, self._tops = self._judged(draft)
        drafter.look and drafter.look(Logits(torch.zeros(0, 0, 0)))
        for row, verdict in enumerate(verdicts):
            self.done[row] += len(verdict.tokens)
        drafter.update(self._text(), verdicts, torch.zeros(len(verdicts), draft.size + 1, 0))

    def _judged(self, draft: Draft) -> tuple[list[Verdict], list[tuple[np.ndarray, np.ndarray]]]:
        """What a greedy verification decides, and the likeliest tokens after each node on its path, -1 elsewhere."""
        verdicts, tops = [], []
        for row, stream in enumerate(self.streams):
            found = np.full((draft.size + 1, WIDTH), -1), np.zeros((draft.size + 1, WIDTH), np.float32)
            tokens: list[int] = []
            nodes: list[int] = []
            node, at = 0, self.done[row]
            drafted = draft.tokens[row].tolist() if draft.size else []
            while node >= 0 and at < len(stream.new):
                for part, values in zip(found, stream.tops[at], strict=True):
                    part[node, : len(values)] = values
                tokens.append(stream.new[at])
                node = next((n for n in draft.children(row, node) if drafted[n - 1] == stream.new[at]), -1)
                nodes.append(node)
                at += 1
            verdicts.append(Verdict(tokens, nodes, False, []))
            tops.append(found)
        return verdicts, tops

    @contextmanager
    def _patched(self) -> Iterator[None]:
        see = Successors.see

        def see_known(self: Successors, pairs: Any, tokens: np.ndarray, shares: np.ndarray, text: int) -> None:
            known = (tokens[:, 0] >= 0).nonzero()[0]
            see(self, [pairs[node] for node in known], tokens[known], shares[known], text)

        with (
            patch.object(controlled, "Tops", lambda _: SimpleNamespace(of=lambda row: self._tops[row])),
            patch.object(Successors, "see", see_known),
        ):
            yield


class _Ids:
    """The ids of all rows, without a tensor of each round: drafters read only the prompts."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows, self.longest = rows, max(map(len, rows))

    def __getitem__(self, place: Any) -> torch.Tensor:
        return torch.zeros(len(self.rows), 0, dtype=torch.long)

    def tolist(self) -> list[list[int]]:
        return [[*row, *[0] * (self.longest - len(row))] for row in self.rows]
