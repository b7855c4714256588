"""The search for blocks to skip: what it tries, the best set so far, and when it ends or begins again (SWIFT §4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SettingError
from ..learned.knowledge import Findings
from ..learned.saving import register
from ..model.anatomy import Anatomy
from ..model.forks import new_lock
from ..model.plan import LayerPlan, check_plan
from ..stats import GenerationStats
from ..validation import MOST_WINDOW, check_count, check_share

_BLOCKS = ("attention", "mlp")
# A layer that is skipped as a whole or not at all.
_LAYER = "layer"


@register
@dataclass(frozen=True)
class OnTheFlySearch:
    """Random sets, now and then one by Bayesian optimisation, tried on the last generated tokens (SWIFT §4.1).

    The set with the highest matchness drafts: the share of these tokens that it predicts. Where a much smaller
    share of its drafts is accepted than when the search ended, the search begins again (SWIFT, Figure 7).

    Args:
        context_window: number of generated tokens on which a set is tried (γ); shorter texts are not searched on.
        max_steps: maximum number of sets to try (S).
        bayes_interval: Bayesian optimisation proposes one of this many sets; the others are random (β).
        patience: number of sets without a better one after which the search ends.
        target_matchness: matchness at which the search ends.
        budget: share of the time of each call that trials may take; 1 for no limit and a trial after each round, as in
            the paper. Calls in which a trial would take more than that try nothing.
        seed: seed of the random sets.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    context_window: int = 32
    max_steps: int = 1000
    bayes_interval: int = 25
    patience: int = 300
    target_matchness: float = 0.95
    budget: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("OnTheFlySearch(context_window)", self.context_window, most=MOST_WINDOW)
        for setting in ("max_steps", "patience", "bayes_interval"):
            check_count(f"OnTheFlySearch({setting})", getattr(self, setting))
        check_count("OnTheFlySearch(seed)", self.seed, least=0)
        for setting in ("target_matchness", "budget"):
            check_share(f"OnTheFlySearch({setting})", getattr(self, setting), zero=False, one=True)


def usual_ratio(parameters: int) -> float:
    """Returns the skip ratio that SWIFT uses for models with this number of parameters."""
    return 0.5 if parameters >= 30e9 else 0.45 if parameters >= 10e9 else 0.4


@dataclass(frozen=True)
class SkipSpace:
    """The blocks among which a search chooses: none of the first and last layer, no attention that others read."""

    num_layers: int
    # (layer, "attention" or "mlp") by layer, and (layer, "layer") for layers of hybrids that do not have both.
    blocks: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, anatomy: Anatomy) -> SkipSpace:
        """The blocks of a model; raises if it has fewer than 4 layers, or a block was not found in it."""
        if anatomy.num_layers < 4:
            raise SettingError(
                f"a search for blocks to skip needs a model of at least 4 layers, but {anatomy.model_name} has "
                f"{anatomy.num_layers}. Use SkipLayers() without a search."
            )
        inner = range(1, anatomy.num_layers - 1)
        blocks = tuple((layer, name) for layer in inner for name in _blocks(anatomy, layer))
        space = cls(anatomy.num_layers, blocks)
        for index in range(len(blocks)):
            check_plan(space.plan([index]), anatomy)
        return space

    def count(self, ratio: float) -> int:
        """Number of blocks that a skip ratio corresponds to, at least one."""
        return max(1, round(ratio * len(self.blocks)))

    def plan(self, chosen: Iterable[int]) -> LayerPlan:
        skipped: dict[str, set[int]] = {name: set() for name in _BLOCKS}
        for place in chosen:
            layer, name = self.blocks[place]
            for block in _BLOCKS if name == _LAYER else (name,):
                skipped[block].add(layer)
        return LayerPlan(self.num_layers, frozenset(skipped["attention"]), frozenset(skipped["mlp"]))

    def places(self, plan: LayerPlan) -> frozenset[int]:
        skipped = {"attention": plan.skipped_attention, "mlp": plan.skipped_mlp, _LAYER: plan.skipped_layers}
        return frozenset(place for place, (layer, name) in enumerate(self.blocks) if layer in skipped[name])

    def row(self, plan: LayerPlan) -> np.ndarray:
        """``[blocks]``: 1 for those that ``plan`` skips, else 0."""
        row = np.zeros(len(self.blocks))
        row[list(self.places(plan))] = 1.0
        return row

    def random(self, rng: np.random.Generator, ratio: float) -> LayerPlan:
        return self.plan(rng.permutation(len(self.blocks))[: self.count(ratio)].tolist())


def _blocks(anatomy: Anatomy, layer: int) -> tuple[str, ...]:
    if anatomy.is_recurrent and not (anatomy.attention[layer] and anatomy.mlp[layer]):
        return (_LAYER,)
    return _BLOCKS if layer not in anatomy.kv_sources else ("mlp",)


# SWIFT's phases (Figure 4): while sets are tried, and once the best one is final.
_PHASES = ("optimization", "acceleration")
# Of how many trials the matchness is kept.
_LOGGED = 1024
# Text has become hard if, of so many drafted tokens, less than this share of the usual number is accepted. The share
# has a standard error of at most 0.031: if half of the tokens are usually accepted, that is more than five of them.
_WATCHED, _FAR_BELOW = 256, 0.65


@dataclass(frozen=True)
class SkipChoice:
    """The set of skipped blocks that a search has chosen so far.

    Attributes:
        plan: the blocks that run in a draft.
        matchness: share of the last tokens that the set predicted when it was tried, 0 before that.
    """

    plan: LayerPlan
    matchness: float

    def state(self) -> dict[str, Any]:
        return {"set": self.plan.picture(), "matchness": self.matchness}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> SkipChoice:
        """The inverse of :meth:`state`."""
        return cls(LayerPlan.of_picture(state["set"]), state["matchness"])


class SkipSearch(Findings):
    """One search for one model and kind of call; threads may share it."""

    def __init__(self, settings: OnTheFlySearch, space: SkipSpace, ratio: float, start: LayerPlan) -> None:
        self.settings, self.space, self._ratio = settings, space, ratio
        self.choice = SkipChoice(start, 0.0)
        self._history: deque[float] = deque(maxlen=_LOGGED)
        self.best_sets: deque[tuple[int, LayerPlan]] = deque([(0, start)], maxlen=_LOGGED)  # and from which step on
        self.search_seconds = 0.0  # of trials in these calls
        self.trial_seconds = 0.0  # of the last trial's forward
        self._lock = new_lock()
        self._start_over()

    def _start_over(self, steps: int = 0) -> None:
        self._scores: dict[LayerPlan, float] = {}
        self.steps, self._since_better = steps, 0
        self.is_over = False
        self._rng = np.random.default_rng(self.settings.seed + steps)  # a search that goes on tries other sets
        # Of the drafts since the search has ended; the usual share of accepted tokens is that of the first ones.
        self._drafted = self._accepted = 0
        self._usual: float | None = None

    @property
    def best(self) -> LayerPlan:
        return self.choice.plan

    @property
    def history(self) -> list[float]:
        with self._lock:
            return list(self._history)

    @property
    def phase(self) -> str:
        """``optimization`` or ``acceleration`` (SWIFT, Figure 4)."""
        return _PHASES[self.is_over]

    def report(self, stats: GenerationStats) -> None:
        stats.plan, stats.phase, stats.matchness = self.best.picture(), self.phase, self.history

    def propose(self) -> LayerPlan | None:
        """Returns the next set to try, first the one that drafts already; ``None`` once the search is over."""
        with self._lock:
            if self.is_over:
                return None
            if not self._scores:
                return self.best
            if (self.steps + 1) % self.settings.bayes_interval == 0:
                size = self.space.count(self._ratio)
                like = {plan: score for plan, score in self._scores.items() if len(self.space.places(plan)) == size}
                if like:
                    from .bayes import suggest  # needs scikit-learn and SciPy, which few calls use

                    return suggest(self.space, like, self._rng)
            return self.space.random(self._rng, self._ratio)

    def register(self, plan: LayerPlan, matchness: float) -> None:
        """Records a trial: the share of the text's tokens that ``plan`` predicts."""
        settings = self.settings
        with self._lock:
            self._history.append(matchness)
            self._scores[plan] = matchness
            before, best = self.best, max(self._scores, key=lambda each: self._scores[each])
            self.choice = SkipChoice(best, self._scores[best])
            if best != before:
                self.best_sets.append((len(self._history), best))
            self.steps += 1
            self._since_better = 0 if best != before else self._since_better + 1
            is_old = self.steps >= settings.max_steps or self._since_better >= settings.patience
            self.is_over = is_old or self.choice.matchness > settings.target_matchness

    def watch(self, plan: LayerPlan, drafted: int, accepted: int) -> None:
        """Records a round of ``plan``; a search that is over begins again where much less is accepted than at first."""
        with self._lock:
            if not self.is_over or plan != self.best:
                return
            self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
            if self._drafted < _WATCHED:
                return
            share, self._drafted, self._accepted = self._accepted / self._drafted, 0, 0
            if self._usual is None:
                self._usual = share
            elif share < _FAR_BELOW * self._usual:
                self._start_over()

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"phase": self.phase, "steps": self.steps, **self.choice.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned. What was tried is not kept, but the best."""
        choice, is_over = SkipChoice.of_state(state), bool(_PHASES.index(state["phase"]))
        with self._lock:
            self._start_over(state["steps"])
            self.choice, self.is_over = choice, is_over
            self.best_sets = deque([(0, choice.plan)], maxlen=_LOGGED)
