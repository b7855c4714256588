"""The search that runs while text is generated: its settings, and the sets of skipped blocks that it can try."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import SettingError
from ..learned.saving import register
from ..model.anatomy import Anatomy
from ..model.plan import LayerPlan, check_plan
from ..validation import MOST_WINDOW, check_count, check_share

_BLOCKS = ("attention", "mlp")
# A layer that is skipped as a whole or not at all.
_LAYER = "layer"


@register("search")
@dataclass(frozen=True)
class OnTheFlySearch:
    """Random sets, now and then one by Bayesian optimisation, tried on the last generated tokens (SWIFT §4.1).

    The set with the highest matchness drafts: the share of these tokens that it predicts. Where much less of its drafts
    is accepted than when the search had ended, it begins again (SWIFT, Figure 7).

    Args:
        context_window: number of generated tokens on which a set is tried (γ).
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
