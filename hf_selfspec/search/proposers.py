"""Functions that propose the sets of skipped blocks that a search tries next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..batch import Text
from ..model.layout import TreeLayout
from ..model.partial import ForwardPass
from ..model.plan import LayerPlan
from ..model.target import Target
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


class _Table:
    """CLaSp's dynamic programme while a forward fills it (arXiv 2505.24196).

    ``g(i, j)``, the state after ``i`` layers of which ``j`` were skipped, is the better one of ``f_i(g(i-1, j))`` and
    ``g(i-1, j-1)``: the one with the higher cosine similarity to the whole model's state there, ``g(i, 0)``. All ``j``
    go through a layer together, as copies of one token that do not see each other.
    """

    def __init__(self, layers: Sequence[int], most: int) -> None:
        self.layers = layers
        self.most = most
        self.skips: list[torch.Tensor] = []

    def after_layer(self, layer: int, entered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Returns what enters the next layer, per number of skipped layers: states ``[..., most + 1, d]``."""
        if layer not in self.layers:
            return left
        entered = entered.to(left.device)  # a model may be spread over devices
        whole = left[..., :1, :].float()
        run = F.cosine_similarity(left.float(), whole, dim=-1).flatten(0, -2).mean(0)
        skip = F.cosine_similarity(entered.float(), whole, dim=-1).flatten(0, -2).mean(0).roll(1)
        # With j of the first i layers skipped, 0 <= j <= i; before the first layer j is 0.
        passed = len(self.skips)
        places = torch.arange(self.most + 1, device=left.device)
        skips = ((skip > run) & (places > 0) | (places == passed + 1)) & (places <= passed + 1)
        self.skips.append(skips)
        return torch.where(skips[:, None], entered.roll(1, dims=-2), left)

    def skipped(self) -> list[list[int]]:
        """For each count from 1 to ``most`` the best layers to skip."""
        table = torch.stack([skips.to(self.skips[0].device) for skips in self.skips]).tolist()
        ways = []
        for count in range(1, self.most + 1):
            found, left = [], count
            for row in reversed(range(len(self.layers))):
                if left and table[row][left]:
                    found.append(self.layers[row])
                    left -= 1
            ways.append(found)
        return ways


@torch.no_grad()
def closest_layers(target: Target, text: Text, layers: Sequence[int], most: int) -> list[LayerPlan]:
    """The plans that skip 1, 2, ... ``most`` of ``layers`` and change the last tokens' states least.

    Slots from each row's last token on are used as scratch space.
    """
    num_layers = target.anatomy.num_layers
    table = _Table(layers, most)
    copies = text.last_tokens().expand(-1, most + 1)
    run = ForwardPass(target.full_plan, stop=num_layers, after_layer=table.after_layer)
    target.step(copies, text.last_slots(), run, TreeLayout.independent(most + 1))
    return [LayerPlan(num_layers, frozenset(found), frozenset(found)) for found in table.skipped()]
