"""Which of a model's blocks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..errors import UnsupportedModelError
from .anatomy import Anatomy
from .forks import cached_property

# Maps a module's own forward and its input to what the module returns instead.
Substitute = Callable[[Callable[..., Any], torch.Tensor], Any]


@dataclass(frozen=True, eq=False)
class Substitutes:
    """What runs in place of the forwards of some modules, where the plan has it."""

    of: Mapping[nn.Module, Substitute]


@dataclass(frozen=True)
class LayerPlan:
    """Which of a model's blocks run; a layer in both sets is skipped as a whole."""

    num_layers: int
    skipped_attention: frozenset[int] = frozenset()
    skipped_mlp: frozenset[int] = frozenset()
    substitutes: Substitutes | None = None

    @classmethod
    def early_exit(cls, num_layers: int, layer: int) -> LayerPlan:
        """The plan that runs layers ``0 .. layer-1``."""
        skipped = frozenset(range(layer, num_layers))
        return cls(num_layers, skipped, skipped)

    @classmethod
    def of_picture(cls, picture: str) -> LayerPlan:
        attention = frozenset(index for index, mark in enumerate(picture) if mark in "m.")
        return cls(len(picture), attention, frozenset(index for index, mark in enumerate(picture) if mark in "a."))

    @cached_property
    def skipped_layers(self) -> frozenset[int]:
        return self.skipped_attention & self.skipped_mlp

    @property
    def first_altered(self) -> int:
        """The first layer that does not run in full (``L`` for the whole model); all before it is the exact prefix."""
        skipped = self.skipped_attention | self.skipped_mlp
        return min(skipped, default=self.num_layers) if self.substitutes is None else 0

    def picture(self) -> str:
        """One character per layer: ``#`` runs, ``a`` attention only, ``m`` MLP only, ``.`` nothing."""
        marks = {(False, False): "#", (False, True): "a", (True, False): "m", (True, True): "."}
        return "".join(
            marks[index in self.skipped_attention, index in self.skipped_mlp] for index in range(self.num_layers)
        )


def check_plan(plan: LayerPlan, anatomy: Anatomy) -> None:
    """Checks that the model has every block that ``plan`` skips on its own."""
    for name, skipped, blocks in (
        ("attention", plan.skipped_attention - plan.skipped_mlp, anatomy.attention),
        ("mlp", plan.skipped_mlp - plan.skipped_attention, anatomy.mlp),
    ):
        missing = sorted(index for index in skipped if not blocks[index])
        if missing:
            raise UnsupportedModelError(
                f"the {name} block of layer {missing[0]} was not found in {anatomy.model_name}, so it cannot be "
                "skipped on its own. Name it with register_architecture(model_type, "
                f"Architecture({name}=...)), or skip the layer as a whole."
            )
