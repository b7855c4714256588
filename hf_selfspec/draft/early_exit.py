"""Early exit: drafting with the first layers and the model's own head (LayerSkip §4.2)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..learned.saving import register
from ..model.anatomy import Anatomy
from ..model.plan import LayerPlan
from ..modules.reduced_head import ReducedHead
from ..search.choice import ExitChoice
from ..stats import GenerationStats
from ..stop.rules import FixedLength
from ..validation import MOST_LAYERS, check_count, check_exit
from .exit_source import ExitSource
from .partial import PartialDraft
from .probe import start_probe
from .source import DraftBlocks, Drafter, DraftSource, FindChoice, FixedDrafter, Session

# Tokens in a draft until a probe has chosen.
_FIRST = FixedLength(2)


@register("draft")
@dataclass(frozen=True, repr=False)
class EarlyExit(ExitSource):
    """Drafts with layers ``0 .. layer-1`` and the model's own final norm and LM head.

    Lossless with any model; fast with a model whose early layers were trained to predict tokens.

    Args:
        layer: the exit layer ``E``, from 1 to ``L-1``, or ``None`` for the fastest one, found by a probe on the first
            text that each model generates.
        head: a :class:`ReducedHead` with the tokens that can be drafted, or the folder or Hub repository that holds
            one, see ``fit_reduced_head``; ``None`` for all tokens. Drafts with one run without compiled graphs.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    layer: int | None = None
    head: ReducedHead | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_count("EarlyExit(layer)", self.layer, most=MOST_LAYERS)
        self._load_head()

    def plan(self, anatomy: Anatomy) -> LayerPlan | None:
        """The blocks that run for this model, ``None`` where a probe has to find them.

        Raises:
            SettingError: the model has too few layers.
        """
        return None if self.layer is None else _plan("EarlyExit", self.layer, anatomy)

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        self.plan(anatomy)

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        self.check_whole_head()
        if (plan := self.plan(anatomy)) is not None:
            return DraftBlocks(plan)
        return DraftBlocks.of_choice(repr(self), find_choice(ExitChoice), anatomy)

    def start(self, session: Session) -> Drafter:
        plan, head = self.plan(session.anatomy), self.head_rows(session.target.model)
        if plan is None or session.stop is None:
            return start_probe(session, self.layer, _FIRST, repr(self), head)
        return PartialDraft(session, plan, repr(self), head)


@register("draft")
@dataclass(frozen=True)
class EarlyExitOnly(DraftSource):
    """Generates with layers ``0 .. layer-1`` alone: fast, and **not** what the whole model would generate.

    The early-exit baseline of LayerSkip (Tables 1, 2 and 11).

    Args:
        layer: the exit layer ``E``, from 1 to ``L-1``.

    Raises:
        SettingError, SettingTypeError: ``layer`` is not allowed.
    """

    layer: int

    lossless = False

    def __post_init__(self) -> None:
        check_count("EarlyExitOnly(layer)", self.layer, most=MOST_LAYERS)

    @property
    def fixed_because(self) -> str:
        return f"{self!r} generates without drafts"

    def whole_model(self, anatomy: Anatomy) -> LayerPlan:
        return _plan("EarlyExitOnly", self.layer, anatomy)

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        return DraftBlocks(self.whole_model(anatomy))

    def start(self, session: Session) -> Drafter:
        return NoDraft(self.whole_model(session.anatomy))


class NoDraft(FixedDrafter):
    """Drafts nothing: each step generates one token with the blocks that stand in for the whole model."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan

    def report(self, stats: GenerationStats) -> None:
        """Adds which blocks run."""
        stats.plan = self.plan.picture()


def _plan(name: str, layer: int, anatomy: Anatomy) -> LayerPlan:
    check_exit(name, "layer", layer, anatomy.num_layers, anatomy.model_name)
    return LayerPlan.early_exit(anatomy.num_layers, layer)
