"""Which blocks of a model may be skipped, and sets of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import SettingError
from ..model.anatomy import Anatomy
from ..model.partial import LayerPlan, check_plan

_BLOCKS = ("attention", "mlp")


@dataclass(frozen=True)
class SkipSpace:
    """The attention and MLP blocks among which a search chooses.

    The first and the last layer always run (SWIFT §4.1), and so does attention whose keys other layers read.

    Attributes:
        num_layers: ``L``.
        blocks: ``(layer, "attention" or "mlp")`` of each block that may be skipped, by layer.
    """

    num_layers: int
    blocks: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, anatomy: Anatomy) -> SkipSpace:
        """The blocks of a model.

        Raises:
            SettingError: the model has fewer than 4 layers.
            UnsupportedModelError: a block was not found in the model.
        """
        if anatomy.num_layers < 4:
            raise SettingError(
                f"a search for blocks to skip needs a model of at least 4 layers, {anatomy.model_name} has "
                f"{anatomy.num_layers}. Use SkipLayers() without a search."
            )
        inner = range(1, anatomy.num_layers - 1)
        blocks = tuple(
            (layer, name) for layer in inner for name in _BLOCKS if name == "mlp" or layer not in anatomy.kv_sources
        )
        space = cls(anatomy.num_layers, blocks)
        for index in range(len(blocks)):
            check_plan(space.plan([index]), anatomy)
        return space

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Layers both blocks of which may be skipped."""
        attention, mlp = ({layer for layer, block in self.blocks if block == name} for name in _BLOCKS)
        return tuple(sorted(attention & mlp))

    def timed_plans(self) -> tuple[LayerPlan, LayerPlan]:
        """Plans from whose times the costs of blocks follow: without every second layer, and without MLP blocks."""
        some = frozenset(self.whole_layers[::2])
        mlp = frozenset(layer for layer, block in self.blocks if block == "mlp")
        return LayerPlan(self.num_layers, some, some), LayerPlan(self.num_layers, frozenset(), mlp)

    def count(self, ratio: float) -> int:
        """How many blocks a skip ratio stands for, at least one."""
        return max(1, round(ratio * len(self.blocks)))

    def plan(self, chosen: Iterable[int]) -> LayerPlan:
        """The plan that skips the blocks at these places of :attr:`blocks`."""
        skipped: dict[str, set[int]] = {name: set() for name in _BLOCKS}
        for place in chosen:
            layer, name = self.blocks[place]
            skipped[name].add(layer)
        return LayerPlan(self.num_layers, frozenset(skipped["attention"]), frozenset(skipped["mlp"]))

    def places(self, plan: LayerPlan) -> frozenset[int]:
        """Places of the blocks that ``plan`` skips."""
        skipped = {"attention": plan.skipped_attention, "mlp": plan.skipped_mlp}
        return frozenset(place for place, (layer, name) in enumerate(self.blocks) if layer in skipped[name])

    def row(self, plan: LayerPlan) -> np.ndarray:
        """``[blocks]`` 1 for those that ``plan`` skips."""
        row = np.zeros(len(self.blocks))
        row[list(self.places(plan))] = 1.0
        return row

    def highest(self, values: np.ndarray, ratio: float) -> LayerPlan:
        """The plan that skips the blocks with the highest of ``values`` ``[blocks]``."""
        order = np.argsort(-values, kind="stable")
        return self.plan(order[: self.count(ratio)].tolist())

    def random(self, rng: np.random.Generator, ratio: float) -> LayerPlan:
        """A set drawn uniformly among those of this ratio."""
        return self.highest(rng.random(len(self.blocks)), ratio)
