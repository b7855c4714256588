"""Drafting with the model itself in four bits (ML-SpecQD, arXiv:2503.13565; QuantSpec, arXiv:2502.10424)."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UnsupportedModelError
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.kernels.packing import packed, to_pack, why_not
from ...model.plan import LayerPlan
from ..source import Drafter, DraftSource, Session
from ..stop import ProductThreshold
from .partial import PlanDrafter


@register
@dataclass(frozen=True)
class Quantized(DraftSource):
    """Drafts with the model's own layers and head, whose weights are multiplied in four bits while they draft.

    Nothing is trained, and the model's own weights stay as they are. Packed copies are made at the first call of
    a process, once for each model. Threads and all ``SelfSpec`` objects share them, they are freed with the model, and
    they are made again when the model's weights have changed. They take a third of a 16-bit model's memory.

    Models are in bfloat16, on a CPU or on a GPU from compute capability 8.0 on. Linear layers that no kernel takes stay
    as they are: rows have to be multiples of 16, columns of 32.
    """

    def check(self, anatomy: Anatomy) -> None:
        if why := why_not(anatomy):
            raise UnsupportedModelError(f"{anatomy.model_name} cannot draft in four bits: {why}")

    def start(self, session: Session) -> Drafter:
        substitutes = packed(session.target.model, to_pack(session.anatomy, session.target.model))
        session.target.substitutes.append(substitutes)
        plan = LayerPlan(session.anatomy.num_layers, substitutes=substitutes)
        return PlanDrafter(session.with_usual_stop(ProductThreshold()), plan)
