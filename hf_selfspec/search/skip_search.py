"""What is known of the sets of skipped blocks that were tried, and which of them drafts."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..model.partial import LayerPlan
from .costs import ForwardCosts, Stopwatch
from .estimates import effects
from .on_the_fly import ClosestLayers, OnTheFlySearch, Search
from .proposers import Closest, Look, Proposer, RandomAndBayes
from .replay import LEAST_SPEEDUP, Replay, Rule, Trace, replay, rule_of, rule_state
from .skip_space import SkipSpace

# Best sets that are tried again on each new window.
_TRIED_AGAIN = 3
# On how many windows a set has to be good enough to end the search.
_CONFIRMED = 3
# Tokens that weigh as much as one of SWIFT's windows.
_WINDOW = 32
# Drafted tokens of which something is remembered, how many have to speak against the tries to count as much as these,
# and how far replays may go to make up for the difference.
_REMEMBERED, _DOUBTED, _EASE = 512, 32, (0.2, 1.1)
# Tries that are replayed anew when that changes by so much.
_REPLAYED, _CHANGED = 4, 0.05
# How much longer rounds may take than foretold before that counts.
_TOLERANCE = 1.05
# A search begins again where, of so many drafted tokens, less than this share of the usual is accepted.
_WATCHED, _FAR_BELOW = 256, 0.65
# Windows after which a set that does not pay is tried once more.
_IDLE = 16
# Tries that the budget does not bound.
_FREE = 8
# Tries that are kept for pictures.
_LOGGED = 4096
_NOTHING = Replay(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Try:
    """One set, tried on one window of text.

    Attributes:
        plan: the set.
        traces: what it says there, one for each row.
        window: number of the window.
        generated: tokens generated until then, all calls of this kind.
    """

    plan: LayerPlan
    traces: tuple[Trace, ...]
    window: int = 0
    generated: int = 0

    def state(self) -> dict[str, Any]:
        """It, as JSON has it."""
        traces = [{"accept": _short(t.accept[0]), "confidence": _short(t.confidence[0])} for t in self.traces]
        return {"set": self.plan.picture(), "window": self.window, "generated": self.generated, "rows": traces}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Try:
        """The reverse of :meth:`state`."""
        rows = ((np.array([row["accept"]], float), np.array([row["confidence"]], float)) for row in state["rows"])
        plan = LayerPlan.of_picture(state["set"])
        return cls(plan, tuple(Trace(*row) for row in rows), int(state["window"]), int(state["generated"]))

    @property
    def matchness(self) -> float:
        """Share of the text's tokens that the set says, too (SWIFT §4.1)."""
        return float(sum(trace.accept.sum() for trace in self.traces)) / self.tokens

    @property
    def tokens(self) -> int:
        """Tokens that it was tried on."""
        return sum(trace.tokens for trace in self.traces)


@dataclass(frozen=True)
class SkipChoice:
    """What a search has found so far.

    Attributes:
        plan: the set.
        drafts: whether it drafts; it does not where no draft would be faster than none.
        stop: when its drafts end, as far as the search chooses that.
        expected_speedup: over one-token steps, as replayed; ``None`` where the ratio was given and matchness decides.
        acceptance_rate: α that drafts of it promise.
        matchness: share of the text's tokens that the set says, too.
    """

    plan: LayerPlan
    drafts: bool
    stop: Rule | None
    expected_speedup: float | None
    acceptance_rate: float
    matchness: float


class _Known:
    """The tries of one set, each with its replays by all rules.

    Attributes:
        rule: the index of the best rule.
        run: what it brings.
    """

    def __init__(self, tries: Iterable[tuple[Try, list[Replay]]] = ()) -> None:
        self.tries = list(tries)
        self._count()

    def add(self, done: Try, replays: list[Replay]) -> None:
        """Takes in one more."""
        self.tries.append((done, replays))
        self._count()

    def _count(self) -> None:
        runs = [Replay.of_all(run) for run in zip(*(replays for _, replays in self.tries), strict=True)]
        self.rule = _fastest(runs) if runs else 0
        self.run = runs[self.rule] if runs else _NOTHING
        self.eased: list[list[Replay]] = []

    def rule_with_ease(self) -> tuple[int, Replay, Replay]:
        """The best rule where text is as hard as it was lately, what it brings there, and on the tries as they were."""
        recent = [replays for _, replays in self.tries[-_REPLAYED:]]
        runs = [Replay.of_all(run) for run in zip(*(self.eased or recent), strict=True)]
        rule = _fastest(runs)
        return rule, runs[rule], Replay.of_all(replays[rule] for replays in recent)


def _fastest(runs: Sequence[Replay]) -> int:
    return min(range(len(runs)), key=lambda index: runs[index].seconds / runs[index].tokens)


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


class SkipSearch:
    """One search for one model and kind of call; threads may share it.

    A window of 32 tokens says little, some text is easier than other, and the best of many scores says too much: a set
    that scored well is tried again on later text, and what counts is by how much it beats others on the same text
    (:func:`effects`). (SWIFT keeps the highest score; a set that had been lucky once would never be replaced.)

    Where the ratio is searched for, too, a set's score is the speed-up that follows from its trace, from measured costs
    and from the best stop rule; otherwise it is the matchness.

    Args:
        settings: what is tried, and when that ends.
        space: blocks to choose from.
        ratio: share of these blocks that a proposed set skips; where ``auto``, of the first ones.
        start: the set that drafts until a better one is found.
        auto: whether the ratio is searched for.
        rules: stop rules to compare.
        max_draft: most tokens in a draft.

    Attributes:
        tries: all of them, in order.
        steps: tries of the search that is going on, or was the last.
        generated: tokens generated with it.
        seconds, search_seconds: time of these generations, and of the tries in them.
        costs: measured forwards, ``None`` before the first timings.
        timings: how often forwards were timed.
        found: for each change of the best set its step and that set.
        changed: is called after each try, ``None`` where nobody wants to know.
    """

    def __init__(
        self,
        settings: Search,
        space: SkipSpace,
        ratio: float,
        start: LayerPlan,
        auto: bool = False,
        rules: Sequence[Rule] = (),
        max_draft: int = 25,
    ) -> None:
        self.settings = settings
        self.space = space
        self.ratio = ratio
        self.auto = auto
        self.rules = rules
        self.max_draft = max_draft
        self.changed: Callable[[], None] | None = None
        self.tries: deque[Try] = deque(maxlen=_LOGGED)
        self.generated = 0
        self.seconds = self.search_seconds = 0.0
        self.costs: ForwardCosts | None = None
        self.timings = 0
        self.found: deque[tuple[int, LayerPlan]] = deque([(0, start)], maxlen=_LOGGED)
        self.choice = SkipChoice(start, True, None, None, 0.0, 0.0)
        self._stopwatch: Stopwatch | None = None
        self._lock = threading.Lock()
        self._rounds: deque[tuple[int, float, float]] = deque(maxlen=_WATCHED)
        self._fared, self._time = (0.0, 0.0), (0.0, 0.0)
        self._ease, self._expected_rate = 1.0, 0.0
        self._usual_ease: float | None = None
        self._is_over = self._has_begun = False
        self._start_over([start])

    # What drafts -------------------------------------------------------------------------------------------------

    @property
    def best(self) -> LayerPlan:
        """The best set so far."""
        return self.choice.plan

    @property
    def matchness(self) -> float:
        """What the best set is estimated to match, 0 before the first try."""
        return self.choice.matchness

    @property
    def history(self) -> list[float]:
        """Matchness of every try, in order."""
        return [done.matchness for done in self.tries]

    @property
    def is_over(self) -> bool:
        """Whether the best set is there to stay (SWIFT's acceleration phase)."""
        return self._is_over

    @property
    def tries_each_round(self) -> bool:
        """Whether a set is tried after each round, on the last tokens; otherwise several are when a window is full."""
        return isinstance(self.settings, OnTheFlySearch)

    @property
    def phase(self) -> str:
        """``optimization`` or ``acceleration`` (SWIFT, Figure 4)."""
        return "acceleration" if self._is_over else "optimization"

    # What is tried -----------------------------------------------------------------------------------------------

    def begin(self, look: Look) -> None:
        """Lets the proposer's first set draft, before any was tried."""
        with self._lock:
            if self._has_begun or self.tries:
                return
            self._has_begun = True
            if (plan := self._proposer.first(look)) is not None:
                self._again = [plan]
                self._lead(SkipChoice(plan, True, None, None, 0.0, 0.0))

    def may_try(self) -> bool:
        """Whether the budget allows tries."""
        budget = self.settings.budget if isinstance(self.settings, OnTheFlySearch) else 1.0
        return self.steps < _FREE or self.search_seconds <= budget * self.seconds

    def spent(self, seconds: float, search_seconds: float) -> None:
        """Takes in how long a round took, and how much of that went into tries."""
        with self._lock:
            self.seconds += seconds
            self.search_seconds += search_seconds

    def begin_window(self) -> None:
        """The text has moved on by a window: what looks best is to be tried on it."""
        with self._lock:
            self._windows += 1
            if self.best in self._known:
                self._choose()
            if self._has_become_hard():
                self._start_over(self._leaders())
            if self._is_over:
                # A set that does not pay is asked now and then whether it would.
                self._again = [self.best] if not self.choice.drafts and self._windows % _IDLE == 0 else []
                return
            self._again = self._leaders()[: _TRIED_AGAIN if self.tries_each_round else 1] or [self.best]
            self._proposer.begin_window(self.best, self.matchness)

    def propose(self, look: Look) -> LayerPlan | None:
        """The next set to try: first the one that drafts already.

        Args:
            look: finds the closest sets for the text as it is; for :class:`ClosestLayers`.

        Returns:
            ``None`` where there is nothing to try before the next window.
        """
        with self._lock:
            if self._again:
                return self._again.pop(0)
            return None if self._is_over else self._proposer.propose(self._worth(), self.steps, look)

    def time(self, stopwatch: Stopwatch) -> None:
        """Takes in timings of forwards."""
        with self._lock:
            self.timings += 1
            if self._stopwatch is None:
                self._stopwatch = stopwatch
            else:
                self._stopwatch.add(stopwatch)
            self._use(self._stopwatch.costs())

    def register(self, plan: LayerPlan, traces: Sequence[Trace]) -> None:
        """Takes in what ``plan`` says where the text's tokens are known."""
        with self._lock:
            self._register(Try(plan, tuple(traces), self._windows, self.generated))
        if self.changed is not None:
            self.changed()

    def watch(
        self, plan: LayerPlan, rows: int, drafted: int, tokens: int, steps: int, nodes: int, seconds: float
    ) -> None:
        """Takes in one round of drafting, without which each row would have had one token.

        How often drafts are accepted, against what the tries promised, tells how hard the text is. Where that changes
        much for the worse, the search begins again (SWIFT's dynamic streams, Figure 7).

        Args:
            plan: what drafted.
            rows: that took part.
            drafted, tokens: tokens drafted and generated, all rows.
            steps: drafting steps, all rows together.
            nodes: drafted tokens that were verified, for each row.
            seconds: time of drafting and verification.
        """
        with self._lock:
            self.generated += tokens
            if plan != self.best or not drafted or not self._expected_rate:
                return
            expected, accepted = drafted * self._expected_rate, float(tokens - rows)
            kept = max(0.0, 1 - drafted / _REMEMBERED)
            if self.costs is not None:
                foretold = steps * self.costs.draft(plan) + self.costs.verify(plan.first_altered, nodes)
                self._time = (self._time[0] * kept + foretold, self._time[1] * kept + seconds)
            self._fared = (self._fared[0] * kept + expected, self._fared[1] * kept + accepted)
            self._rounds.append((drafted, expected, accepted))

    # What lasts --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was found, as JSON has it."""
        with self._lock:
            choice = self.choice
            return {
                "phase": self.phase,
                "generated": self.generated,
                "costs": None if self.costs is None else asdict(self.costs),
                "set": choice.plan.picture(),
                "drafts": choice.drafts,
                "stop": None if choice.stop is None else rule_state(choice.stop),
                "expected_speedup": choice.expected_speedup,
                "acceptance_rate": choice.acceptance_rate,
                "matchness": choice.matchness,
                "tries": [done.state() for known in self._known.values() for done, _ in known.tries],
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        tries = sorted((Try.of(one) for one in state["tries"]), key=lambda done: done.generated)
        plan = LayerPlan.of_picture(state["set"])
        if (
            any(done.plan.num_layers != self.space.num_layers for done in tries)
            or plan.num_layers != self.space.num_layers
        ):
            raise ValueError(f"a set for another depth than {self.space.num_layers} layers")
        stop = None if state["stop"] is None else rule_of(state["stop"])
        names = ("drafts", "expected_speedup", "acceptance_rate", "matchness")
        choice = SkipChoice(plan=plan, stop=stop, **{name: state[name] for name in names})
        with self._lock:
            self.costs = None if state["costs"] is None else ForwardCosts(**state["costs"])
            self.generated = int(state["generated"])
            for done in tries:
                self._known.setdefault(done.plan, _Known()).add(done, self._replays(done))
            self.tries.extend(tries)
            self.steps = len(tries)
            self._windows = max((done.window for done in tries), default=0)
            self._is_over, self._has_begun = state["phase"] == "acceleration", True
            self._again = []
            self._lead(choice)

    # Inside ------------------------------------------------------------------------------------------------------

    def _has_become_hard(self) -> bool:
        """Whether drafts are accepted much less often than they were when the search had ended."""
        drafted = sum(count for count, _, _ in self._rounds)
        if not self._is_over or drafted < _WATCHED:
            return False
        while drafted - self._rounds[0][0] >= _WATCHED:
            drafted -= self._rounds.popleft()[0]
        ease = sum(accepted for _, _, accepted in self._rounds) / sum(expected for _, expected, _ in self._rounds)
        if self._usual_ease is None:
            self._usual_ease = ease
        return ease < _FAR_BELOW * self._usual_ease

    def _start_over(self, again: list[LayerPlan]) -> None:
        self._known: dict[LayerPlan, _Known] = {}
        self._again = again
        self._proposer: Proposer = self._new_proposer()
        self._rounds.clear()
        self._fared, self._time = (0.0, 0.0), (0.0, 0.0)
        self._ease, self._expected_rate = 1.0, 0.0
        self._usual_ease = None
        self._since_better = self._windows = self.steps = 0
        self._is_over = False

    def _new_proposer(self) -> Proposer:
        if isinstance(self.settings, ClosestLayers):
            return Closest(self.settings, self.space, self.ratio, self.auto)
        return RandomAndBayes(self.settings, self.space, self.ratio, self.auto)

    def _leaders(self) -> list[LayerPlan]:
        worth = self._worth()
        return sorted(worth, key=lambda plan: -worth[plan])[:_TRIED_AGAIN]

    def _use(self, costs: ForwardCosts) -> None:
        self.costs = costs
        for plan, known in self._known.items():
            self._known[plan] = _Known((done, self._replays(done)) for done, _ in known.tries)
        if self._known:
            self._choose()

    def _replays(self, done: Try, ease: float = 1.0) -> list[Replay]:
        if not self.auto or self.costs is None:
            return []
        traces = [trace.eased(ease) for trace in done.traces]
        return [
            Replay.of_all(replay(trace, rule, done.plan, self.costs, self.max_draft) for trace in traces)
            for rule in self.rules
        ]

    def _register(self, done: Try) -> None:
        self.tries.append(done)
        self.steps += 1
        self._known.setdefault(done.plan, _Known()).add(done, self._replays(done))
        self._since_better += 1
        if self._choose():
            self._since_better = 0
        settings = self.settings
        enough = self.steps >= settings.max_steps
        good = self.matchness > settings.target_matchness and len(self._known[self.best].tries) >= _CONFIRMED
        by_size = isinstance(settings, ClosestLayers) and self.auto
        stuck = self._since_better >= settings.patience or (good and not by_size)
        if stuck and not enough and self._proposer.go_on(self.best, self.matchness):
            self._since_better = 0
            return
        self._is_over = self._is_over or enough or stuck

    def _choose(self) -> bool:
        """Takes the best set; whether it is another one. Once the search is over, the set stays."""
        worth = self._worth()
        best = self.best if self._is_over else max(worth, key=lambda plan: worth[plan])
        matchness = self._estimates(lambda _, done, __: done.matchness)[best]
        if not self._by_speed:
            return self._lead(SkipChoice(best, True, None, None, matchness, matchness))
        known = self._known[best]
        expected, accepted = self._fared
        ease = min(max((accepted + _DOUBTED) / (expected + _DOUBTED), _EASE[0]), _EASE[1])
        if best != self.best or abs(ease - self._ease) > _CHANGED:
            self._ease = ease
            known.eased = [self._replays(done, ease) for done, _ in known.tries[-_REPLAYED:]]
        rule, run, usual = known.rule_with_ease()
        self._expected_rate = usual.accepted / usual.drafted
        # Replays of the last tries, made as hard as drafting has been, say how much the estimate has to be corrected.
        speed = worth[best] * (run.tokens / run.seconds) * (known.run.seconds / known.run.tokens)
        # Rounds take longer than their forwards alone.
        foretold, taken = self._time
        if expected >= _DOUBTED:
            speed *= min(_TOLERANCE * foretold / taken, 1.0)
        drafts = speed >= LEAST_SPEEDUP
        return self._lead(SkipChoice(best, drafts, self.rules[rule], speed, run.accepted / run.drafted, matchness))

    def _lead(self, choice: SkipChoice) -> bool:
        changed = choice.plan != self.choice.plan
        self.choice = choice
        if changed:
            self.found.append((len(self.tries), choice.plan))
        return changed

    @property
    def _by_speed(self) -> bool:
        return self.auto and self.costs is not None

    def _worth(self) -> dict[LayerPlan, float]:
        """The estimate of each set that was tried: expected speed-up, or matchness."""
        if not self._by_speed:
            return self._estimates(lambda _, done, __: done.matchness)
        found = self._estimates(self._log_speed)
        return {plan: math.exp(value) for plan, value in found.items()}

    def _log_speed(self, known: _Known, done: Try, replays: list[Replay]) -> float:
        assert self.costs is not None
        run = replays[known.rule]
        return math.log(self.costs.plain() * run.tokens / run.seconds)

    def _estimates(self, score: Callable[[_Known, Try, list[Replay]], float]) -> dict[LayerPlan, float]:
        """What the sets score on the usual text, as far as that is known."""
        if not self._known:
            return {}
        rows = [
            (score(known, done, replays), done.tokens / _WINDOW, index, done.window)
            for index, known in enumerate(self._known.values())
            for done, replays in known.tries
        ]
        values, weights, sets, windows = (np.array(column) for column in zip(*rows, strict=True))
        sizes = np.array([len(plan.skipped_attention) + len(plan.skipped_mlp) for plan in self._known])
        near = 2 * max(1, round(len(self.space.blocks) / 20))
        found, text = effects(values, weights, sets, windows, sizes, near, self._proposer.doubt)
        return dict(zip(self._known, (found + text).tolist(), strict=True))
