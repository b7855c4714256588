"""Proposes the sets of skipped blocks that a search tries next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..model.plan import LayerPlan
from .block_effects import BlockEffects, block_effects
from .estimates import Scores, effects
from .on_the_fly import ClosestLayers, OnTheFlySearch, Search
from .skip_space import SkipSpace

# Returns the closest sets of 1, 2, ... layers, up to the given number.
ProposeLayers = Callable[[int], list[LayerPlan]]

# Below this matchness fewer blocks should be skipped (SWIFT §5.1 lowers its ratio for LLaMA-3-70B).
_TOO_LOW = 0.7
_STEP = 0.1
_LEAST, _MOST = 0.1, 0.8
# After trials on this many windows of text a set's own scores weigh as much as what other sets suggest. Among many sets
# some score high by luck.
_DOUBT = 4.0
# A search whose best set of all sizes stays below this expected speed-up in two windows is given up. One set is still
# tried again every 16 windows.
_HOPELESS = 0.9
# Number of sets that are drawn uniformly, before the trials show which blocks matter.
_UNIFORM = 30


class Proposer(Protocol):
    """Proposes sets, given the results so far."""

    @property
    def is_busy(self) -> bool:
        """Whether sets of the last window still have to be tried before another window begins."""
        return False

    @property
    def proposal_tokens(self) -> int:
        """Tokens of the forward that finds the closest layers before the next set, 0 for none."""
        return 0

    def estimates(self, scores: Scores) -> np.ndarray:
        """Estimated score of each set on average text ``[sets]``, from its own trials and those of others."""

    def propose(self, scores: Scores, steps: int, propose_layers: ProposeLayers) -> LayerPlan | None:
        """Returns the next set; ``None`` if there is nothing to try before the next window.

        Args:
            scores: scores of the trials so far.
            steps: number of trials so far.
            propose_layers: finds sets for the current text.
        """

    def may_end_with(self, plan: LayerPlan) -> bool:
        """Whether the search may end because this set scores well."""

    def gives_up(self, speedup: float) -> bool:
        """Whether the search may end because the best set of all sizes has only this expected speed-up."""
        return False

    def prepare(self, propose_layers: ProposeLayers) -> None:
        """Runs the forward of :attr:`proposal_tokens`."""
        return None

    def first(self, propose_layers: ProposeLayers) -> LayerPlan | None:
        """The set to draft with before any was tried, ``None`` to keep the current one."""
        return None

    def begin_window(self, best: LayerPlan, matchness: float) -> None:
        """Starts a window of new text, given the best set so far and its matchness."""
        return None

    def go_on(self, best: LayerPlan, matchness: float) -> bool:
        """Whether to continue with sets of another size, after those of this size brought no improvement."""
        return False


def proposer_of(settings: Search, space: SkipSpace, ratio: float, auto: bool) -> Proposer:
    """Returns the proposer of a search; see the classes below."""
    if isinstance(settings, ClosestLayers):
        return Closest(settings, space, ratio, auto)
    return RandomAndBayes(settings, space, ratio, auto)


class RandomAndBayes(Proposer):
    """SWIFT's proposals: random sets of one size, every so often one by Bayesian optimisation (§4.1).

    The first random sets are uniform; later ones are sampled by what skipping each block has brought so far
    (:class:`BlockEffects`, Thompson sampling). In the paper all are uniform: if half of 60 blocks are good to skip,
    those sets find two thirds of them.

    Args:
        settings, space, ratio, auto: see ``SkipSearch``.
    """

    def __init__(self, settings: OnTheFlySearch, space: SkipSpace, ratio: float, auto: bool) -> None:
        self.settings = settings
        self.space = space
        self.auto = auto
        self.ratio = ratio
        self._searched = {ratio}
        self._rng = np.random.default_rng(settings.seed)

    def estimates(self, scores: Scores) -> np.ndarray:
        return self._effects(scores).sets

    def propose(self, scores: Scores, steps: int, propose_layers: ProposeLayers) -> LayerPlan | None:
        if scores.plans and (steps + 1) % self.settings.bayes_interval == 0:
            worth = zip(scores.plans, self.estimates(scores).tolist(), strict=True)
            if like := {plan: value for plan, value in worth if self._has_this_size(plan)}:
                from .bayes import suggest  # needs scikit-learn and SciPy, which few calls use

                return suggest(self.space, like, self._rng)
        if steps < _UNIFORM:
            return self.space.random(self._rng, self.ratio)
        return self.space.highest(self._effects(scores).drawn(self._rng), self.ratio)

    def _effects(self, scores: Scores) -> BlockEffects:
        return block_effects(scores, np.array([self.space.row(plan) for plan in scores.plans]), _DOUBT)

    def may_end_with(self, plan: LayerPlan) -> bool:
        # A set that was good at the last size does not end the search at this one.
        return not self.auto or self._has_this_size(plan)

    def _has_this_size(self, plan: LayerPlan) -> bool:
        return len(self.space.places(plan)) == self.space.count(self.ratio)

    def go_on(self, best: LayerPlan, matchness: float) -> bool:
        if not self.auto:
            return False
        step = _STEP if matchness > self.settings.target_matchness else -_STEP if matchness < _TOO_LOW else 0.0
        ratio = round(self.ratio + step, 6)
        if ratio in self._searched or not _LEAST <= ratio <= _MOST:
            return False
        self.ratio = ratio
        self._searched.add(ratio)
        return True


class Closest(Proposer):
    """CLaSp's sets: the first ones in many sizes, then new ones of about the best size.

    Args:
        settings, space, ratio, auto: see ``SkipSearch``.
    """

    def __init__(self, settings: ClosestLayers, space: SkipSpace, ratio: float, auto: bool) -> None:
        self.settings = settings
        self.space = space
        self.auto = auto
        self._layers = len(space.whole_layers)
        self.count = max(1, round(ratio * self._layers))
        self._step = max(1, round(_STEP * self._layers))
        self._most = max(1, round(_MOST * self._layers)) if auto else self.count
        self._queue: list[int] = []
        self._found: list[LayerPlan] = []
        self._windows = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)

    @property
    def proposal_tokens(self) -> int:
        return 0 if self._found else max(self._queue, default=self._most) + 1

    def estimates(self, scores: Scores) -> np.ndarray:
        sizes = np.array([len(plan.skipped_attention) + len(plan.skipped_mlp) for plan in scores.plans])
        near = 2 * max(1, round(len(self.space.blocks) / 20))
        return effects(scores, sizes, near, _DOUBT)

    def prepare(self, propose_layers: ProposeLayers) -> None:
        if not self._found:
            self._found = propose_layers(max(self._queue, default=self._most))

    def first(self, propose_layers: ProposeLayers) -> LayerPlan | None:
        self.prepare(propose_layers)
        return self._found[min(self.count, len(self._found)) - 1]

    def begin_window(self, best: LayerPlan, matchness: float) -> None:
        self._windows += 1
        if not self.auto:
            sizes = [self.count]
        elif self._windows == 1:
            sizes = list(range(self._step, self._most + 1, self._step))
        else:
            self.count = len(best.skipped_layers) or self.count
            fewer, more = self.count - self._step, self.count + self._step
            # With low matchness a smaller set is tried, with high matchness a larger one; in between they alternate.
            in_turn = more if self._windows % 2 else fewer
            easy = matchness > self.settings.target_matchness
            sizes = [self.count, fewer if matchness < _TOO_LOW else more if easy else in_turn]
        if self._windows > 1:
            self._found = []
        self._queue = [size for size in dict.fromkeys(sizes) if 1 <= size <= self._layers]

    def propose(self, scores: Scores, steps: int, propose_layers: ProposeLayers) -> LayerPlan | None:
        if not self._queue:
            return None
        self.prepare(propose_layers)
        return self._found[self._queue.pop(0) - 1]

    def may_end_with(self, plan: LayerPlan) -> bool:
        return not self.auto

    def gives_up(self, speedup: float) -> bool:
        return self.auto and self._windows > 1 and not self._queue and speedup < _HOPELESS
