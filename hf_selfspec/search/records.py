"""What the sets of one search have brought so far, and what each is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..model.partial import LayerPlan
from .choice import Arm
from .costs import ForwardCosts
from .estimates import Scores
from .replay import Replay, Rule, replays
from .trials import SetRecord, Trial

# Tokens that weigh as much as one of SWIFT's windows.
_WINDOW = 32

_Score = Callable[[SetRecord, Trial, list[Replay]], float]


class Records:
    """The trials of one search by set.

    With costs, what counts of a trial is the speed-up that follows from its trace, from these costs and from the set's
    best stop rule; without, it is the matchness.

    Args:
        rules: stop rules to compare.
        max_draft: most tokens in a draft.
        estimate: estimates what each set would score on the usual text.
        costs: measured forwards, ``None`` where matchness decides.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        max_draft: int,
        estimate: Callable[[Scores], np.ndarray],
        costs: ForwardCosts | None,
    ) -> None:
        self.costs = costs
        self._rules = rules
        self._max_draft = max_draft
        self._estimate = estimate
        self._sets: dict[LayerPlan, SetRecord] = {}
        self._estimated: dict[_Score, dict[LayerPlan, float]] = {}

    def __contains__(self, plan: LayerPlan) -> bool:
        return plan in self._sets

    def __len__(self) -> int:
        return len(self._sets)

    def trials_of(self, plan: LayerPlan) -> list[Trial]:
        """The trials of one set that were kept, oldest first."""
        return [trial for trial, _ in self._sets[plan].trials] if plan in self._sets else []

    def trials(self) -> list[Trial]:
        """All trials that were kept, set by set."""
        return [trial for plan in self._sets for trial in self.trials_of(plan)]

    def add(self, trial: Trial, keep: int | None = None) -> None:
        """Takes in a trial.

        Args:
            trial: the trial.
            keep: how many of its set's trials to keep, ``None`` for all.
        """
        record = self._sets.setdefault(trial.plan, SetRecord())
        if keep is not None:
            record.keep(keep - 1)
        record.add(trial, self._replays(trial))
        self._estimated.clear()

    def use(self, costs: ForwardCosts) -> None:
        """Compares sets by their speed-up with these costs from now on."""
        self.costs = costs
        self._estimated.clear()
        for plan, record in self._sets.items():
            self._sets[plan] = SetRecord((trial, self._replays(trial)) for trial, _ in record.trials)

    def worth(self) -> dict[LayerPlan, float]:
        """What each set is estimated to bring on the usual text: speed-up, or matchness."""
        if self.costs is None:
            return self.matchness()
        return {plan: math.exp(value) for plan, value in self._estimates(self._log_speed).items()}

    def matchness(self) -> dict[LayerPlan, float]:
        """What each set is estimated to match of the usual text."""
        return self._estimates(_matchness)

    def leaders(self, count: int) -> list[LayerPlan]:
        """The ``count`` sets that are worth most, the best first."""
        worth = self.worth()
        return sorted(worth, key=lambda plan: -worth[plan])[:count]

    def arm(self, plan: LayerPlan, ease: float) -> tuple[Arm, float]:
        """A set with its fastest stop rule, and the acceptance rate that its trials promised for that rule.

        Args:
            plan: a set that was tried.
            ease: how many times as often as in its trials tokens are accepted now.
        """
        record = self._sets[plan]
        rule, run, usual = record.with_ease(ease, self._replays)
        assert record.run is not None
        # The last trials, replayed as hard as drafting has been, show by how much to correct the estimate.
        speedup = self.worth()[plan] * record.run.seconds_per_token / run.seconds_per_token
        return Arm(plan, self._rules[rule], speedup, run.acceptance_rate), usual.acceptance_rate

    def scores(self) -> Scores:
        """What decides of all trials: log speed-ups, or matchness."""
        return self._scores(_matchness if self.costs is None else self._log_speed)

    def _replays(self, trial: Trial, ease: float = 1.0) -> list[Replay]:
        if self.costs is None:
            return []
        traces = [trace.eased(ease) for trace in trial.traces]
        return replays(traces, self._rules, trial.plan, self.costs, self._max_draft)

    def _estimates(self, score: _Score) -> dict[LayerPlan, float]:
        """The estimates of one kind of score, kept until more is known."""
        if score not in self._estimated:
            scores = self._scores(score)
            found = self._estimate(scores).tolist() if scores.plans else []
            self._estimated[score] = dict(zip(scores.plans, found, strict=True))
        return self._estimated[score]

    def _scores(self, score: _Score) -> Scores:
        rows = [
            (score(record, trial, runs), trial.tokens / _WINDOW, index, trial.window)
            for index, record in enumerate(self._sets.values())
            for trial, runs in record.trials
        ]
        values, weights, sets, windows = np.array(rows, float).reshape(-1, 4).T
        places = np.unique(windows, return_inverse=True)[1]
        return Scores(tuple(self._sets), values, weights, sets.astype(int), places)

    def _log_speed(self, record: SetRecord, trial: Trial, runs: list[Replay]) -> float:
        assert self.costs is not None
        return math.log(self.costs.plain() / runs[record.rule].seconds_per_token)


def _matchness(record: SetRecord, trial: Trial, runs: list[Replay]) -> float:
    return trial.matchness
