"""Trials of sets of skipped blocks on windows of text, and the estimated value of each set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..learned.files import as_count
from ..model.plan import LayerPlan
from .choice import SkipChoice, pays
from .costs import ForwardCosts
from .estimates import Estimates, Scores, estimate
from .proposers import SkipSpace
from .replay import Replays, Rule, Trace, replays

# Number of tokens of one of SWIFT's windows, which has the weight 1.
_WINDOW = 32


@dataclass(frozen=True)
class Trial:
    """One set, tried on one window of text: what it predicts there in each row.

    ``generated`` is the number of tokens generated until then, in all calls of this kind.
    """

    plan: LayerPlan
    traces: tuple[Trace, ...]
    window: int = 0
    generated: int = 0

    def state(self) -> dict[str, Any]:
        traces = [{"accept": _short(t.accept[0]), "confidence": _short(t.confidence[0])} for t in self.traces]
        return {"set": self.plan.picture(), "window": self.window, "generated": self.generated, "rows": traces}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Trial:
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
        return sum(trace.tokens for trace in self.traces)


@dataclass
class SetRecord:
    """The trials of one set, oldest first, their replays by all rules if costs are known, and the fastest rule."""

    blocks: np.ndarray
    trials: list[Trial] = field(default_factory=list)
    runs: list[Replays] = field(default_factory=list)
    rule: int = 0

    @property
    def matchness(self) -> float:
        tokens = sum(trial.tokens for trial in self.trials)
        return sum(trial.matchness * trial.tokens for trial in self.trials) / tokens


class Records:
    """The trials of one search, by set.

    With costs, the score of a trial is the log speed-up that follows from its trace, these costs and the best stop rule
    of its set; without costs it is the matchness.
    """

    def __init__(
        self, space: SkipSpace, rules: Sequence[Rule], max_draft: int, costs: ForwardCosts | None, by_size: bool = False
    ) -> None:
        self.costs, self._by_size = costs, by_size
        self.sets: dict[LayerPlan, SetRecord] = {}
        self._space, self._rules, self._max_draft = space, rules, max_draft
        self._estimates: Estimates | None = None

    def add(self, trial: Trial) -> None:
        record = self.sets.setdefault(trial.plan, SetRecord(self._row(trial.plan)))
        record.trials.append(trial)
        if self.costs is not None:
            record.runs.append(self._replay(trial))
        self._compare_rules(record)

    def _row(self, plan: LayerPlan) -> np.ndarray:
        """What estimates go by: the blocks that a set skips, or their share in tenths, where few sets are tried."""
        if not self._by_size:
            return self._space.row(plan)
        return np.eye(11)[round(10 * len(self._space.places(plan)) / len(self._space.blocks))]

    def use(self, costs: ForwardCosts) -> None:
        """Compares sets by their speed-up with these costs from now on."""
        self.costs = costs
        for record in self.sets.values():
            record.runs = [self._replay(trial) for trial in record.trials]
            self._compare_rules(record)

    def _compare_rules(self, record: SetRecord) -> None:
        record.rule = Replays.total(record.runs).fastest if record.runs else 0
        self._estimates = None

    def _replay(self, trial: Trial) -> Replays:
        assert self.costs is not None
        return replays(trial.traces, self._rules, trial.plan, self.costs, self._max_draft)

    def estimates(self) -> Estimates:
        """The estimated scores by blocks, kept until there is a new trial."""
        if self._estimates is None:
            self._estimates = estimate(self._scores())
        return self._estimates

    def worth(self) -> dict[LayerPlan, float]:
        """The estimated speed-up, or matchness, of each set on average text."""
        if not self.sets:
            return {}
        scores = self.estimates().sets
        found = scores if self.costs is None else np.exp(scores)
        return dict(zip(self.sets, found.tolist(), strict=True))

    def leaders(self) -> list[LayerPlan]:
        worth = self.worth()
        return sorted(worth, key=lambda plan: -worth[plan])

    def choice(self, plan: LayerPlan) -> SkipChoice | None:
        """A set with its fastest rule, ``None`` without costs."""
        record = self.sets[plan]
        if self.costs is None:
            return None
        speedup, rate = self.worth()[plan], float(Replays.total(record.runs).acceptance_rate[record.rule])
        return SkipChoice(plan, pays(speedup), self._rules[record.rule], speedup, rate, record.matchness)

    def _scores(self) -> Scores:
        rows = [
            (self._score(record, place), trial.tokens / _WINDOW, index, trial.window)
            for index, record in enumerate(self.sets.values())
            for place, trial in enumerate(record.trials)
        ]
        values, weights, sets, windows = np.array(rows, float).T
        places = np.unique(windows, return_inverse=True)[1]
        blocks = np.array([record.blocks for record in self.sets.values()])
        return Scores(blocks, values, weights, sets.astype(int), places)

    def _score(self, record: SetRecord, place: int) -> float:
        """The score of one of a set's trials."""
        if self.costs is None:
            return record.trials[place].matchness
        return math.log(self.costs.plain() / record.runs[place].seconds_per_token[record.rule])


def _shares(values: list[float]) -> np.ndarray:
    found = np.array([values], float)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ValueError("acceptances and confidences lie between 0 and 1")
    return found


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
