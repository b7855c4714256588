"""The search for blocks to skip, as drafts and files use it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..model.partial import LayerPlan
from ..types import GenerationStats
from .budget import Pace
from .choice import SkipChoice
from .costs import ForwardCosts, Stopwatch, Timings
from .feedback import Feedback
from .on_the_fly import Search
from .proposers import ProposeLayers, proposer_of
from .records import Records
from .replay import Rule, Trace
from .schedule import TRIED_AGAIN, Schedule
from .search_state import PHASES, SearchState
from .skip_space import SkipSpace
from .trials import Trial

# Trials that are kept of a set once the search is over, and those that are kept for pictures.
_KEPT, _LOGGED = 16, 4096


class SkipSearch:
    """One search for one model and kind of call; threads may share it.

    A window of 32 tokens shows little, some text is easier than other, and the best of many scores is too good: a set
    that scored well is tried again on later text, and what counts is by how much it beats others on the same text
    (:class:`Records`; SWIFT keeps the highest score: a set that had been lucky once would never be replaced).

    Where the ratio is searched for, too, a set's score is its expected speed-up; otherwise it is the matchness.

    Args:
        settings: what is tried, and when that ends.
        space: blocks to choose from.
        ratio: share of these blocks that a proposed set skips; where ``auto``, of the first ones.
        start: the set that drafts until a better one is found.
        auto: whether the ratio is searched for.
        rules: stop rules to compare.
        max_draft: most tokens in a draft.

    Attributes:
        choice: what drafts.
        trials: all of them, in order.
        generated: tokens generated with it.
        seconds, search_seconds: time of these generations, and of the trials in them.
        timings: of forwards.
        pace: what rounds and trials take.
        found: for each change of the best set its step and that set.
        changed: is called after each trial, unless it is ``None``.
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
        # Where speed decides, nothing drafts before it is known to pay.
        self.choice = SkipChoice(start, not auto, None, None, 0.0, 0.0)
        self.trials: deque[Trial] = deque(maxlen=_LOGGED)
        self.found: deque[tuple[int, LayerPlan]] = deque([(0, start)], maxlen=_LOGGED)
        self.generated = 0
        self.seconds = self.search_seconds = 0.0
        self.timings = Timings()
        self.pace = Pace()
        self._unfinished: Stopwatch | None = None
        self._lock = threading.Lock()
        self._start_over([start], has_begun=False)

    def _start_over(self, queue: Sequence[LayerPlan] = (), has_begun: bool = True) -> None:
        """Begins a search with no trials."""
        proposer = proposer_of(self.settings, self.space, self.ratio, self.auto)
        self._schedule = Schedule(self.settings, proposer, queue, has_begun)
        self._records = Records(self.rules, self.max_draft, proposer.estimates, self.costs if self.auto else None)
        self._feedback = Feedback()
        self._expected_rate = 0.0
        self._has_drafted = False

    # What is known -----------------------------------------------------------------------------------------------

    @property
    def best(self) -> LayerPlan:
        """The best set so far."""
        return self.choice.plan

    @property
    def matchness(self) -> float:
        """The estimated matchness of the best set, 0 before the first trial."""
        return self.choice.matchness

    @property
    def history(self) -> list[float]:
        """Matchness of every trial, in order."""
        return [trial.matchness for trial in self.trials]

    @property
    def costs(self) -> ForwardCosts | None:
        """Measured forwards, ``None`` before the first timings."""
        return self.timings.costs

    @property
    def steps(self) -> int:
        """Trials of the current search, or of the last one."""
        return self._schedule.steps

    @property
    def is_over(self) -> bool:
        """Whether the best set is final (SWIFT's acceleration phase)."""
        return self._schedule.is_over

    @property
    def is_idle(self) -> bool:
        """Whether no draft pays and nothing is to be tried in the next window."""
        return not self.choice.drafts and self._schedule.is_waiting

    @property
    def tries_each_round(self) -> bool:
        """See :attr:`Schedule.tries_each_round`."""
        return self._schedule.tries_each_round

    @property
    def wants_timings(self) -> bool:
        """Whether forwards are to be timed on this text."""
        return self.auto and self._schedule.wants_timings(self.timings.count)

    @property
    def proposal_tokens(self) -> int:
        """See :attr:`Schedule.proposal_tokens`."""
        return self._schedule.proposal_tokens

    @property
    def phase(self) -> str:
        """``optimization`` or ``acceleration`` (SWIFT, Figure 4)."""
        return PHASES[self.is_over]

    def report(self, stats: GenerationStats) -> None:
        """Adds what was found."""
        stats.plan = self.best.picture()
        stats.phase, stats.matchness, stats.drafts = self.phase, self.history, self.choice.drafts

    # Trials ------------------------------------------------------------------------------------------------------

    def begin(self, propose_layers: ProposeLayers) -> None:
        """Lets the proposer's first set draft before any was tried, unless speed decides."""
        with self._lock:
            if not self.auto:
                self._begin(propose_layers)

    def begin_window(self) -> None:
        """Begins a window of new text, on which what looks best is to be tried."""
        with self._lock:
            schedule = self._schedule
            schedule.window += 1
            if not schedule.is_over and schedule.proposer.is_busy:
                return
            has_paid = self.choice.drafts
            if self.best in self._records:
                self._choose()
            leaders = self._records.leaders(TRIED_AGAIN)
            if schedule.is_over:
                retry_is_due = not self.choice.drafts and schedule.retry_is_due
                if not (self._feedback.has_become_hard() or (has_paid and retry_is_due)):
                    if retry_is_due:
                        # Whether the set pays now does not depend on how its drafts fared before.
                        schedule.retry(self.best)
                        self._feedback = Feedback()
                    return
                self._start_over()
            if not self._has_drafted:
                self._feedback = Feedback()  # which no draft corrects
            self._has_drafted = False
            self._schedule.begin_window(leaders, self.best, self.matchness)

    def prepare(self, propose_layers: ProposeLayers) -> None:
        """Runs the forward of :attr:`proposal_tokens`."""
        with self._lock:
            self._begin(propose_layers)
            self._schedule.prepare(propose_layers)

    def propose(self, propose_layers: ProposeLayers) -> LayerPlan | None:
        """The next set to try: first the one that drafts already.

        Args:
            propose_layers: finds the closest sets for the text as it is, for ``ClosestLayers``.

        Returns:
            ``None`` where there is nothing to try before the next window.
        """
        with self._lock:
            self._begin(propose_layers)
            return self._schedule.next(self._records.scores, propose_layers)

    def register(self, plan: LayerPlan, traces: Sequence[Trace]) -> None:
        """Takes in what ``plan`` predicts where the text's tokens are known."""
        with self._lock:
            trial = Trial(plan, tuple(traces), self._schedule.window, self.generated)
            self.trials.append(trial)
            self._records.add(trial, keep=_KEPT if self.is_over else None)
            is_better = self._choose()
            trials = len(self._records.trials_of(self.best))
            self._schedule.add_trial(is_better, self.best, self.matchness, trials)
        if self.changed is not None:
            self.changed()

    # Time and drafts ---------------------------------------------------------------------------------------------

    def stopwatch(self) -> Stopwatch:
        """The timings to go on with, in this call or a later one."""
        if self._unfinished is None:
            self._unfinished = Stopwatch(*self.space.timed_plans())
        return self._unfinished

    def time(self, stopwatch: Stopwatch) -> None:
        """Takes in timings of forwards."""
        with self._lock:
            self._unfinished = None
            # Once a search is over, the machine may be another or busier than it was.
            costs = self.timings.add(stopwatch, anew=self.is_over)
            if self.auto:
                self._records.use(costs)
            if self._records:
                self._choose()

    def spent(self, seconds: float, search_seconds: float) -> None:
        """Takes in how long a round took, and how much of that went into trials."""
        with self._lock:
            self.seconds += seconds
            self.search_seconds += search_seconds

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Takes in a call that neither drafted nor tried anything."""
        with self._lock:
            self.generated += tokens
            self.seconds += seconds
            self._schedule.skip(tokens)
            self._feedback = Feedback()

    def watch(
        self, plan: LayerPlan, rows: int, drafted: int, tokens: int, steps: int, nodes: int, seconds: float
    ) -> None:
        """Takes in one round of drafting, without which each row would have had one token.

        How often drafts are accepted, compared with what the trials promised, shows how hard the text is. Where that
        changes much for the worse, the search begins again (SWIFT's dynamic streams, Figure 7).

        Args:
            plan: the set that drafted.
            rows: number of rows that took part.
            drafted, tokens: tokens drafted and generated, all rows.
            steps: drafting steps, all rows together.
            nodes: drafted tokens that were verified, for each row.
            seconds: time of drafting and verification.
        """
        with self._lock:
            costs, foretold = self.costs, 0.0
            self.generated += tokens
            self._has_drafted = self._has_drafted or drafted > 0
            if not drafted and costs is not None:
                self._feedback.add_plain(costs.plain(), seconds)
            if plan != self.best or not drafted or not self._expected_rate:
                return
            if costs is not None:
                foretold = steps * costs.draft(plan) + costs.verify(plan.first_altered, nodes)
            self._feedback.add(drafted, drafted * self._expected_rate, tokens - rows, foretold, seconds)

    # Files -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What was found, as JSON has it."""
        with self._lock:
            return SearchState(self.is_over, self.generated, self.costs, self.choice, self._records.trials()).to_json()

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        saved = SearchState.of_json(state, self.space.num_layers)
        with self._lock:
            self.timings.costs = saved.costs
            self._start_over()
            for trial in saved.trials:
                self._records.add(trial)
            self.trials.extend(saved.trials)
            self._schedule.resume(
                len(saved.trials), max((one.window for one in saved.trials), default=0), saved.is_over
            )
            self.generated = saved.generated
            self.choice = saved.choice
            self.found = deque([(0, saved.choice.plan)], maxlen=_LOGGED)

    # Inside ------------------------------------------------------------------------------------------------------

    def _begin(self, propose_layers: ProposeLayers) -> None:
        if (plan := self._schedule.begin(propose_layers)) is not None:
            self._lead(SkipChoice(plan, not self.auto, None, None, 0.0, 0.0))

    def _choose(self) -> bool:
        """Takes the best set; whether it is another one. Once the search is over, the set stays."""
        worth = self._records.worth()
        best = self.best if self.is_over else max(worth, key=lambda plan: worth[plan])
        if self._records.costs is None:
            self._expected_rate = worth[best]
            return self._lead(SkipChoice(best, not self.auto, None, None, worth[best], worth[best]))
        arm, self._expected_rate = self._records.arm(best, self._feedback.ease)
        arm = replace(arm, speedup=arm.speedup * self._feedback.pace(self.timings.disturbed))
        return self._lead(SkipChoice.of(arm, matchness=self._records.matchness()[best]))

    def _lead(self, choice: SkipChoice) -> bool:
        is_new = choice.plan != self.choice.plan
        self.choice = choice
        if is_new:
            self._feedback = Feedback()
            self.found.append((len(self.trials), choice.plan))
        return is_new
