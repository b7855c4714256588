"""Sets of skipped blocks proposed by Bayesian optimisation (SWIFT §4.1), with the package bayesian-optimization."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import UpperConfidenceBound

from ..model.partial import LayerPlan
from .skip_space import SkipSpace

# The authors' settings of the Gaussian process and its acquisition function.
_KAPPA, _NOISE = 2.5, 1e-2
# What bounds the time of a proposal: scored sets that the process is fitted to, exchanges in a step, and steps.
_HISTORY, _EXCHANGES, _STEPS = 200, 200, 32


class _BestExchange(UpperConfidenceBound):
    """Upper confidence bound, followed uphill from the best known set by exchanging one block for another.

    The package's own maximiser draws points in the unit cube and refines some by gradients, which takes seconds at 60
    dimensions and leaves sets of the wanted size only by rounding.
    """

    def __init__(self, chance: np.random.Generator) -> None:
        super().__init__(kappa=_KAPPA)
        self._chance = chance

    def suggest(self, gp: Any, target_space: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        sets, scores = target_space.params, target_space.target
        if len(scores) > _HISTORY:
            known = np.union1d(np.argsort(-scores)[: _HISTORY // 2], np.arange(len(scores))[-_HISTORY // 2 :])
            sets, scores = sets[known], scores[known]
        gp.fit(sets, scores)
        found = sets[np.argmax(scores)].copy()
        height = -np.inf
        for _ in range(_STEPS):
            ways = self._exchanged(found)
            heights = self.base_acq(*gp.predict(ways, return_std=True))
            if heights.max() <= height:
                break
            height, found = heights.max(), ways[np.argmax(heights)]
        return np.asarray(found)

    def _exchanged(self, found: np.ndarray) -> np.ndarray:
        """``[n, blocks]`` sets that differ from ``found`` in one skipped and one running block."""
        skipped, running = np.flatnonzero(found > 0.5), np.flatnonzero(found <= 0.5)
        pairs = np.stack(np.meshgrid(skipped, running), -1).reshape(-1, 2)
        pairs = self._chance.permutation(pairs)[:_EXCHANGES]
        ways = np.repeat(found[None], len(pairs), 0)
        rows = np.arange(len(pairs))
        ways[rows, pairs[:, 0]], ways[rows, pairs[:, 1]] = 0.0, 1.0
        return ways


class BayesianProposals:
    """What the scores so far suggest to try next.

    Args:
        space: blocks to choose from.
        seed: of the exchanges that are looked at.
    """

    def __init__(self, space: SkipSpace, seed: int) -> None:
        self.space = space
        self._names = [f"{place:04d}" for place in range(len(space.blocks))]
        self._optimiser = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(self._names, (0.0, 1.0)),
            acquisition_function=_BestExchange(np.random.default_rng(seed)),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimiser.set_gp_params(alpha=_NOISE, n_restarts_optimizer=0, normalize_y=True)

    def register(self, plan: LayerPlan, score: float) -> None:
        """Takes in the score of a set."""
        skipped = self.space.places(plan)
        point = {name: float(place in skipped) for place, name in enumerate(self._names)}
        self._optimiser.register(params=point, target=score)

    def suggest(self) -> LayerPlan:
        """The set with the highest upper confidence bound that exchanges lead to; at least one score is known."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # length scales at the end of their range
            point = self._optimiser.suggest()
        return self.space.plan(place for place, name in enumerate(self._names) if point[name] > 0.5)
