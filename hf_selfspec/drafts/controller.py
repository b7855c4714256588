"""The one place that decides which source drafts in a round, if any, by the tokens and times of earlier rounds."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..model.forks import new_lock
from .cost_curve import CostCurve

# A smaller expected speed-up is within the error of such an estimate.
LEAST_SPEEDUP = 1.02
# The arm of free drafts, and their arm in rounds where they pay only since the last tokens occurred before. Other arms
# have the names of their sources.
FREE, MATCHES = "free drafts", "matches"
# The weight of the rounds before against the next one.
_MEMORY = 0.98
# The speed-up that is assumed of a source that was never timed: it is tried where free drafts do not promise more.
_HOPED = 2.0
# Rounds after which results are trusted. (Twelve for free drafts, whose results come in bursts, were no better: 0.999,
# the mean over the streams of tests/drafts/test_replay.py and twelve chats of SmolLM2.)
_TRIED = 4
# Of how often tokens of a line were right at each depth: the weight of the rounds before against the next one, and in
# tokens that of the depth before, so that depths which were left out come back. (8 rows by the costs of an 8B model,
# computed for an H200: 0.99 to 1.15 of the speed of whole lines of 15; where width costs nothing 0.984 to 1.0, and with
# 0.9 0.975.)
_LINES, _DOUBTED = 0.8, 4.0
# Sources that do not pay are tried again for at most this share of the time. A round of such a source is taken to lose
# at least so many plain rounds.
_PRICE, _LEAST_LOST = 0.006, 0.02
# Contexts of up to 1,024, 4,096, 16,384, ... slots share a curve, and so do batches of more than eight rows that differ
# by an eighth. The last one is the maximum number of curves.
_FIRST_RANGE, _RANGE, _MOST = 10, 2, 64
# A row that is this share of the most tokens that are left, but at least so many tokens, ahead of the last one is e
# times less likely to be the last to end.
_AHEAD, _LEAST_AHEAD = 0.05, 1.0
# How many tokens of each row's line were accepted, and how many drafted.
Lines = Sequence[tuple[int, int]]
# The sums of :class:`ArmStats`, in which older rounds count less.
_SUMS = "weight", "gained", "most", "spent", "accepted", "drafted"


@dataclass
class ArmStats:
    """The results of one source."""

    rounds: int = 0  # in which it drafted, since they were doubted last
    weight: float = 0.0  # number of rounds in the sums, in which older ones count less
    gained: float = 0.0  # tokens of a row, by what they are worth
    most: float = 0.0  # tokens of a row if all of them were right
    spent: float = 0.0  # times, in plain rounds
    accepted: float = 0.0  # of its tokens
    drafted: float = 0.0
    waiting: int = 0  # rounds since it drafted last
    # At each depth of its lines, of the tokens behind right ones those that were right, and all.
    depths: list[tuple[float, float]] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """α, starting with one accepted and one rejected token before the first round."""
        return (self.accepted + 1.0) / (self.drafted + 2.0)

    @property
    def is_trusted(self) -> bool:
        return self.rounds >= _TRIED

    def speedup(self, promised: float | None) -> float:
        """Tokens per second over those of plain rounds. Until results are trusted it is ``promised``, the source's own
        estimate, but no more than if all of its tokens had been right."""
        if promised == 0.0:
            return 0.0
        if self.is_trusted:
            return self.gained / self.spent
        hoped = _HOPED if promised is None else promised
        return min(hoped, self.most / self.spent) if self.drafted else hoped

    def add(self, gained: float, spent: float, lines: Lines = (), rows: int = 1) -> None:
        accepted, drafted = map(sum, zip(*lines, strict=True)) if lines else (0, 0)
        self.depths += [(0.0, 0.0)] * (max((length for _, length in lines), default=0) - len(self.depths))
        for depth, (right, seen) in enumerate(self.depths):
            reached = [kept > depth for kept, length in lines if min(kept, length - 1) >= depth]
            self.depths[depth] = _LINES * right + sum(reached), _LINES * seen + len(reached)
        self.waiting = 0
        self.rounds += 1
        if self.rounds == 1 and not self.weight:
            return  # the first round selects and warms up kernels
        self._scale(_MEMORY)
        self.weight += 1.0
        self.gained += gained
        self.most += max(gained, 1.0 + drafted / rows)
        self.spent += spent
        self.accepted += accepted
        self.drafted += drafted

    def reach(self, length: int) -> list[float]:
        """How likely the first 1, 2, ... tokens of a line are right; all of them where nothing is known yet."""
        shares, unseen = [1.0], [(0.0, 0.0)] * (length - len(self.depths))
        for right, seen in [*self.depths[:length], *unseen]:
            shares.append((right + _DOUBTED * shares[-1]) / (seen + _DOUBTED))
        return list(accumulate(shares[1:], operator.mul))

    def _scale(self, factor: float) -> None:
        for name in _SUMS:
            setattr(self, name, factor * getattr(self, name))

    def wait(self, pace: float) -> None:
        """Records a round of another source, ``pace`` times as fast as plain ones. A source that would lose little is
        tried again."""
        self.waiting += 1
        is_tried = self.is_trusted or self.drafted > 0.0
        if is_tried and self.gained < max(pace, LEAST_SPEEDUP) * self.spent:
            loss = max((self.spent - self.gained / pace) / self.weight, _LEAST_LOST)
            rounds_lost = _TRIED if self.is_trusted else 1  # until it is known again what it brings at most
            if rounds_lost * loss <= self.waiting * _PRICE:
                if self.is_trusted:
                    return self.doubt()
                self.begin_anew()

    def begin_anew(self) -> None:
        """Drops the results."""
        self._scale(0.0)
        self.rounds, self.depths = 1, []  # kernels are warm

    def doubt(self) -> None:
        """Trusts the results only after some more rounds, and gives those before the weight of as many."""
        if self.is_trusted:
            self._scale(min(1.0, _TRIED / self.weight))
            self.rounds = 0


# The results of sources for one kind of calls, by their names.
Arms = defaultdict[str, ArmStats]


class Curves:
    """Costs of rounds of one model, which all calls in a process share."""

    def __init__(self) -> None:
        self.lock = new_lock()  # held while curves are looked up or changed, and results read or changed
        self._curves: dict[tuple[object, int, int], CostCurve] = {}

    def curve(self, machine: object, rows: int, context: int, **settings: Any) -> CostCurve:
        """The curve for what forwards run on, and how, a batch size and a context."""
        with self.lock:
            reach = max(context.bit_length() - _FIRST_RANGE, 0) // _RANGE
            step = 1 << max(max(rows - 1, 0).bit_length() - 3, 0)
            key = machine, -(-rows // step) * step, reach
            curve = self._curves.pop(key, None) or CostCurve(rows=key[1], **settings)
            if len(self._curves) >= _MOST:
                self._curves.pop(next(iter(self._curves)))
            self._curves[key] = curve  # the last one in use
            return curve


class Controller:
    """Chooses in each round between sources and nothing; frozen, it times nothing, so all processes decide alike."""

    def __init__(self, arms: Arms, curves: Curves, machine: object, on_cpu: bool, **settings: Any) -> None:
        """``settings`` are those of the :class:`CostCurve` of each batch size and context."""
        self._settings = {"on_cpu": on_cpu, **settings}
        self.curve: CostCurve  # from the first round on
        self._curves, self._machine, self._is_frozen = curves, machine, bool(settings.get("is_frozen"))
        self.arms, self._rows, self._lock = arms, 0, curves.lock
        self.worth: list[float] = []
        with self._lock:
            self.arms[FREE].doubt()  # another text, which free drafts may or may not foretell

    def begin(self, max_new: Sequence[int], running: int, context: int) -> None:
        """Begins a round: tokens that each row may draft, rows that forwards run over, tokens of the longest text.

        A batch takes as long as its last row. So ``worth``, what a token of each row counts (one in the mean over those
        that may draft), is shared evenly but for what the last one costs alone."""
        self._rows = rows = sum(count > 0 for count in max_new)
        self._place = running, context
        self.curve = self._curves.curve(self._machine, *self._place, **self._settings)
        self._own: CostCurve | None = None  # what rounds of a source cost, by which its drafts are cut
        most, alone = max(max_new), self.curve.alone if rows > 1 else 0.0
        ahead = max(_AHEAD * most, _LEAST_AHEAD)
        chances = [math.exp((count - most) / ahead) if count else 0.0 for count in max_new]
        last = alone * rows / max(sum(chances), 1.0)
        self.worth = [last * chance + 1.0 - alone if chance else 0.0 for chance in chances]

    def speedup(self, name: str, promised: float | None = None) -> float:
        """Expected speed-up of a source over plain rounds; ``promised`` is its own estimate, 0 for no draft."""
        with self._lock:
            if not self._rows:
                return 0.0
            if self._is_frozen:
                return math.inf if name == FREE else 0.0
            # The first rounds tell what nothing costs, against which all else is measured.
            return 0.0 if self.curve.wants_plain else self.arms[name].speedup(promised)

    def expected(self, nodes: int, tokens: float) -> float:
        """The speed-up of a round that verifies ``nodes`` drafted tokens and brings ``tokens`` over all rows,
        by what they are worth."""
        return tokens / self._rows * self.curve.plain / self.curve.costs[nodes]

    def width(self, name: str, length: int) -> int:
        """How many of the ``length`` tokens of a line pay where all rows are verified together: by how often those of
        the source were right at each depth, and what its rounds cost. Nothing has to be read of a GPU for that."""
        self._own = own = self._curves.curve((self._machine, name), *self._place, **self._settings)
        with self._lock:
            if not own.is_measured:
                return length
            pace, reach = max(self.curve.pace, self._rows / self.curve.plain), self.arms[name].reach(length)
            known = zip(accumulate(reach), own.costs[1:], strict=False)
            gains = [self._rows * tokens - pace * cost for tokens, cost in known]
            best = gains.index(max(gains)) + 1
            return best if best < len(own.costs) - 1 else length  # beyond which no costs are known

    def choose(self, promised: Mapping[str, float | None], free: float = 0.0) -> str | None:
        """Returns the source that is expected to be the fastest, ``None`` for free drafts or nothing."""
        best = max(promised, key=lambda name: self.speedup(name, promised[name]), default=None)
        if best is None:
            return None
        speedup = self.speedup(best, promised[best])
        return best if speedup >= LEAST_SPEEDUP and speedup > free else None

    def record(self, name: str | None, nodes: int, tokens: float, seconds: float, lines: Lines = ()) -> None:
        """Records a round in which ``name`` drafted, or was asked and had no draft; ``None`` if nobody was asked. All
        rows gain ``tokens``, by what they are worth."""
        with self._lock:
            if not self._rows:
                return
            curve = self.curve
            if name is None:
                curve.add_plain(tokens, seconds)
            elif name in (FREE, MATCHES):
                curve.add(nodes, tokens, seconds)
                seconds = curve.costs[min(nodes, len(curve.costs) - 1)]  # whatever disturbed this round
            elif curve.is_measured:
                curve.see(tokens, seconds)
                if self._own is not None and lines:
                    self._own.add(max(drafted for _, drafted in lines), tokens, seconds)
            if curve.is_measured:
                used = self.arms.get(name or "")
                pace = max(used.speedup(1.0), 1.0) if used is not None else 1.0
                for stats in self.arms.values():
                    if stats is used:
                        stats.add(tokens / self._rows, seconds / curve.plain, lines, self._rows)
                    else:
                        stats.wait(pace)

    def begin_anew(self, name: str) -> None:
        """Drops the results of a source that drafts with something else from now on."""
        with self._lock:
            self.arms[name].begin_anew()
