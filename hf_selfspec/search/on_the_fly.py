"""Sets of skipped blocks are tried on the last generated tokens, and the best one drafts (SWIFT §4.1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..model.partial import LayerPlan
from ..settings import check_count, check_share
from .bayes import suggest
from .skip_space import SkipSpace

# Sets that are tried again on each new window, how many windows' worth of the usual score an estimate holds, and on how
# many windows a set has to be good enough to end the search.
_TRIED_AGAIN = 3
_DOUBT = 0.5
_CONFIRMED = 3


def usual_ratio(parameters: int) -> float:
    """The skip ratio that SWIFT takes for models of this size."""
    return 0.5 if parameters >= 30e9 else 0.45 if parameters >= 10e9 else 0.4


@dataclass(frozen=True)
class OnTheFlySearch:
    """When sets are tried while generating, and when that ends.

    Args:
        context_window: generated tokens on which a set is tried (γ).
        max_steps: sets to try at most (S).
        bayes_interval: every so many sets, Bayesian optimisation proposes one; the others are drawn at random (β).
        patience: sets without a better one among them after which the search ends.
        target_matchness: matchness, over three windows at least, at which it ends.
        seed: of the random sets.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    context_window: int = 32
    max_steps: int = 1000
    bayes_interval: int = 25
    patience: int = 300
    target_matchness: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)
        check_count("OnTheFlySearch(bayes_interval)", self.bayes_interval)


@dataclass(frozen=True)
class ClosestLayers:
    """Sets without which the hidden states stay closest to the whole model's (CLaSp, arXiv 2505.24196).

    One forward over copies of the last token finds such a set, of whole layers. One drafts from the second round on;
    later ones, one in each window of the text, are tried on it as :class:`OnTheFlySearch` tries its sets, and the best
    one stays. (The paper takes a new set for each stretch of text.)

    Args:
        context_window: generated tokens on which a set is tried.
        max_steps: tries at most.
        patience: tries without a better set after which the search ends.
        target_matchness: matchness, over three windows at least, at which it ends.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    context_window: int = 32
    max_steps: int = 64
    patience: int = 16
    target_matchness: float = 0.95

    def __post_init__(self) -> None:
        _check(self)


Search = OnTheFlySearch | ClosestLayers


def _check(search: Search) -> None:
    name = type(search).__name__
    for setting in ("context_window", "max_steps", "patience"):
        check_count(f"{name}({setting})", getattr(search, setting))
    check_share(f"{name}(target_matchness)", search.target_matchness, zero=False, one=True)


class SkipSearch:
    """One search for one model; threads may share it.

    A window of 32 tokens says little, and the best of many such scores says too much: a set that scored well is tried
    again on later text, and what counts is the mean of its scores, drawn towards the mean of all first scores. (SWIFT
    keeps the highest score; a set that had been lucky once would never be replaced.)

    Args:
        settings: when it ends.
        space: blocks to choose from.
        ratio: share of these blocks that every proposed set skips.
        start: the set that drafts until a better one is found.

    Attributes:
        best: the best set so far.
        history: matchness of every try, in order.
    """

    def __init__(self, settings: Search, space: SkipSpace, ratio: float, start: LayerPlan) -> None:
        self.settings = settings
        self.space = space
        self.ratio = ratio
        self.best = start
        self.history: list[float] = []
        self._scores: dict[LayerPlan, list[float]] = {}
        self._again: list[LayerPlan] = [start]
        self._since_better = 0
        self._may_look = False
        self._chance = np.random.default_rng(settings.seed if isinstance(settings, OnTheFlySearch) else 0)
        self._lock = threading.Lock()

    @property
    def matchness(self) -> float:
        """What the best set is estimated to match, 0 before the first try."""
        return self._estimates().get(self.best, 0.0)

    @property
    def is_over(self) -> bool:
        """Whether the best set is there to stay (SWIFT's acceleration phase)."""
        settings = self.settings
        return (
            len(self.history) >= settings.max_steps
            or self._since_better >= settings.patience
            or (self.matchness > settings.target_matchness and len(self._scores[self.best]) >= _CONFIRMED)
        )

    def begin_window(self) -> None:
        """The text has moved on by a window: what looks best is to be tried on it."""
        with self._lock:
            estimates = self._estimates()
            self._may_look = True
            self._again = sorted(estimates, key=lambda plan: -estimates[plan])[:_TRIED_AGAIN] or [self.best]

    @property
    def layers(self) -> int:
        """How many whole layers the ratio stands for."""
        return max(1, round(self.ratio * (self.space.num_layers - 2)))

    def begin(self, plan: LayerPlan) -> None:
        """Lets ``plan`` draft, before any set was tried."""
        with self._lock:
            if not self.history:
                self.best, self._again = plan, [plan]

    def propose(self, look: Callable[[int], LayerPlan] | None = None) -> LayerPlan | None:
        """The next set to try: first the one that drafts already.

        Args:
            look: finds the closest ``layers`` for the text as it is; for :class:`ClosestLayers`.

        Returns:
            ``None`` where there is nothing to try before the next window.
        """
        with self._lock:
            if self._again:
                return self._again.pop(0)
            if isinstance(self.settings, ClosestLayers):
                if look is None or not self._may_look:
                    return None
                self._may_look = False
                return look(self.layers)
            if (len(self.history) + 1) % self.settings.bayes_interval == 0:
                return suggest(self.space, self._estimates(), self._chance)
            return self.space.random(self._chance, self.ratio)

    def register(self, plan: LayerPlan, matchness: float) -> None:
        """Takes in how often ``plan`` said what the text says."""
        with self._lock:
            self.history.append(matchness)
            self._scores.setdefault(plan, []).append(matchness)
            estimates = self._estimates()
            leader = max(estimates, key=lambda plan: estimates[plan])
            self._since_better += 1
            if leader != self.best:
                self.best, self._since_better = leader, 0

    def _estimates(self) -> dict[LayerPlan, float]:
        if not self._scores:
            return {}
        usual = float(np.mean([scores[0] for scores in self._scores.values()]))
        return {plan: (sum(scores) + _DOUBT * usual) / (len(scores) + _DOUBT) for plan, scores in self._scores.items()}
