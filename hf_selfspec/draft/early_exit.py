"""Early exit: the first layers and the model's own head draft (LayerSkip §4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..model.anatomy import Anatomy
from ..model.partial import LayerPlan
from ..settings import MOST_LAYERS, check_count, check_exit
from ..types import Draft, GenerationStats, Text, Verdict


@dataclass(frozen=True)
class EarlyExit:
    """Drafts with layers ``0 .. layer-1`` and the model's own final norm and LM head.

    Lossless with any model; fast with one trained so that early layers predict.

    Args:
        layer: the exit layer ``E``, from 1 to ``L-1``, or ``None``: the fastest one, found by a probe on the first
            text that each model generates.
    """

    layer: int | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_count("EarlyExit(layer)", self.layer, most=MOST_LAYERS)

    def plan(self, anatomy: Anatomy) -> LayerPlan | None:
        """The blocks that run for this model, ``None`` where a probe has to find them.

        Raises:
            SettingError: the model has too few layers.
        """
        return None if self.layer is None else _plan("EarlyExit", self.layer, anatomy)


@dataclass(frozen=True)
class EarlyExitOnly:
    """Generates with layers ``0 .. layer-1`` alone: fast, and **not** what the whole model would say.

    The early-exit baseline of LayerSkip (Tables 1, 2 and 11).

    Args:
        layer: the exit layer ``E``, from 1 to ``L-1``.
    """

    layer: int
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("EarlyExitOnly(layer)", self.layer, most=MOST_LAYERS)

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for this model.

        Raises:
            SettingError: the model has too few layers.
        """
        return _plan("EarlyExitOnly", self.layer, anatomy)


class NoDraft:
    """Drafts nothing: each step is one token of what plays the whole model.

    Args:
        plan: what plays it.
    """

    steps = 0

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan

    def propose(self, text: Text, room: list[int]) -> Draft:
        """An empty draft."""
        return Draft(text.ids[:, :0], [0] * text.batch_size)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Nothing to learn."""

    def finish(self, text: Text) -> None:
        """Nothing to learn."""

    def report(self, stats: GenerationStats) -> None:
        """Says which blocks run."""
        stats.plan = self.plan.picture()


def _plan(name: str, layer: int, anatomy: Anatomy) -> LayerPlan:
    check_exit(name, "layer", layer, anatomy.num_layers, anatomy.model_name)
    return LayerPlan.early_exit(anatomy.num_layers, layer)
