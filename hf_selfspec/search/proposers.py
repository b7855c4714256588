"""Functions that propose the sets of skipped blocks that a search tries next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..model.plan import LayerPlan
from .estimates import Estimates
from .skip_space import SkipSpace

# Returns the closest sets of 1, 2, ... layers, up to the given number.
ProposeLayers = Callable[[int], list[LayerPlan]]

# Below this matchness fewer blocks should be skipped (SWIFT §5.1 lowers its ratio for LLaMA-3-70B).
_TOO_LOW = 0.7
_STEP = 0.1
_LEAST, _MOST = 0.1, 0.8
# Number of sets that are drawn uniformly, before the trials show which blocks matter.
_UNIFORM = 30


def next_set(
    space: SkipSpace,
    sets: Sequence[LayerPlan],
    estimates: Callable[[], Estimates],
    step: int,
    bayes_interval: int,
    ratio: float,
    rng: np.random.Generator,
) -> LayerPlan:
    """A set of a skip ratio after ``step`` trials: uniform at first, then by Thompson sampling, at times Bayesian.

    In the paper (SWIFT §4.1) all but the Bayesian ones are uniform: if half of 60 blocks are good to skip, those sets
    find two thirds of them.
    """
    if sets and (step + 1) % bayes_interval == 0:
        tried = dict(zip(sets, estimates().sets.tolist(), strict=True))
        if (found := bayesian(space, tried, ratio, rng)) is not None:
            return found
    return space.random(rng, ratio) if step < _UNIFORM else thompson(space, estimates(), ratio, rng)


def thompson(space: SkipSpace, estimates: Estimates, ratio: float, rng: np.random.Generator) -> LayerPlan:
    """The best set if skipping each block has an effect drawn from what trials have shown so far."""
    return space.highest(estimates.drawn(rng), ratio)


def bayesian(
    space: SkipSpace, scores: Mapping[LayerPlan, float], ratio: float, rng: np.random.Generator
) -> LayerPlan | None:
    """The set that Bayesian optimisation proposes from scores of sets of this size, ``None`` without any."""
    from .bayes import suggest  # needs scikit-learn and SciPy, which few calls use

    like = {plan: score for plan, score in scores.items() if len(space.places(plan)) == space.count(ratio)}
    return suggest(space, like, rng) if like else None


def other_ratio(ratio: float, matchness: float, target: float) -> float:
    """The ratio to go on with where sets of this one bring no improvement; the same one if that is right."""
    step = _STEP if matchness > target else -_STEP if matchness < _TOO_LOW else 0.0
    found = round(ratio + step, 6)
    return found if _LEAST <= found <= _MOST else ratio


def first_sizes(layers: int) -> list[int]:
    """The numbers of layers, of so many that may be skipped, that are tried on the first text."""
    step = _size_step(layers)
    return list(range(step, max(1, round(_MOST * layers)) + 1, step))


def next_sizes(layers: int, best: int, matchness: float, target: float, window: int) -> list[int]:
    """The best number of skipped layers and another: fewer where too little matches, more where much does.

    In between they alternate from window to window.
    """
    step = _size_step(layers)
    goes_up = matchness >= _TOO_LOW and (matchness > target or window % 2 == 1)
    other = best + step if goes_up else best - step
    return [size for size in (best, other) if 1 <= size <= layers]


def _size_step(layers: int) -> int:
    return max(1, round(_STEP * layers))
