"""Proposes sets of skipped blocks by Bayesian optimisation (SWIFT §4.1), with the package bayesian-optimization."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from bayes_opt import BayesianOptimization
from bayes_opt.acquisition import UpperConfidenceBound
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct

from ..errors import muted
from ..model.plan import LayerPlan
from .skip_search import SkipSpace

# The authors' settings of the Gaussian process and its acquisition function. Their kernel is the package's (Matérn),
# which generalises little in 60 dimensions; blocks matter independently of each other, so a linear kernel finds them.
_KAPPA, _NOISE = 2.5, 1e-2
# Bounds on the time of a proposal: scored sets that the process is fitted to, exchanges per step, and steps.
_HISTORY, _EXCHANGES, _STEPS = 200, 200, 32


class _BestExchange(UpperConfidenceBound):
    """Maximises the upper confidence bound by exchanging blocks of the best set; the package's own maximiser takes
    seconds at 60 dimensions and keeps the size only by rounding."""

    def __init__(self, rng: np.random.Generator, resize: bool) -> None:
        super().__init__(kappa=_KAPPA)
        self._rng = rng
        self._resize = resize

    def suggest(self, gp: Any, target_space: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        sets, scores = target_space.params, target_space.target
        gp.fit(sets, scores)
        scored = {row.tobytes() for row in sets}
        best, height = sets[np.argmax(scores)], -np.inf
        for _ in range(_STEPS):
            neighbours = self._neighbours(best)
            neighbours = neighbours[[row.tobytes() not in scored for row in neighbours]]
            if not len(neighbours):
                break
            heights = self.base_acq(*gp.predict(neighbours, return_std=True))
            if heights.max() <= height:
                break
            height, best = heights.max(), neighbours[np.argmax(heights)]
        return np.asarray(best)

    def _neighbours(self, blocks: np.ndarray) -> np.ndarray:
        """Sets ``[n, blocks]`` that differ from a set in one skipped and one running block, or in one block."""
        skipped, running = np.flatnonzero(blocks > 0.5), np.flatnonzero(blocks <= 0.5)
        pairs = np.stack(np.meshgrid(skipped, running), -1).reshape(-1, 2)
        pairs = self._rng.permutation(pairs)[:_EXCHANGES]
        neighbours = np.repeat(blocks[None], len(pairs), 0)
        rows = np.arange(len(pairs))
        neighbours[rows, pairs[:, 0]], neighbours[rows, pairs[:, 1]] = 0.0, 1.0
        if self._resize:
            resized = np.abs(blocks[None] - np.eye(len(blocks)))
            neighbours = np.concatenate([neighbours, resized[resized.sum(1) > 0]])
        return neighbours


def suggest(
    space: SkipSpace, scores: Mapping[LayerPlan, float], rng: np.random.Generator, resize: bool = False
) -> LayerPlan:
    """The set with the highest upper confidence bound near the best ones, with ``resize`` maybe of a new size."""
    plans = list(scores)
    if len(plans) > _HISTORY:
        best = sorted(plans, key=lambda plan: -scores[plan])[: _HISTORY // 2]
        plans = list(dict.fromkeys([*best, *plans[-(_HISTORY // 2) :]]))
    names = [f"{place:04d}" for place in range(len(space.blocks))]
    optimiser = BayesianOptimization(
        f=None, pbounds=dict.fromkeys(names, (0.0, 1.0)), acquisition_function=_BestExchange(rng, resize), verbose=0
    )
    kernel = ConstantKernel(0.1, (1e-3, 10.0)) * DotProduct(1.0, (1e-2, 10.0))
    optimiser.set_gp_params(kernel=kernel, alpha=_NOISE, n_restarts_optimizer=0, normalize_y=True)
    for plan in plans:
        optimiser.register(params=space.row(plan), target=scores[plan])
    with muted():  # about length scales at the end of their range
        suggested = optimiser.suggest()
    return space.plan(place for place, name in enumerate(names) if suggested[name] > 0.5)
