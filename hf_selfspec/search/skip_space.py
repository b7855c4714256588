"""The blocks of a model that may be skipped, and sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import SettingError
from ..model.anatomy import Anatomy
from ..model.plan import LayerPlan, check_plan

_BLOCKS = ("attention", "mlp")
# A layer that is skipped as a whole or not at all.
_LAYER = "layer"


@dataclass(frozen=True)
class SkipSpace:
    """The attention and MLP blocks among which a search chooses.

    The first and the last layer always run (SWIFT §4.1), and so does attention whose keys other layers read.
    """

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
        """The layers that may be skipped as a whole."""
        attention, mlp, both = ({layer for layer, block in self.blocks if block == name} for name in (*_BLOCKS, _LAYER))
        return tuple(sorted(attention & mlp | both))

    def timed_plans(self) -> tuple[LayerPlan, LayerPlan | None]:
        """The plans whose times give the costs of blocks: without every second layer, and without MLP blocks if any."""
        some = frozenset(self.whole_layers[::2])
        mlp = frozenset(layer for layer, block in self.blocks if block == "mlp")
        without = LayerPlan(self.num_layers, frozenset(), mlp) if mlp else None
        return LayerPlan(self.num_layers, some, some), without

    def count(self, ratio: float) -> int:
        """Number of blocks that a skip ratio corresponds to, at least one."""
        return max(1, round(ratio * len(self.blocks)))

    def plan(self, chosen: Iterable[int]) -> LayerPlan:
        """The plan that skips the blocks at these indices of :attr:`blocks`."""
        skipped: dict[str, set[int]] = {name: set() for name in _BLOCKS}
        for place in chosen:
            layer, name = self.blocks[place]
            for block in _BLOCKS if name == _LAYER else (name,):
                skipped[block].add(layer)
        return LayerPlan(self.num_layers, frozenset(skipped["attention"]), frozenset(skipped["mlp"]))

    def places(self, plan: LayerPlan) -> frozenset[int]:
        """Indices of the blocks that ``plan`` skips."""
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
        """A set drawn uniformly from those of this ratio."""
        return self.highest(rng.random(len(self.blocks)), ratio)


def _blocks(anatomy: Anatomy, layer: int) -> tuple[str, ...]:
    """The blocks of a layer that may be skipped."""
    if anatomy.is_recurrent and not (anatomy.attention[layer] and anatomy.mlp[layer]):
        return (_LAYER,)
    return _BLOCKS if layer not in anatomy.kv_sources else ("mlp",)
