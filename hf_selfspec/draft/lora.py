"""Drafting with a shallow exit whose layers have low-rank deltas in drafts alone."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import SettingError, UnsupportedOptionError
from ..learned.saving import register
from ..model.anatomy import Anatomy
from ..model.plan import LayerPlan
from ..modules.lora import DraftLora
from ..modules.reduced_head import ReducedHead
from ..stop.rules import ConfidenceThreshold
from .exit_source import ExitSource, load_module
from .partial import PartialDraft
from .source import DraftBlocks, Drafter, FindChoice, Session


@register("draft")
@dataclass(frozen=True, repr=False)
class EarlyExitLora(ExitSource):
    """Drafts with layers ``0 .. E-1`` with LoRA that is off in verification, and the model's own norm and head.

    The model's output is that without LoRA. Drafts run without compiled graphs.

    Args:
        lora: the LoRA, or the folder or Hub repository that holds it, see ``fit_draft_lora``.
        head: a reduced head with the tokens that can be drafted, see :class:`EarlyExit`.

    Raises:
        SettingError, SettingTypeError: there is no such LoRA or head.
    """

    lora: DraftLora | str | os.PathLike[str]
    head: ReducedHead | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_module", load_module(self, "lora", DraftLora))
        self._load_head()

    @property
    def module(self) -> DraftLora:
        """The LoRA itself."""
        found: DraftLora = self.__dict__["_module"]
        return found

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        layer = self.module.exit_layer
        if layer >= anatomy.num_layers:
            raise SettingError(
                f"the draft LoRA is for exit layer {layer}, but {anatomy.model_name} has {anatomy.num_layers} layers. "
                "Use it with the model that it was fitted to."
            )

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        raise UnsupportedOptionError(
            f"{self!r} cannot be exported: it drafts after keys and values that the layers without LoRA have written, "
            "while an engine would run one kind of layers for all tokens. Export EarlyExit(layer), SkipLayers(...) or "
            "an adapter."
        )

    def start(self, session: Session) -> Drafter:
        anatomy, target = session.anatomy, session.target
        self.check(anatomy, session.max_new)
        self.module.check(session.knowledge.fingerprint)
        deltas = self.module.deltas(anatomy)
        plan = LayerPlan.early_exit(anatomy.num_layers, self.module.exit_layer, deltas)
        head = self.head_rows(target.model)
        draft = PartialDraft(session.limits(ConfidenceThreshold()), plan, repr(self), head)
        target.deltas.append(deltas)
        return draft
