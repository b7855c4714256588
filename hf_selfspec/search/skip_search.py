"""The search for blocks to skip, as drafts and files use it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..learned.files import as_count
from ..learned.findings import Findings
from ..model.plan import LayerPlan
from ..stats import GenerationStats
from .budget import Pace
from .choice import SkipChoice
from .costs import ForwardCosts, Stopwatch, Timings
from .feedback import Feedback
from .on_the_fly import Search
from .proposers import ProposeLayers, proposer_of
from .replay import Rule, Trace
from .schedule import Schedule
from .skip_space import SkipSpace
from .trials import Records, Trial

# SWIFT's phases (Figure 4): while sets are tried, and once the best one is final.
_PHASES = ("optimization", "acceleration")
# How many trials of a set are kept once the search is over, and how many are kept for plots.
_KEPT, _LOGGED = 16, 1024


class SkipSearch(Findings):
    """One search for one model and kind of call; threads may share it.

    A window of 32 tokens shows little, some texts are easier than others, and the best of many scores is too high. So a
    set that scored well is tried again on later text, and sets are compared on the same text (:class:`Records`; SWIFT
    keeps the highest score, so that a set that was lucky once would never be replaced).

    Args:
        settings: what is tried, and when the search ends.
        space: blocks to choose from.
        ratio: share of these blocks that a proposed set skips; with ``auto`` that of the first sets.
        start: the set that drafts until a better one is found.
        auto: whether the ratio is searched for, too; then speed decides, otherwise matchness.
        rules: stop rules to compare.
        max_draft: maximum number of tokens in a draft.

    Attributes:
        choice: what drafts.
        trials: all trials, in order.
        generated: number of tokens generated during the search.
        seconds, search_seconds: time of these generations, and of the trials in them.
        timings: timings of forwards.
        pace: times of rounds and trials.
        found: for each change of the best set its step and the new set.
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
        self.choice = self._untried(start)
        self.trials: deque[Trial] = deque(maxlen=_LOGGED)
        self.found: deque[tuple[int, LayerPlan]] = deque([(0, start)], maxlen=_LOGGED)
        self.generated = self._idle_tokens = 0
        self.seconds = self.search_seconds = 0.0
        self.timings = Timings()
        self.pace = Pace()
        self._unfinished: Stopwatch | None = None
        self._lock = threading.Lock()
        self._start_over()
        self._schedule.queue, self._schedule.has_begun = [start], False

    def _untried(self, plan: LayerPlan) -> SkipChoice:
        """The choice of a set without trials: where speed decides, it drafts only once that is known to pay."""
        return SkipChoice(plan, not self.auto, None, None, 0.0, 0.0)

    def _start_over(self) -> None:
        proposer = proposer_of(self.settings, self.space, self.ratio, self.auto)
        self._schedule = Schedule(self.settings, proposer)
        self._records = Records(
            self.rules, self.max_draft, proposer.estimates, self.timings.costs if self.auto else None
        )
        self._feedback = Feedback()
        self._expected_rate = 0.0
        self._has_drafted = False

    @property
    def best(self) -> LayerPlan:
        """The best set so far."""
        return self.choice.plan

    @property
    def history(self) -> list[float]:
        """Matchness of every trial, in order."""
        return [trial.matchness for trial in self.trials]

    @property
    def steps(self) -> int:
        """Number of trials of the current search, or of the last one."""
        return self._schedule.steps

    @property
    def is_over(self) -> bool:
        """Whether the best set is final."""
        return self._schedule.is_over

    @property
    def phase(self) -> str:
        """``optimization`` or ``acceleration`` (SWIFT, Figure 4)."""
        return _PHASES[self.is_over]

    @property
    def is_idle(self) -> bool:
        """Whether no draft pays and nothing will be tried in the next window."""
        return not self.choice.drafts and self._schedule.is_waiting

    @property
    def wants_timings(self) -> bool:
        """Whether forwards should be timed on this text."""
        return self.auto and self._schedule.wants_timings(self.timings.count)

    @property
    def proposal_tokens(self) -> int:
        """See :attr:`Schedule.proposal_tokens`."""
        return self._schedule.proposal_tokens

    def report(self, stats: GenerationStats) -> None:
        """Adds what was found."""
        stats.plan = self.best.picture()
        stats.phase, stats.matchness, stats.drafts = self.phase, self.history, self.choice.drafts

    def begin(self, propose_layers: ProposeLayers) -> None:
        """Drafts with the proposer's first set before any was tried, unless speed decides."""
        with self._lock:
            if not self.auto:
                self._begin(propose_layers)

    def prepare(self, propose_layers: ProposeLayers) -> None:
        """Runs the forward of :attr:`proposal_tokens`."""
        with self._lock:
            self._begin(propose_layers)
            if not self._schedule.queue:
                self._schedule.proposer.prepare(propose_layers)

    def propose(self, propose_layers: ProposeLayers) -> LayerPlan | None:
        """Returns the next set to try, first the one that drafts already; ``None`` if there is none in this window.

        Args:
            propose_layers: finds the closest sets for the current text, for ``ClosestLayers``.
        """
        with self._lock:
            self._begin(propose_layers)
            return self._schedule.next(self._records.scores, propose_layers)

    def begin_window(self) -> None:
        """Starts a window of new text, on which the sets that look best will be tried."""
        with self._lock:
            schedule = self._schedule
            schedule.window += 1
            if not schedule.is_over and schedule.proposer.is_busy:
                return
            has_paid = self.choice.drafts
            if self.best in self._records.sets:
                self._choose()
            leaders = self._records.leaders()
            if schedule.is_over:
                retry_is_due = not self.choice.drafts and schedule.retry_is_due
                if not (self._feedback.has_become_hard() or (has_paid and retry_is_due)):
                    if retry_is_due:
                        schedule.retry(self.best)
                        self._feedback = Feedback()  # whether it pays now does not depend on earlier drafts
                    return
                self._start_over()
            if not self._has_drafted:
                self._feedback = Feedback()  # without drafts nothing would correct it
            self._has_drafted = False
            self._schedule.begin_window(leaders, self.best, self.choice.matchness)

    def register(self, plan: LayerPlan, traces: Sequence[Trace]) -> None:
        """Records a trial: what ``plan`` predicts where the text's tokens are known."""
        with self._lock:
            trial = Trial(plan, tuple(traces), self._schedule.window, self.generated)
            self.trials.append(trial)
            self._records.add(trial, _KEPT if self.is_over else None)
            is_better, record = self._choose(), self._records.sets.get(self.best)
            self._schedule.add_trial(is_better, self.best, self.choice.matchness, len(record.trials) if record else 0)
            speedup = self.choice.expected_speedup
            if speedup is not None and not self.is_over and self._schedule.proposer.gives_up(speedup):
                self._schedule.end()
        if self.changed is not None:
            self.changed()

    def stopwatch(self) -> Stopwatch:
        """The timings to continue, in this call or a later one."""
        if self._unfinished is None:
            self._unfinished = Stopwatch(*self.space.timed_plans())
        return self._unfinished

    def time(self, stopwatch: Stopwatch, rounds: Sequence[float] = ()) -> None:
        """Records timings of forwards, and of rounds as in :meth:`Timings.add`."""
        with self._lock:
            self._unfinished = None
            # Once a search is over, the machine may be a different or busier one.
            costs = self.timings.add(stopwatch, rounds, anew=self.is_over)
            if self.auto:
                self._records.use(costs)
            if self._records.sets:
                self._choose()

    def spent(self, seconds: float, search_seconds: float) -> None:
        """Records how long a round took, and how much of that went into trials."""
        with self._lock:
            self.seconds += seconds
            self.search_seconds += search_seconds

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Records a call that neither drafted nor tried anything."""
        with self._lock:
            self.generated += tokens
            self.seconds += seconds
            windows, self._idle_tokens = divmod(self._idle_tokens + tokens, self.settings.context_window)
            self._schedule.window += windows
            self._feedback = Feedback()

    def watch(
        self, plan: LayerPlan, rows: int, drafted: int, tokens: int, steps: int, nodes: int, seconds: float
    ) -> None:
        """Records one round of drafting; without it each row would have gained one token.

        How often drafts are accepted, compared with what the trials predicted, shows how hard the text is. If it has
        become much harder, the search starts over (SWIFT's dynamic streams, Figure 7).

        Args:
            plan: the set that drafted.
            rows: number of rows that took part.
            drafted, tokens: numbers of tokens drafted and generated, all rows.
            steps: number of drafting steps, all rows together.
            nodes: number of drafted tokens per row that were verified.
            seconds: time of drafting and verification.
        """
        with self._lock:
            costs, foretold = self.timings.costs, 0.0
            self.generated += tokens
            self._has_drafted = self._has_drafted or drafted > 0
            if not drafted and costs is not None:
                self._feedback.add_plain(costs.plain(), seconds)
            if plan != self.best or not drafted or not self._expected_rate:
                return
            if costs is not None:
                foretold = steps * costs.draft(plan) + costs.verify(plan.first_altered, nodes)
            self._feedback.add(drafted, drafted * self._expected_rate, tokens - rows, foretold, seconds)

    def state(self) -> dict[str, Any]:
        """What was found, as JSON values."""
        with self._lock:
            costs = self.timings.costs
            return {
                "phase": self.phase,
                "generated": self.generated,
                "costs": None if costs is None else asdict(costs),
                "tries": [trial.state() for record in self._records.sets.values() for trial, _ in record.trials],
                **self.choice.state(),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is something else.
        """
        layers, choice = self.space.num_layers, SkipChoice.of_state(state)
        costs = None if state["costs"] is None else ForwardCosts.of_state(state["costs"], layers)
        trials = sorted((Trial.of(one) for one in state["tries"]), key=lambda trial: trial.generated)
        generated, is_over = as_count(state["generated"]), bool(_PHASES.index(state["phase"]))
        if any(plan.num_layers != layers for plan in (choice.plan, *(trial.plan for trial in trials))):
            raise ValueError(f"a set for another depth than {layers} layers")
        with self._lock:
            self.timings.costs, self.generated, self.choice = costs, generated, choice
            self.found = deque([(0, choice.plan)], maxlen=_LOGGED)
            self.trials.extend(trials)
            self._start_over()
            for trial in trials:
                self._records.add(trial)
            window = max((trial.window for trial in trials), default=0)
            self._schedule.resume(len(trials), window, is_over)

    def _begin(self, propose_layers: ProposeLayers) -> None:
        if (plan := self._schedule.begin(propose_layers)) is not None:
            self._lead(self._untried(plan))

    def _choose(self) -> bool:
        """Switches to the best set, and returns whether it is a new one. Once the search is over, the set is kept."""
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
