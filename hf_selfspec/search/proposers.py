"""The searches that run while text is generated: their settings, and the sets of skipped blocks that they try."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ..batch import Text
from ..errors import SettingError
from ..learned.saving import register
from ..model.anatomy import Anatomy
from ..model.forward_pass import ForwardPass
from ..model.layout import TreeLayout
from ..model.plan import LayerPlan, check_plan
from ..model.target import Target
from ..validation import MOST_WINDOW, check_count, check_share

_BLOCKS = ("attention", "mlp")
# A layer that is skipped as a whole or not at all.
_LAYER = "layer"


@register("search")
@dataclass(frozen=True)
class OnTheFlySearch:
    """Random sets, now and then one by Bayesian optimisation, tried on the last generated tokens (SWIFT §4.1).

    Args:
        context_window: number of generated tokens on which a set is tried (γ).
        max_steps: maximum number of sets to try (S).
        bayes_interval: Bayesian optimisation proposes one of this many sets; the others are random (β).
        patience: number of sets without a better one after which the search ends.
        target_matchness: matchness, over at least three windows, at which the search ends.
        budget: share of the time of each call that the search may take, including the first call, and half of it
            until a set was found that pays; 1 for no limit and a trial after each round, as in the paper. Calls in
            which a trial would take more than that try nothing.
        seed: seed of the random sets.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    tries_each_round: ClassVar[bool] = True
    context_window: int = 32
    max_steps: int = 1000
    bayes_interval: int = 25
    patience: int = 300
    target_matchness: float = 0.95
    budget: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)
        check_count("OnTheFlySearch(bayes_interval)", self.bayes_interval)
        check_count("OnTheFlySearch(seed)", self.seed, least=0)


@register("search")
@dataclass(frozen=True)
class ClosestLayers:
    """Sets without which the hidden states stay closest to the whole model's (CLaSp, arXiv 2505.24196).

    One forward over copies of the last token finds such sets, of whole layers and of all sizes. Whenever a window of
    text is complete, and at the end of the text, the best set so far and new ones are tried on it, and the best one is
    kept. (The paper uses a new set for each stretch of text.)

    Args:
        context_window: number of generated tokens on which sets are tried, all rows together; at most 32 for the first.
        max_steps: maximum number of trials.
        patience: number of trials without a better set after which the search ends.
        target_matchness: matchness, over at least three windows, at which the search ends.
        budget: as in :class:`OnTheFlySearch`.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    tries_each_round: ClassVar[bool] = False
    context_window: int = 64
    max_steps: int = 24
    patience: int = 12
    target_matchness: float = 0.95
    budget: float = 0.03

    def __post_init__(self) -> None:
        _check(self)


Search = OnTheFlySearch | ClosestLayers


def _check(search: Search) -> None:
    name = type(search).__name__
    check_count(f"{name}(context_window)", search.context_window, most=MOST_WINDOW)
    for setting in ("max_steps", "patience"):
        check_count(f"{name}({setting})", getattr(search, setting))
    for setting in ("target_matchness", "budget"):
        check_share(f"{name}({setting})", getattr(search, setting), zero=False, one=True)


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

    @property
    def whole_layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.plan(range(len(self.blocks))).skipped_layers))

    def timed_plans(self) -> tuple[LayerPlan, LayerPlan | None]:
        """The plans whose times give the costs of blocks: without every second layer, and without MLP blocks if any."""
        every_second = frozenset(self.whole_layers[::2])
        mlp = frozenset(layer for layer, block in self.blocks if block == "mlp")
        without = LayerPlan(self.num_layers, frozenset(), mlp) if mlp else None
        return LayerPlan(self.num_layers, every_second, every_second), without

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

    def highest(self, values: np.ndarray, ratio: float) -> LayerPlan:
        """The plan that skips the blocks with the highest of ``values`` ``[blocks]``."""
        order = np.argsort(-values, kind="stable")
        return self.plan(order[: self.count(ratio)].tolist())

    def random(self, rng: np.random.Generator, ratio: float) -> LayerPlan:
        return self.highest(rng.random(len(self.blocks)), ratio)


def _blocks(anatomy: Anatomy, layer: int) -> tuple[str, ...]:
    if anatomy.is_recurrent and not (anatomy.attention[layer] and anatomy.mlp[layer]):
        return (_LAYER,)
    return _BLOCKS if layer not in anatomy.kv_sources else ("mlp",)


@dataclass(frozen=True)
class Estimates:
    """Estimated scores ``[sets]`` on average text and effects of skipping ``[blocks]``; ``doubt`` ``[blocks, blocks]``
    is a square root of the effects' covariance."""

    sets: np.ndarray
    effects: np.ndarray
    doubt: np.ndarray

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Samples effects ``[blocks]`` from their posterior (Thompson sampling, Agrawal and Goyal, arXiv:1209.3352)."""
        return np.asarray(self.effects + self.doubt @ rng.standard_normal(len(self.effects)))


@torch.no_grad()
def closest_layers(target: Target, text: Text, layers: Sequence[int], most: int) -> list[LayerPlan]:
    """The plans that skip 1, 2, ... ``most`` of ``layers`` and change the last tokens' states least.

    One forward fills CLaSp's dynamic programme (arXiv 2505.24196): ``g(i, j)``, the state after ``i`` layers of which
    ``j`` were skipped, is the better one of ``f_i(g(i-1, j))`` and ``g(i-1, j-1)``: the one with the higher cosine
    similarity to the whole model's state there, ``g(i, 0)``. All ``j`` go through a layer together, as copies of one
    token that do not see each other. Slots from each row's last token on are used as scratch space.
    """
    num_layers = target.anatomy.num_layers
    skips: list[torch.Tensor] = []  # by layer, for each j: whether it is one of the skipped ones

    def after_layer(layer: int, entered: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Returns what enters the next layer, for each j: states ``[..., most + 1, d]``."""
        if layer not in layers:
            return left
        entered = entered.to(left.device)  # a model may be spread over devices
        whole = left[..., :1, :].float()
        run = F.cosine_similarity(left.float(), whole, dim=-1).flatten(0, -2).mean(0)
        skip = F.cosine_similarity(entered.float(), whole, dim=-1).flatten(0, -2).mean(0).roll(1)
        # With j of the first i layers skipped, 0 <= j <= i; before the first layer j is 0.
        passed, places = len(skips), torch.arange(most + 1, device=left.device)
        skips.append(((skip > run) & (places > 0) | (places == passed + 1)) & (places <= passed + 1))
        return torch.where(skips[-1][:, None], entered.roll(1, dims=-2), left)

    copies = text.last_tokens().expand(-1, most + 1)
    run = ForwardPass(target.full_plan, stop=num_layers, after_layer=after_layer)
    target.step(copies, text.last_slots(), run, TreeLayout.independent(most + 1))
    table = torch.stack([of_layer.to(skips[0].device) for of_layer in skips]).tolist()
    plans = []
    for count in range(1, most + 1):
        skipped: set[int] = set()
        for layer, is_skipped in zip(reversed(layers), reversed(table), strict=True):
            if is_skipped[count - len(skipped)] and len(skipped) < count:
                skipped.add(layer)
        plans.append(LayerPlan(num_layers, frozenset(skipped), frozenset(skipped)))
    return plans
