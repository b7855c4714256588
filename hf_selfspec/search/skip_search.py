"""What is known of the sets of skipped blocks that were tried, and which of them drafts."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from ..model.partial import LayerPlan
from ..types import GenerationStats
from .budget import Pace
from .costs import ForwardCosts, Stopwatch
from .estimates import Scores
from .feedback import Feedback
from .on_the_fly import ClosestLayers, OnTheFlySearch, Search
from .proposers import Closest, Look, Proposer, RandomAndBayes
from .replay import LEAST_SPEEDUP, Replay, Rule, Trace, replays, rule_of, rule_state
from .skip_space import SkipSpace
from .tries import Known, SkipChoice, Try, number, whole

# Best sets that are tried again on each new window.
_TRIED_AGAIN = 3
# On how many windows a set has to be good enough to end the search.
_CONFIRMED = 3
# Tokens that weigh as much as one of SWIFT's windows.
_WINDOW = 32
# Windows after which a set that does not pay is tried once more.
_IDLE = 16
# Texts on which forwards are timed in a search, tries between them, and tries that are kept of a set once it is over.
_TIMED_TEXTS, _TIMED_AFTER, _KEPT = 2, 4, 16
# Tries that are kept for pictures.
_LOGGED = 4096


class SkipSearch:
    """One search for one model and kind of call; threads may share it.

    A window of 32 tokens says little, some text is easier than other, and the best of many scores says too much: a set
    that scored well is tried again on later text, and what counts is by how much it beats others on the same text
    (:meth:`Proposer.estimates`; SWIFT keeps the highest score: a set that had been lucky once would never be replaced).

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
        pace: what rounds and tries take.
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
        # Where speed decides, nothing drafts before it is known to pay.
        self.choice = SkipChoice(start, not auto, None, None, 0.0, 0.0)
        self.pace = Pace()
        self._stopwatch: Stopwatch | None = None
        self._unfinished: Stopwatch | None = None
        self._disturbed = 1.0
        self._drafted = False
        self._asked = self._rested = 0
        self._estimated: dict[str, dict[LayerPlan, float]] = {}
        self._lock = threading.Lock()
        self._is_over = self._has_begun = False
        self._again: list[LayerPlan] = []
        self._feedback = Feedback()
        self._start_over()
        self._again.append(start)

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
        """Lets the proposer's first set draft before any was tried, unless speed decides."""
        with self._lock:
            if not self.auto:
                self._begin(look)

    def spent(self, seconds: float, search_seconds: float) -> None:
        """Takes in how long a round took, and how much of that went into tries."""
        with self._lock:
            self.seconds += seconds
            self.search_seconds += search_seconds

    @property
    def is_idle(self) -> bool:
        """Whether no draft pays and nothing is to be tried just now."""
        if self.choice.drafts or self._again or not self._is_over:
            return False
        return self._windows + 1 < self._asked + _IDLE

    def rest(self, tokens: int, seconds: float) -> None:
        """Takes in a call that neither drafted nor tried anything."""
        with self._lock:
            self.generated += tokens
            self.seconds += seconds
            self._rested += tokens
            windows, self._rested = divmod(self._rested, self.settings.context_window)
            self._windows += windows
            self._feedback = Feedback()

    def begin_window(self) -> None:
        """The text has moved on by a window: what looks best is to be tried on it."""
        with self._lock:
            self._windows += 1
            if not self._is_over and self._proposer.is_busy:
                return
            drafted = self.choice.drafts
            if self.best in self._known:
                self._choose()
            leaders = [self.best]
            if self._is_over and (self._feedback.has_become_hard() or (drafted and self._has_given_up())):
                leaders = self._leaders()
                self._start_over()
            elif not self._is_over:
                leaders = self._leaders()
            if self._is_over:
                # A set that does not pay is asked now and then whether it would, however its drafts fared before.
                if not self.choice.drafts and self._windows >= self._asked + _IDLE:
                    self._asked, self._again, self._feedback = self._windows, [self.best], Feedback()
                return
            if not self._drafted:
                self._feedback = Feedback()  # which no draft corrects
            self._drafted = False
            self._again = leaders[: _TRIED_AGAIN if self.tries_each_round or not self.steps else 1] or [self.best]
            self._proposer.begin_window(self.best, self.matchness)

    def _has_given_up(self) -> bool:
        """Whether drafts have just stopped to pay, and it is a while since that was looked into."""
        return not self.choice.drafts and self._windows >= self._asked + _IDLE

    @property
    def wants_timings(self) -> bool:
        """Whether forwards are to be timed on this text: at first, after some tries, and when a set is tried again."""
        if not self.auto:
            return False
        if self._is_over:
            return bool(self._again) or not self.timings
        return self.timings < _TIMED_TEXTS and self.steps >= _TIMED_AFTER * self.timings

    def stopwatch(self) -> Stopwatch:
        """The timings to go on with, in this call or a later one."""
        if self._unfinished is None:
            self._unfinished = Stopwatch(*self.space.timed_plans())
        return self._unfinished

    @property
    def look_size(self) -> int:
        """Tokens of the look that comes before the next try, 0 for none."""
        return self._proposer.look_size if not self._has_begun or not self._again else 0

    def prepare(self, look: Look) -> None:
        """Takes the look that comes before the next try."""
        with self._lock:
            self._begin(look)
            if not self._again:
                self._proposer.prepare(look)

    def propose(self, look: Look) -> LayerPlan | None:
        """The next set to try: first the one that drafts already.

        Args:
            look: finds the closest sets for the text as it is; for :class:`ClosestLayers`.

        Returns:
            ``None`` where there is nothing to try before the next window.
        """
        with self._lock:
            self._begin(look)
            if self._again:
                return self._again.pop(0)
            return None if self._is_over else self._proposer.propose(self._scores(), self.steps, look)

    def time(self, stopwatch: Stopwatch) -> None:
        """Takes in timings of forwards."""
        with self._lock:
            self.timings, self._unfinished = self.timings + 1, None
            # Once a search is over, a machine may be another or busier than it was.
            if self._stopwatch is None or self._is_over:
                self._stopwatch = stopwatch
            else:
                self._stopwatch.add(stopwatch)
            self._disturbed = self._stopwatch.costs(median).plain() / self._stopwatch.costs().plain()
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
            self._drafted = self._drafted or drafted > 0
            if not drafted and self.costs is not None:
                self._feedback.add_plain(self.costs.plain(), seconds)
            if plan != self.best or not drafted or not self._expected_rate:
                return
            costs, foretold = self.costs, 0.0
            if costs is not None:
                foretold = steps * costs.draft(plan) + costs.verify(plan.first_altered, nodes)
            self._feedback.add(drafted, drafted * self._expected_rate, tokens - rows, foretold, seconds)

    def report(self, stats: GenerationStats) -> None:
        """Adds what was found."""
        stats.plan = self.best.picture()
        stats.phase, stats.matchness, stats.drafts = self.phase, self.history, self.choice.drafts

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
        if state["phase"] not in ("optimization", "acceleration") or not isinstance(state["drafts"], bool):
            raise ValueError(f"{state['phase']!r} is no phase, or {state['drafts']!r} neither yes nor no")
        speedup, costs = state["expected_speedup"], state["costs"]
        choice = SkipChoice(
            plan=plan,
            drafts=state["drafts"],
            stop=None if state["stop"] is None else rule_of(state["stop"]),
            expected_speedup=None if speedup is None else number(speedup),
            acceptance_rate=number(state["acceptance_rate"]),
            matchness=number(state["matchness"]),
        )
        with self._lock:
            if costs is not None:
                if whole(costs["num_layers"]) != self.space.num_layers:
                    raise ValueError(f"costs of {costs['num_layers']} layers")
                found = {name: number(value) for name, value in costs.items() if name != "num_layers"}
                self.costs = ForwardCosts(**found, num_layers=self.space.num_layers)
                if not self.costs.plain():
                    raise ValueError("forwards that take no time")
            self.generated = whole(state["generated"])
            for done in tries:
                self._known.setdefault(done.plan, Known()).add(done, self._replays(done))
            self.tries.extend(tries)
            self.steps = len(tries)
            self._windows = max((done.window for done in tries), default=0)
            self._asked = self._windows
            self._is_over, self._has_begun = state["phase"] == "acceleration", True
            self._again = []
            self.choice = choice
            self.found = deque([(0, plan)], maxlen=_LOGGED)

    # Inside ------------------------------------------------------------------------------------------------------

    def _begin(self, look: Look) -> None:
        if self._has_begun or self.tries:
            return
        self._has_begun = True
        if (plan := self._proposer.first(look)) is not None:
            self._again = [plan]
            self._lead(SkipChoice(plan, not self.auto, None, None, 0.0, 0.0))

    def _start_over(self) -> None:
        self._known: dict[LayerPlan, Known] = {}
        self._estimated.clear()
        self._again = []
        self._proposer: Proposer = self._new_proposer()
        self._feedback = Feedback()
        self._expected_rate = 0.0
        self._drafted = False
        self._since_better = self._windows = self._asked = self.steps = 0
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
        self._estimated.clear()
        for plan, known in self._known.items():
            self._known[plan] = Known((done, self._replays(done)) for done, _ in known.tries)
        if self._known:
            self._choose()

    def _replays(self, done: Try, ease: float = 1.0) -> list[Replay]:
        if not self.auto or self.costs is None:
            return []
        return replays([trace.eased(ease) for trace in done.traces], self.rules, done.plan, self.costs, self.max_draft)

    def _register(self, done: Try) -> None:
        self.tries.append(done)
        self.steps += 1
        self._estimated.clear()
        known = self._known.setdefault(done.plan, Known())
        if self._is_over:
            known.keep(_KEPT - 1)
        known.add(done, self._replays(done))
        self._since_better += 1
        if self._choose():
            self._since_better = 0
        settings = self.settings
        enough = self.steps >= settings.max_steps
        good = self.matchness > settings.target_matchness and len(self._known[self.best].tries) >= _CONFIRMED
        by_size = isinstance(settings, ClosestLayers) and self.auto
        # A set that was good at the last size says nothing of this one.
        good = good and (not self.auto or self._proposer.proposes(self.best))
        stuck = self._since_better >= settings.patience or (good and not by_size)
        if stuck and not enough and self._proposer.go_on(self.best, self.matchness):
            self._since_better = 0
        elif enough or stuck:
            self._is_over, self._again, self._asked = True, [], self._windows

    def _choose(self) -> bool:
        """Takes the best set; whether it is another one. Once the search is over, the set stays."""
        worth = self._worth()
        best = self.best if self._is_over else max(worth, key=lambda plan: worth[plan])
        if not self._by_speed:
            self._expected_rate = worth[best]
            return self._lead(SkipChoice(best, not self.auto, None, None, worth[best], worth[best]))
        matchness = self._estimates("matchness", _matchness)[best]
        known = self._known[best]
        rule, run, usual = known.with_ease(self._feedback.ease, self._replays)
        self._expected_rate = usual.accepted / usual.drafted
        # Replays of the last tries, made as hard as drafting has been, say how much the estimate has to be corrected.
        speed = worth[best] * (run.tokens / run.seconds) * (known.run.seconds / known.run.tokens)
        speed *= self._feedback.pace(self._disturbed)
        drafts = speed >= LEAST_SPEEDUP
        return self._lead(SkipChoice(best, drafts, self.rules[rule], speed, run.accepted / run.drafted, matchness))

    def _lead(self, choice: SkipChoice) -> bool:
        changed = choice.plan != self.choice.plan
        self.choice = choice
        if changed:
            self._feedback = Feedback()
            self.found.append((len(self.tries), choice.plan))
        return changed

    @property
    def _by_speed(self) -> bool:
        return self.auto and self.costs is not None

    def _worth(self) -> dict[LayerPlan, float]:
        """The estimate of each set that was tried: expected speed-up, or matchness."""
        if not self._by_speed:
            return self._estimates("matchness", _matchness)
        found = self._estimates("log speed-up", self._log_speed)
        return {plan: math.exp(value) for plan, value in found.items()}

    def _estimates(self, name: str, score: Callable[[Known, Try, list[Replay]], float]) -> dict[LayerPlan, float]:
        """What the sets score on the usual text, as far as that is known; kept until more is."""
        if name not in self._estimated:
            scores = self._scored(score)
            found = self._proposer.estimates(scores).tolist() if scores.plans else []
            self._estimated[name] = dict(zip(scores.plans, found, strict=True))
        return self._estimated[name]

    def _scores(self) -> Scores:
        """Of all tries: log speed-ups, or matchness."""
        return self._scored(self._log_speed if self._by_speed else _matchness)

    def _scored(self, score: Callable[[Known, Try, list[Replay]], float]) -> Scores:
        rows = [
            (score(known, done, runs), done.tokens / _WINDOW, index, done.window)
            for index, known in enumerate(self._known.values())
            for done, runs in known.tries
        ]
        values, weights, sets, windows = np.array(rows, float).reshape(-1, 4).T
        places = np.unique(windows, return_inverse=True)[1]
        return Scores(tuple(self._known), values, weights, sets.astype(int), places)

    def _log_speed(self, known: Known, done: Try, runs: list[Replay]) -> float:
        assert self.costs is not None
        run = runs[known.rule]
        return math.log(self.costs.plain() * run.tokens / run.seconds)


def _matchness(known: Known, done: Try, runs: list[Replay]) -> float:
    return done.matchness
