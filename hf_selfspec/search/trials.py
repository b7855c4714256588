"""Trials of sets of skipped blocks on windows of text, and the estimated value of each set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..learned.files import as_count
from ..model.plan import LayerPlan
from .choice import LayerArm, fastest_run
from .costs import ForwardCosts
from .estimates import Scores
from .replay import Replay, Rule, Trace, replays

# Number of tokens of one of SWIFT's windows, which has the weight 1.
_WINDOW = 32
# How many trials are replayed again when text has become harder or easier.
_REPLAYED = 4


@dataclass(frozen=True)
class Trial:
    """One set, tried on one window of text.

    Attributes:
        plan: the set.
        traces: what it predicts there, one for each row.
        window: index of the window.
        generated: number of tokens generated until then, in all calls of this kind.
    """

    plan: LayerPlan
    traces: tuple[Trace, ...]
    window: int = 0
    generated: int = 0

    def state(self) -> dict[str, Any]:
        """The trial as JSON values."""
        traces = [{"accept": _short(t.accept[0]), "confidence": _short(t.confidence[0])} for t in self.traces]
        return {"set": self.plan.picture(), "window": self.window, "generated": self.generated, "rows": traces}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Trial:
        """The inverse of :meth:`state`."""
        rows = tuple(Trace(_shares(row["accept"]), _shares(row["confidence"])) for row in state["rows"])
        if not rows or any(row.accept.shape != row.confidence.shape for row in rows):
            raise ValueError("a trial has rows of as many acceptances as confidences")
        return cls(LayerPlan.of_picture(state["set"]), rows, as_count(state["window"]), as_count(state["generated"]))

    @property
    def matchness(self) -> float:
        """Share of the text's tokens that the set predicts (SWIFT §4.1)."""
        return float(sum(trace.accept.sum() for trace in self.traces)) / self.tokens

    @property
    def tokens(self) -> int:
        """Number of tokens that it was tried on."""
        return sum(trace.tokens for trace in self.traces)


class SetRecord:
    """The trials of one set, each with its replays by all rules.

    Attributes:
        trials: the trials and their replays, oldest first.
        rule: the index of the fastest rule on all of them.
        run: the sum of that rule's replays, ``None`` without replays.
    """

    def __init__(self, trials: Iterable[tuple[Trial, list[Replay]]] = ()) -> None:
        self.trials = list(trials)
        self._compare_rules()

    def add(self, trial: Trial, replays: list[Replay], keep: int | None) -> None:
        """Adds a trial, and forgets the oldest ones if there are more than ``keep``."""
        self.trials.append((trial, replays))
        if keep is not None:
            del self.trials[:-keep]
        self._compare_rules()

    def _compare_rules(self) -> None:
        runs = [Replay.of_all(run) for run in zip(*(replays for _, replays in self.trials), strict=True)]
        self.rule = fastest_run(runs) if runs else 0
        self.run = runs[self.rule] if runs else None
        self._eased: dict[float, list[Replay]] = {}

    def with_ease(self, ease: float, replay: Callable[[Trial, float], list[Replay]]) -> tuple[int, Replay, Replay]:
        """Finds the fastest rule if tokens are accepted ``ease`` times as often as in the trials.

        Returns:
            The rule's index, its replay under that assumption, and its replay on the same trials unchanged.
        """
        recent = self.trials[-_REPLAYED:]
        if ease not in self._eased:
            runs = zip(*(replay(trial, ease) for trial, _ in recent), strict=True)
            self._eased = {ease: [Replay.of_all(run) for run in runs]}
        rule = fastest_run(self._eased[ease])
        return rule, self._eased[ease][rule], Replay.of_all(replays[rule] for _, replays in recent)


_Score = Callable[[SetRecord, Trial, list[Replay]], float]


class Records:
    """The trials of one search, by set.

    With costs, the score of a trial is the speed-up that follows from its trace, these costs and the set's best stop
    rule; without costs it is the matchness.

    Args:
        rules: stop rules to compare.
        max_draft: maximum number of tokens in a draft.
        estimate: estimates the score of each set on average text.
        costs: measured forwards, ``None`` where matchness decides.

    Attributes:
        sets: the record of each set that was tried.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        max_draft: int,
        estimate: Callable[[Scores], np.ndarray],
        costs: ForwardCosts | None,
    ) -> None:
        self.costs = costs
        self.sets: dict[LayerPlan, SetRecord] = {}
        self._rules = rules
        self._max_draft = max_draft
        self._estimate = estimate
        self._estimated: dict[_Score, dict[LayerPlan, float]] = {}

    def add(self, trial: Trial, keep: int | None = None) -> None:
        """Adds a trial, and forgets the oldest ones of its set if it has more than ``keep``."""
        self.sets.setdefault(trial.plan, SetRecord()).add(trial, self._replays(trial), keep)
        self._estimated.clear()

    def use(self, costs: ForwardCosts) -> None:
        """Compares sets by their speed-up with these costs from now on."""
        self.costs = costs
        self._estimated.clear()
        for plan, record in self.sets.items():
            self.sets[plan] = SetRecord((trial, self._replays(trial)) for trial, _ in record.trials)

    def worth(self) -> dict[LayerPlan, float]:
        """The estimated speed-up, or matchness, of each set on average text."""
        if self.costs is None:
            return self.matchness()
        return {plan: math.exp(value) for plan, value in self._estimates(self._log_speed).items()}

    def matchness(self) -> dict[LayerPlan, float]:
        """The estimated matchness of each set on average text."""
        return self._estimates(_matchness)

    def leaders(self) -> list[LayerPlan]:
        """The sets, best first."""
        worth = self.worth()
        return sorted(worth, key=lambda plan: -worth[plan])

    def arm(self, plan: LayerPlan, ease: float) -> tuple[LayerArm, float]:
        """A set with its fastest rule if tokens are accepted ``ease`` times as often as in its trials.

        Returns:
            The arm, and the acceptance rate that the trials predicted for its rule.
        """
        record = self.sets[plan]
        rule, run, usual = record.with_ease(ease, self._replays)
        assert record.run is not None
        # The last trials, replayed with the acceptance seen in drafting, show how to correct the estimate.
        speedup = self.worth()[plan] * record.run.seconds_per_token / run.seconds_per_token
        arm = LayerArm(plan, self._rules[rule], speedup=speedup, acceptance_rate=run.acceptance_rate)
        return arm, usual.acceptance_rate

    def scores(self) -> Scores:
        """The scores of all trials: log speed-ups, or matchness."""
        return self._scores(_matchness if self.costs is None else self._log_speed)

    def _replays(self, trial: Trial, ease: float = 1.0) -> list[Replay]:
        if self.costs is None:
            return []
        traces = [trace.eased(ease) for trace in trial.traces]
        return replays(traces, self._rules, trial.plan, self.costs, self._max_draft)

    def _estimates(self, score: _Score) -> dict[LayerPlan, float]:
        """The estimates of one kind of score, cached until there is a new trial."""
        if score not in self._estimated:
            scores = self._scores(score)
            found = self._estimate(scores).tolist() if scores.plans else []
            self._estimated[score] = dict(zip(scores.plans, found, strict=True))
        return self._estimated[score]

    def _scores(self, score: _Score) -> Scores:
        rows = [
            (score(record, trial, runs), trial.tokens / _WINDOW, index, trial.window)
            for index, record in enumerate(self.sets.values())
            for trial, runs in record.trials
        ]
        values, weights, sets, windows = np.array(rows, float).reshape(-1, 4).T
        places = np.unique(windows, return_inverse=True)[1]
        return Scores(tuple(self.sets), values, weights, sets.astype(int), places)

    def _log_speed(self, record: SetRecord, trial: Trial, runs: list[Replay]) -> float:
        assert self.costs is not None
        return math.log(self.costs.plain() / runs[record.rule].seconds_per_token)


def _matchness(record: SetRecord, trial: Trial, runs: list[Replay]) -> float:
    return trial.matchness


def _shares(values: list[float]) -> np.ndarray:
    found = np.array([values], float)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ValueError("acceptances and confidences lie between 0 and 1")
    return found


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
