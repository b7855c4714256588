"""The search for blocks to skip: what it tries when, the best set so far, and when it ends or begins again."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..learned.files import as_count
from ..learned.findings import Findings
from ..model.forks import new_lock
from ..model.plan import LayerPlan
from ..stats import GenerationStats
from .choice import SkipChoice
from .forward_costs import ForwardCosts, Stopwatch
from .proposers import ClosestLayers, OnTheFlySearch, Search, SkipSpace
from .replay import Rule, Trace
from .trials import Feedback, Records, Trial

# SWIFT's phases (Figure 4): while sets are tried, and once the best one is final.
_PHASES = ("optimization", "acceleration")
# Below this matchness fewer blocks should be skipped (SWIFT §5.1 lowers its ratio for LLaMA-3-70B). The step from one
# ratio to the next, the least and the most.
_TOO_LOW, _STEP, _LEAST, _MOST = 0.7, 0.1, 0.1, 0.8
# How many trials are kept for plots.
_LOGGED = 1024
# How many of the best sets are tried again on each new window.
_TRIED_AGAIN = 3
# Number of sets that are drawn uniformly, before the trials show which blocks matter.
_UNIFORM = 30
# On how many windows a set has to be good enough to end the search.
_CONFIRMED = 3
# Number of texts on which forwards are timed in a search, and of trials between them.
_TIMED_TEXTS, _TIMED_AFTER = 2, 4


class SkipSearch(Findings):
    """One search for one model and kind of call; threads may share it. Good sets are tried again on later text, since
    the best of many scores is too high; with ``auto``, sizes vary and speed decides instead of matchness."""

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
        self.settings, self.space, self.auto = settings, space, auto
        self._finds_closest = isinstance(settings, ClosestLayers)
        self._first_ratio, self._rules, self._max_draft = ratio, rules, max_draft
        self.choice = self._untried(start)
        self.trials: deque[Trial] = deque(maxlen=_LOGGED)
        self.best_sets: deque[tuple[int, LayerPlan]] = deque([(0, start)], maxlen=_LOGGED)  # and from which step on
        self.generated = 0  # tokens of these calls
        self.search_seconds = 0.0  # of trials in these calls
        self.timings = Stopwatch(*space.timed_plans())
        self._lock = new_lock()
        self._start_over()

    def _start_over(self) -> None:
        costs = self.timings.latest if self.auto else None
        self._records = Records(self.space, self._rules, self._max_draft, costs, by_size=self._finds_closest)
        self._feedback = Feedback()
        self.window = self.steps = self._since_better = 0
        self.is_over = False
        # Sets to try in this window before new ones; a number stands for the closest set of so many layers.
        self._queue: list[LayerPlan | int] = [] if self._finds_closest else [self.best]
        # For OnTheFlySearch: the ratio of new sets, and all that were searched.
        self._ratio, self._searched = self._first_ratio, {self._first_ratio}
        self._rng = np.random.default_rng(getattr(self.settings, "seed", 0))
        self.closest: list[LayerPlan] = []  # for ClosestLayers: the closest sets on this text

    @property
    def best(self) -> LayerPlan:
        return self.choice.plan

    @property
    def history(self) -> list[float]:
        with self._lock:
            return [trial.matchness for trial in self.trials]

    @property
    def phase(self) -> str:
        """``optimization`` or ``acceleration`` (SWIFT, Figure 4)."""
        return _PHASES[self.is_over]

    @property
    def is_idle(self) -> bool:
        """Whether the search has ended without a draft that pays, by timings of this process."""
        return self.is_over and not self.choice.drafts and not self.wants_timings

    @property
    def wants_timings(self) -> bool:
        """Whether forwards should be timed on this text: at first and after some trials; once where a file ended it."""
        count = self.timings.texts
        most = 1 if self.is_over else _TIMED_TEXTS
        return self.auto and count < most and self.steps >= _TIMED_AFTER * count

    @property
    def wants_closest(self) -> int:
        """How many of the layers closest to the whole model the next set needs, 0 if it needs no such sets."""
        with self._lock:
            if self.closest or not (self._queue and isinstance(self._queue[0], int)):
                return 0
            return max(size for size in self._queue if isinstance(size, int))

    def report(self, stats: GenerationStats) -> None:
        stats.plan = self.best.picture()
        stats.phase, stats.matchness, stats.drafts = self.phase, self.history, self.choice.drafts

    def propose(self) -> LayerPlan | None:
        """Returns the next set to try, first the one that drafts already; ``None`` if there is none in this window."""
        with self._lock:
            if self._queue:
                if isinstance(first := self._queue[0], int) and first > len(self.closest):
                    self.closest = []  # of the text of another thread
                    return None
                del self._queue[0]
                return self.closest[first - 1] if isinstance(first, int) else first
            if self.is_over or not isinstance(self.settings, OnTheFlySearch):
                return None
            return self._new_set(self.settings.bayes_interval)

    def _new_set(self, bayes_interval: int) -> LayerPlan:
        """A set of the present ratio: uniform at first, as always in SWIFT (§4.1), then by Thompson sampling, which
        finds more of the good blocks, at times Bayesian."""
        space, records, ratio = self.space, self._records, self._ratio
        if (self.steps + 1) % bayes_interval == 0:
            scores = dict(zip(records.sets, records.estimates().sets.tolist(), strict=True)) if records.sets else {}
            like = {plan: score for plan, score in scores.items() if len(space.places(plan)) == space.count(ratio)}
            if like:
                from .bayes import suggest  # needs scikit-learn and SciPy, which few calls use

                return suggest(space, like, self._rng)
        if self.steps < _UNIFORM:
            return space.random(self._rng, ratio)
        return space.highest(records.estimates().drawn(self._rng), ratio)

    def begin_window(self) -> None:
        """Starts a window of new text, on which the sets that look best will be tried."""
        with self._lock:
            self.window += 1
            if any(isinstance(size, int) for size in self._queue):
                return
            leaders = self._records.leaders()
            if self.is_over:
                if not self._feedback.has_become_hard():
                    return
                self._start_over()
            again = _TRIED_AGAIN if self.settings.tries_each_round or not self.steps else 1
            self._queue = list(leaders[:again]) or self._queue
            if self._finds_closest:
                self.closest = []
                self._queue += self._sizes()

    def _sizes(self) -> list[int]:
        """Numbers of layers: on the first text of all kinds, from the sets that were found for the first one; then the
        best one and another, fewer where too little matches, more where much does."""
        layers, matchness = len(self.space.whole_layers), self.choice.matchness
        usual, step = max(1, round(self._first_ratio * layers)), max(1, round(_STEP * layers))
        if not self.auto:
            return [usual]
        if not self.steps:
            return list(range(step, max(1, round(_MOST * layers)) + 1, step))
        best = len(self.best.skipped_layers) or usual
        goes_up = matchness >= _TOO_LOW and (matchness > self.settings.target_matchness or self.window % 2 == 1)
        other = best + step if goes_up else best - step
        return [size for size in (best, other) if 1 <= size <= layers]

    def register(self, plan: LayerPlan, traces: Sequence[Trace]) -> None:
        """Records a trial: what ``plan`` predicts where the text's tokens are known."""
        with self._lock:
            trial = Trial(plan, tuple(traces), self.window, self.generated)
            self.trials.append(trial)
            self._records.add(trial)
            is_better = self._choose()
            self.steps += 1
            self._since_better = 0 if is_better else self._since_better + 1
            if self._is_done():
                self.is_over, self._queue = True, []
        self.changed()

    def _is_done(self) -> bool:
        """Whether the search ends after a trial; where it is only done with sets of one ratio, it begins another."""
        settings, matchness = self.settings, self.choice.matchness
        is_good = matchness > settings.target_matchness and len(self._records.sets[self.best].trials) >= _CONFIRMED
        # Where sizes are compared, only a set of the present one may end the search by matching well.
        has_size = not self._finds_closest and len(self.space.places(self.best)) == self.space.count(self._ratio)
        if self.steps >= settings.max_steps:
            return True
        if self._since_better < settings.patience and not (is_good and (has_size or not self.auto)):
            return False
        if self.auto and not self._finds_closest:
            step = _STEP if matchness > settings.target_matchness else -_STEP if matchness < _TOO_LOW else 0.0
            ratio = round(self._ratio + step, 6)
            if _LEAST <= ratio <= _MOST and ratio not in self._searched:
                self._ratio, self._since_better = ratio, 0
                self._searched.add(ratio)
                return False
        return True

    def time(self, rounds: Sequence[float] = ()) -> None:
        with self._lock:
            costs = self.timings.complete(rounds)
            if self.auto:
                self._records.use(costs)
            if self._records.sets:
                self._choose()

    def watch(self, plan: LayerPlan, drafted: int, accepted: int, tokens: int) -> None:
        """Records a round of ``plan``; if much less is accepted than at its end, it starts over (SWIFT, Figure 7)."""
        with self._lock:
            self.generated += tokens
            if plan == self.best:
                self._feedback.add(drafted, accepted)

    def _untried(self, plan: LayerPlan, matchness: float = 0.0) -> SkipChoice:
        """The choice of a set without costs: where speed decides, it drafts only once that is known to pay."""
        return SkipChoice(plan, not self.auto, None, None, matchness, matchness)

    def _choose(self) -> bool:
        """Switches to the best set, and returns whether it is a new one. Once the search is over, the set is kept."""
        worth, before = self._records.worth(), self.best
        best = before if self.is_over else max(worth, key=lambda plan: worth[plan])
        self.choice = self._records.choice(best) or self._untried(best, worth[best])
        if best != before:
            self._feedback = Feedback()
            self.best_sets.append((len(self.trials), best))
        return best != before

    def state(self) -> dict[str, Any]:
        with self._lock:
            costs = self.timings.latest
            return {
                "phase": self.phase,
                "generated": self.generated,
                "costs": None if costs is None else asdict(costs),
                "tries": [trial.state() for record in self._records.sets.values() for trial in record.trials],
                **self.choice.state(),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned; raises KeyError, TypeError or ValueError for anything else."""
        layers, choice = self.space.num_layers, SkipChoice.of_state(state)
        costs = None if state["costs"] is None else ForwardCosts.of_state(state["costs"], layers)
        trials = sorted(map(Trial.of, state["tries"]), key=lambda trial: trial.generated)
        generated, is_over = as_count(state["generated"]), bool(_PHASES.index(state["phase"]))
        if any(plan.num_layers != layers for plan in (choice.plan, *(trial.plan for trial in trials))):
            raise ValueError(f"a set for another depth than {layers} layers")
        with self._lock:
            self.timings.latest, self.generated, self.choice = costs, generated, choice
            self.best_sets = deque([(0, choice.plan)], maxlen=_LOGGED)
            self.trials.extend(trials)
            self._start_over()
            for trial in trials:
                self._records.add(trial)
            self.steps, self.is_over = len(trials), is_over
            if is_over:
                self._queue = []
            self.window = max((trial.window for trial in trials), default=0)
