"""Early exit: drafting with the first layers and the model's head (LayerSkip §4.2), or some of its rows (FR-Spec)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from ...errors import SettingError, UnsupportedModelError
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.head import HeadRows
from ...model.plan import LayerPlan
from ...modules.draft_module import DraftModule, module_of
from ...modules.reduced_head import ReducedHead
from ...validation import MOST_LAYERS, StrPath, check_count, check_exit
from ..controlled import among
from ..controller import Measurements
from ..source import DraftBlocks, Drafter, DraftSource, FindChoice, Session
from ..stop.rules import FixedLength
from .choice import ExitChoice, MeasuredExits
from .partial import PlanDrafter

_M = TypeVar("_M", bound=DraftModule)

# The draft length where no rule is given, as in LayerSkip a fixed one. Of 1 to 6 tokens 3 were the fastest (1.24, demo
# model, exit 3, 24 prompts).
_USUAL_STOP = FixedLength(3)
# How many exits are compared where none is given.
_EXITS = 5


class ExitSource(DraftSource, Generic[_M]):
    """A source that drafts at an exit layer, perhaps with a fitted ``module``, or some rows of the head."""

    module: _M
    head: ReducedHead | StrPath | None = None

    def _load(self, setting: str, module_class: type[DraftModule]) -> Any:
        """Loads the module that a setting holds or names, and makes a relative path a whole one."""
        whole, module = module_of(f"{type(self).__name__}({setting})", getattr(self, setting), module_class)
        object.__setattr__(self, setting, whole)
        return module

    def _load_head(self) -> None:
        if self.head is not None:
            object.__setattr__(self, "_reduced", self._load("head", ReducedHead))

    def __repr__(self) -> str:
        settings: Any = fields(self)  # type: ignore[arg-type]  # of a dataclass that derives from it
        shown = [(setting.name, getattr(self, setting.name)) for setting in settings]
        values = ", ".join(f"{name}={value!r}" for name, value in shown if name != "head" or value is not None)
        return f"{type(self).__name__}({values})"

    def head_rows(self, model: PreTrainedModel) -> HeadRows | None:
        """Returns what runs in place of a model's head in one generation, ``None`` for the whole head."""
        return None if self.head is None else HeadRows(model, self.__dict__["_reduced"].tokens)

    def plan(self, anatomy: Anatomy) -> LayerPlan | None:
        """The blocks that run for this model, ``None`` where several exits are compared."""
        raise NotImplementedError

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        self.plan(anatomy)

    def exit_at(self, layer: int, anatomy: Anatomy) -> LayerPlan:
        """The blocks below the exit layer that the module was fitted to."""
        if layer >= anatomy.num_layers:
            raise SettingError(
                f"the {self.module.kind} is for exit layer {layer}, but {anatomy.model_name} has {anatomy.num_layers} "
                "layers. Use it with the model that it was fitted to."
            )
        return LayerPlan.early_exit(anatomy.num_layers, layer)


@register("draft")
@dataclass(frozen=True, repr=False)
class EarlyExit(ExitSource[DraftModule]):
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
            check_count("EarlyExit(layer)", self.layer, most=MOST_LAYERS)
        self._load_head()

    def plan(self, anatomy: Anatomy) -> LayerPlan | None:
        return None if self.layer is None else _plan("EarlyExit", self.layer, anatomy)

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        if self.head is not None:
            raise SettingError(
                f"{self!r} drafts with some rows of the head, but a checkpoint has all of them. Export the same draft "
                "without `head`; engines that reduce the head themselves take a list of tokens (SGLang: "
                "--speculative-token-map)."
            )
        if (plan := self.plan(anatomy)) is not None:
            return DraftBlocks(plan)
        return DraftBlocks.of_choice(repr(self), find_choice(ExitChoice), anatomy)

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
        if plan is None:
            return self._compared(session)
        draft = PlanDrafter(session.with_usual_stop(_USUAL_STOP), plan, self.head_rows(session.target.model))
        if session.in_cascade:
            exits: MeasuredExits = session.knowledge.of("exits", lambda _: MeasuredExits())
            exits.plans[session.name] = plan
            exits.arms = session.knowledge.in_process("rounds", Measurements).arms
            # If all of its tokens were right: a deep exit is not tried where a shallow one brings more than that.
            length, share = draft.session.longest, plan.first_altered / plan.num_layers
            draft.expected_speedup = (length + 1) / (1 + length * share)
        return draft

    def _compared(self, session: Session) -> Drafter:
        """Drafts with the fastest exit, without free drafts."""
        if session.is_tensor_parallel:
            raise UnsupportedModelError(
                "exits are compared by timings, which differ between the processes of a tensor-parallel model. Name "
                "the exit layer."
            )
        return among(self.arms(session.anatomy), session)


def _plan(name: str, layer: int, anatomy: Anatomy) -> LayerPlan:
    check_exit(name, "layer", layer, anatomy.num_layers, anatomy.model_name)
    return LayerPlan.early_exit(anatomy.num_layers, layer)
