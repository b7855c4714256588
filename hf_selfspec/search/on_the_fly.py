"""SWIFT's search: sets of skipped blocks are tried on the last generated tokens, and the best one drafts (§4.1)."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from ..model.partial import LayerPlan
from ..settings import check_count, check_share
from .bayes import BayesianProposals
from .skip_space import SkipSpace


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
        target_matchness: matchness at which it ends.
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
        for name in ("context_window", "max_steps", "bayes_interval", "patience"):
            check_count(f"OnTheFlySearch({name})", getattr(self, name))
        check_share("OnTheFlySearch(target_matchness)", self.target_matchness, zero=False, one=True)


class SkipSearch:
    """One search for one model; threads may share it.

    Args:
        settings: when it ends.
        space: blocks to choose from.
        ratio: share of these blocks that every proposed set skips.
        start: the set that drafts until a better one is found.

    Attributes:
        best: the best set so far.
        matchness: its matchness, 0 before the first set was tried.
        history: matchness of every set that was tried, in order.
    """

    def __init__(self, settings: OnTheFlySearch, space: SkipSpace, ratio: float, start: LayerPlan) -> None:
        self.settings = settings
        self.space = space
        self.ratio = ratio
        self.best = start
        self.matchness = 0.0
        self.history: list[float] = []
        self._since_better = 0
        self._chance = np.random.default_rng(settings.seed)
        self._bayes = BayesianProposals(space, settings.seed)
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether the best set is there to stay (SWIFT's acceleration phase)."""
        settings = self.settings
        return (
            len(self.history) >= settings.max_steps
            or self._since_better >= settings.patience
            or self.matchness > settings.target_matchness
        )

    def propose(self) -> LayerPlan:
        """The next set to try: first the one that drafts already."""
        with self._lock:
            step = len(self.history)
            if step == 0:
                return self.best
            if step % self.settings.bayes_interval == 0:
                return self._bayes.suggest()
            return self.space.random(self._chance, self.ratio)

    def register(self, plan: LayerPlan, matchness: float) -> None:
        """Takes in how often ``plan`` said what the text says."""
        with self._lock:
            self.history.append(matchness)
            self._bayes.register(plan, matchness)
            self._since_better += 1
            if matchness > self.matchness:
                self.best, self.matchness, self._since_better = plan, matchness, 0
