"""Trials of sets of skipped blocks on windows of text, the estimated score of each set, and how its drafts fare."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..learned.files import as_count
from ..model.plan import LayerPlan
from .choice import SkipChoice, pays
from .forward_costs import ForwardCosts
from .proposers import Estimates, SkipSpace
from .replay import Replays, Rule, Trace, replays

# Number of tokens of one of SWIFT's windows, which has the weight 1.
_WINDOW = 32
# Weight of the prior (no effect) against the trials, for each block and for each window of text: the variance of the
# noise divided by that of effects. For a block it counts like one trial, for a window hardly: texts differ freely.
_NO_EFFECT, _USUAL_TEXT = 1.0, 1e-3
# After trials on this many windows of text a set's own scores weigh as much as what other sets suggest. Among many sets
# some score high by luck.
_DOUBT = 4.0
# A set whose expected score is this far below the best has the weight 1/e, provided that the effective number of trials
# is then at least this: more than the 60 effects of a model with 32 layers. Otherwise the scale grows by this factor.
_NEAR, _LEAST, _WIDER = 0.1, 80, 1.3
# Weights follow from expected scores and these from weights, so both are computed alternately.
_ROUNDS = 3
# Degrees of freedom that each effect uses up, less than one since it is shrunk towards 0; also the least share of the
# trials that remains.
_DEGREES = 0.3
# Text has become hard if, over this many drafted tokens, less than this share of the usual number is accepted. The
# share has a standard error of at most 0.031: if half of the tokens are usually accepted, that is more than five of
# them.
_WATCHED, _FAR_BELOW = 256, 0.65


@dataclass(frozen=True)
class Trial:
    """What one set predicts in each row of one window, after ``generated`` tokens in all calls of this kind."""

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
    """The trials of one search, by set; scores are log speed-ups with the best stop rule, without costs matchness."""

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
        self._replay(record)

    def _row(self, plan: LayerPlan) -> np.ndarray:
        """What estimates go by: the blocks that a set skips, or their share in tenths, where few sets are tried."""
        if not self._by_size:
            return self._space.row(plan)
        return np.eye(11)[round(10 * len(self._space.places(plan)) / len(self._space.blocks))]

    def use(self, costs: ForwardCosts) -> None:
        self.costs = costs
        for record in self.sets.values():
            record.runs = []
            self._replay(record)

    def _replay(self, record: SetRecord) -> None:
        """Replays the trials that were not replayed yet, and chooses the fastest rule."""
        self._estimates = None
        if self.costs is not None:
            for trial in record.trials[len(record.runs) :]:
                record.runs.append(replays(trial.traces, self._rules, trial.plan, self.costs, self._max_draft))
            record.rule = Replays.total(record.runs).fastest

    def estimates(self) -> Estimates:
        """The estimated scores by blocks, kept until there is a new trial."""
        if self._estimates is None:
            self._estimates = estimate(*self._scores())
        return self._estimates

    def worth(self) -> dict[LayerPlan, float]:
        """The estimated speed-up, or matchness, of each set on average text."""
        if not self.sets:
            return {}
        scores = self.estimates().sets
        return dict(zip(self.sets, (scores if self.costs is None else np.exp(scores)).tolist(), strict=True))

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

    def _scores(self) -> tuple[np.ndarray, ...]:
        rows = [
            (self._score(record, place), trial.tokens / _WINDOW, index, trial.window)
            for index, record in enumerate(self.sets.values())
            for place, trial in enumerate(record.trials)
        ]
        values, weights, sets, windows = np.array(rows, float).T
        places = np.unique(windows, return_inverse=True)[1]
        blocks = np.array([record.blocks for record in self.sets.values()])
        return blocks, values, weights, sets.astype(int), places

    def _score(self, record: SetRecord, place: int) -> float:
        if self.costs is None:
            return record.trials[place].matchness
        return math.log(self.costs.plain() / record.runs[place].seconds_per_token[record.rule])


def _shares(values: list[float]) -> np.ndarray:
    shares = np.array([values], float)
    if shares.ndim != 2 or not shares.size or not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError("acceptances and confidences lie between 0 and 1")
    return shares


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def estimate(
    blocks: np.ndarray, values: np.ndarray, weights: np.ndarray, sets: np.ndarray, windows: np.ndarray
) -> Estimates:
    """Fits the ``values`` ``[n]`` of trials, with their weights, sets and windows, as a function of the skipped
    ``blocks`` ``[sets, blocks]``, 1 where skipped, and of the window of text.

    The model is ``s = level + x' beta + b(window) + noise / sqrt(weight)``, with ``x`` the skipped blocks and a normal
    prior around 0 for ``beta``: Bayesian linear regression. Its posterior mean is ``A^-1 X' W s`` and its covariance
    ``noise A^-1`` with ``A = X' W X + _NO_EFFECT I``; the windows are eliminated from both first (the Schur complement
    of their diagonal block), since there may be many. The residual is a set's own effect, shrunk towards 0: the best
    linear unbiased prediction (Robinson 1991, "That BLUP is a good thing").

    Effects are additive only among sets that are about as good, so trials near the best count most: a trial's weight is
    multiplied by ``exp((expected - best) / scale)``, with a scale at which the effective number of trials
    ``(sum w)^2 / sum w^2`` (Kish 1965) is large enough.
    """
    rows, width = blocks[sets], blocks.shape[1]
    near = np.ones(len(values))
    for _ in range(_ROUNDS):
        counted = weights * near
        middle, level = np.average(rows, axis=0, weights=counted), np.average(values, weights=counted)
        skipped, above = rows - middle, values - level
        per_window = np.bincount(windows, counted) + _USUAL_TEXT
        in_window = np.zeros((len(per_window), width))
        np.add.at(in_window, windows, skipped * counted[:, None])
        score_in_window = np.bincount(windows, counted * above)
        normal = (skipped * counted[:, None]).T @ skipped + _NO_EFFECT * np.eye(width)
        inverse = np.linalg.inv(normal - in_window.T @ (in_window / per_window[:, None]))
        effects = inverse @ (skipped.T @ (counted * above) - in_window.T @ (score_in_window / per_window))
        text = (score_in_window - in_window @ effects) / per_window
        near = _nearness(skipped @ effects)
    residual = above - skipped @ effects - text[windows]
    total = counted.sum()
    noise = (counted * residual**2).sum() / max(total - _DEGREES * width, _DEGREES * total)
    of_set = np.bincount(sets, weights * residual) / (np.bincount(sets, weights) + _DOUBT)
    usual = level + np.average(text[windows], weights=weights)
    doubt = np.linalg.cholesky(inverse * noise + 1e-12 * np.eye(width))
    return Estimates(usual + (blocks - middle) @ effects + of_set, effects, doubt)


def _nearness(suggested: np.ndarray) -> np.ndarray:
    """The weights ``[n]`` of trials with these expected scores, 1 for the best."""
    below, scale = suggested - suggested.max(), _NEAR
    while True:
        near = np.exp(below / scale)
        if near.sum() ** 2 / (near**2).sum() >= min(_LEAST, 0.9 * len(near)):
            return np.asarray(near)
        scale *= _WIDER


class Feedback:
    """How many of the last drafted tokens were accepted."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, int]] = deque(maxlen=_WATCHED)
        self._usual: float | None = None

    def add(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._rounds.append((drafted, accepted))

    def has_become_hard(self) -> bool:
        """Whether drafts are accepted much less often than at the first call of this method."""
        drafted = sum(count for count, _ in self._rounds)
        if drafted < _WATCHED:
            return False
        while drafted - self._rounds[0][0] >= _WATCHED:
            drafted -= self._rounds.popleft()[0]
        share = sum(accepted for _, accepted in self._rounds) / drafted
        if self._usual is None:
            self._usual = share
        return share < _FAR_BELOW * self._usual
