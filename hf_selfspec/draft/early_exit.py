"""Early exit: the first layers and the model's own head draft (LayerSkip §4.2)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from ..model.anatomy import Anatomy
from ..model.partial import LayerPlan
from ..settings import check_count


@dataclass(frozen=True)
class EarlyExit:
    """Drafts with layers ``0 .. layer-1`` and the model's own final norm and LM head.

    Lossless with any model; fast with one trained so that early layers predict.

    Args:
        layer: the exit layer ``E``, from 1 to ``L-1``.
    """

    layer: int

    def __post_init__(self) -> None:
        check_count("EarlyExit(layer)", self.layer)

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for this model.

        Raises:
            SettingError: the model has too few layers.
        """
        if self.layer >= anatomy.num_layers:
            raise SettingError(
                f"EarlyExit(layer={self.layer}) is not possible: {anatomy.model_name} has {anatomy.num_layers} layers, "
                f"so the exit layer must be between 1 and {anatomy.num_layers - 1}."
            )
        return LayerPlan.early_exit(anatomy.num_layers, self.layer)
