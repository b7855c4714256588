"""Early exit: drafting with the first layers and the model's head (LayerSkip §4.2), or some of its rows (FR-Spec)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import SettingError
from ...learned.knowledge import Findings
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.head import HeadRows
from ...model.plan import LayerPlan
from ...modules.draft_module import DraftModule
from ...modules.reduced_head import ReducedHead
from ...validation import StrPath, check_count, check_exit
from ..controller import LEAST_SPEEDUP, Arms, ArmStats
from ..source import Drafter, DraftSource, FittedSource, Session
from ..stop import FixedLength
from .partial import PlanDrafter

_M = TypeVar("_M", bound=DraftModule)

# The draft length where no rule is given, as in LayerSkip a fixed one. Of 1 to 6 tokens 3 were the fastest (1.24, demo
# model, exit 3, 24 prompts).
_USUAL_STOP = FixedLength(3)
# How many exits are compared where none is given.
_EXITS = 5


@dataclass(frozen=True)
class ExitChoice:
    """The exit layer that has been the fastest so far.

    Attributes:
        plan: the blocks that run in a draft.
        speedup: tokens per second over those of rounds without a draft.
        acceptance_rate: share of its drafted tokens that were accepted, α.
    """

    plan: LayerPlan
    speedup: float
    acceptance_rate: float

    @property
    def layer(self) -> int:
        """The exit layer ``E``."""
        return self.plan.first_altered


class MeasuredExits(Findings):
    """The exits that have drafted in calls of one kind, and the results of all sources in these calls."""

    def __init__(self) -> None:
        self.plans: dict[str, LayerPlan] = {}
        self.arms: Mapping[str, ArmStats] = {}

    @property
    def choice(self) -> ExitChoice | None:
        """The fastest exit, ``None`` where none has drafted yet or none pays."""
        arms = [(plan, self.arms[name]) for name, plan in list(self.plans.items()) if name in self.arms]
        measured = [ExitChoice(plan, arm.gained / arm.spent, arm.acceptance_rate) for plan, arm in arms if arm.spent]
        best = max(measured, key=lambda choice: choice.speedup, default=None)
        return None if best is None or best.speedup < LEAST_SPEEDUP else best


class FittedExit(FittedSource[_M]):
    """A source that drafts at an exit layer with a fitted module."""

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for this model."""
        raise NotImplementedError

    def check(self, anatomy: Anatomy) -> None:
        self.plan(anatomy)

    def exit_at(self, layer: int, anatomy: Anatomy) -> LayerPlan:
        """The blocks below the exit layer that the module was fitted to."""
        if not 0 < layer < anatomy.num_layers:
            raise SettingError(
                f"the {self.module.kind} is for exit layer {layer}, but {anatomy.model_name} has {anatomy.num_layers} "
                "layers. Use it with the model that it was fitted to."
            )
        return LayerPlan.early_exit(anatomy.num_layers, layer)


@register
@dataclass(frozen=True, repr=False)
class EarlyExit(FittedSource[ReducedHead]):
    """Drafts with layers ``0 .. layer-1`` and the model's own final norm and LM head.

    Lossless with any model; fast with a model whose early layers were trained to predict tokens.

    Args:
        layer: the exit layer ``E``, from 1 to ``L-1``, or ``None`` for the fastest of five, by rounds that are timed
            while each model generates.
        head: a :class:`ReducedHead` with the tokens that can be drafted, or the folder or Hub repository that holds
            one, see ``fit_reduced_head``; ``None`` for all tokens. Drafts with one run without graphs.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    layer: int | None = None
    head: ReducedHead | StrPath | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            check_count("EarlyExit(layer)", self.layer)
        if self.head is not None:
            self._load("head", ReducedHead)

    def __repr__(self) -> str:
        return f"EarlyExit(layer={self.layer}{'' if self.head is None else f', head={self.head!r}'})"

    def check(self, anatomy: Anatomy) -> None:
        self.plan(anatomy)

    def plan(self, anatomy: Anatomy) -> LayerPlan | None:
        """The blocks that run for this model, ``None`` where several exits are compared."""
        if self.layer is None:
            return None
        check_exit("EarlyExit", "layer", self.layer, anatomy.num_layers, anatomy.model_name)
        return LayerPlan.early_exit(anatomy.num_layers, self.layer)

    def arms(self, anatomy: Anatomy) -> Sequence[DraftSource]:
        if self.layer is not None:
            return (self,)
        count = anatomy.num_layers
        if count < 2:
            raise SettingError(
                f"{anatomy.model_name} has one layer, so there is no earlier exit. Call generate without `assistant`."
            )
        depths = {round(count * place / (_EXITS + 1)) for place in range(1, _EXITS + 1)}
        return [self._at(layer) for layer in sorted(depths) if 0 < layer < count]

    def _at(self, layer: int) -> EarlyExit:
        exit_at = copy.copy(self)  # with the head that was loaded
        object.__setattr__(exit_at, "layer", layer)
        return exit_at

    def start(self, session: Session) -> Drafter:
        plan = self.plan(session.anatomy)
        assert plan is not None  # that of an arm
        head = None if self.head is None else HeadRows(session.target.model, self.module.tokens)
        draft = PlanDrafter(session.with_usual_stop(_USUAL_STOP), plan, head)
        if session.name:
            exits: MeasuredExits = session.knowledge.of("exits", lambda _: MeasuredExits())
            exits.plans[session.name] = plan
            exits.arms = session.knowledge.of("rounds", lambda _: Arms(ArmStats))
            # If all of its tokens were right: a deep exit is not tried where a shallow one brings more than that.
            length, share = draft.session.longest, plan.first_altered / plan.num_layers
            draft.expected_speedup = (length + 1) / (1 + length * share)
        return draft
