"""Drafting with any subset of attention and MLP blocks skipped (Self-SD; SWIFT §3.1)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...errors import SettingError, SettingTypeError, UnsupportedModelError, warn_once
from ...learned.saving import register
from ...model.anatomy import Anatomy
from ...model.plan import LayerPlan, check_plan
from ...search.skip_search import SkipChoice
from ...search.skip_space import OnTheFlySearch
from ...validation import MOST_LAYERS, check_count, check_share
from ..source import Drafter, DraftSource, FindChoice, Session, chosen_plan
from .partial import PlanDrafter
from .searching import USUAL_STOP, SearchingDraft


@register("draft")
@dataclass(frozen=True)
class SkipLayers(DraftSource):
    """Drafts with some attention and MLP blocks left out.

    Args:
        attention: layers whose attention block is skipped.
        mlp: layers whose MLP block is skipped.
        search: looks for a better set while text is generated, starting from this one; ``None`` keeps this one.
        ratio: share of the blocks of all layers but the first and the last that the sets of the search skip;
            ``"auto"`` for SWIFT's: 0.4, 0.45 from 10 and 0.5 from 30 billion parameters on.

    If no blocks are given, both blocks of every second layer from 1 to ``L-2`` are skipped. The first and the last
    layer cannot be skipped (SWIFT always keeps them).

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    attention: tuple[int, ...] | None = None
    mlp: tuple[int, ...] | None = None
    search: OnTheFlySearch | None = None
    ratio: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.search is not None and not isinstance(self.search, OnTheFlySearch):
            raise SettingTypeError(f"SkipLayers(search) must be OnTheFlySearch() or None, got {self.search!r}.")
        if self.ratio != "auto":
            check_share("SkipLayers(ratio)", self.ratio, zero=False, one=False)
            if self.search is None:
                raise SettingError(
                    f"SkipLayers(ratio={self.ratio}) is the size of the sets that a search proposes: set "
                    "search=OnTheFlySearch() too, or name the blocks."
                )
        for name in ("attention", "mlp"):
            if (value := getattr(self, name)) is None:
                continue
            indices = tuple(value) if isinstance(value, Iterable) else (value,)
            if any(type(index) is not int for index in indices) or not isinstance(value, Iterable):
                raise SettingTypeError(f"SkipLayers({name}) must be a list of layer numbers, got {value!r}.")
            if min(indices, default=1) < 1:
                raise SettingError(
                    f"SkipLayers({name}={list(indices)}): layer numbers start at 0, and layer 0 is never skipped."
                )
            check_count(f"SkipLayers({name}): a layer", max(indices, default=1), most=MOST_LAYERS)
            object.__setattr__(self, name, tuple(sorted(set(indices))))

    def plan(self, anatomy: Anatomy) -> LayerPlan:
        """The blocks that run for this model.

        Raises:
            SettingError: a block does not exist or is in the last layer, or nothing would be skipped.
            UnsupportedModelError: a block was not found in the model.
        """
        count = anatomy.num_layers
        if self.attention is None and self.mlp is None:
            mlp = tuple(range(1, count - 1, 2))
            attention = tuple(index for index in mlp if index not in anatomy.kv_sources)
        else:
            attention, mlp = self.attention or (), self.mlp or ()
        for name, indices in (("attention", attention), ("mlp", mlp)):
            wrong = [index for index in indices if index > count - 2]
            if wrong:
                raise SettingError(
                    f"SkipLayers({name}) names layer {wrong[0]}, but {anatomy.model_name} has {count} layers, of "
                    f"which 1 to {count - 2} can be skipped (the first and the last are always kept)."
                )
        needed = sorted(anatomy.kv_sources.intersection(attention))
        if needed:
            raise SettingError(
                f"SkipLayers(attention) names layer {needed[0]}, whose keys and values later layers of "
                f"{anatomy.model_name} read. Leave its attention out of the set; its MLP can be skipped."
            )
        if not attention and not mlp:
            raise SettingError(
                f"SkipLayers() skips nothing in {anatomy.model_name} with its {count} layers, so the draft would be "
                "the whole model. Name at least one block, or use a model of at least 3 layers."
            )
        plan = LayerPlan(count, frozenset(attention), frozenset(mlp))
        check_plan(plan, anatomy)
        return plan

    @property
    def is_optional(self) -> bool:
        return self.search is not None

    def check(self, anatomy: Anatomy, max_new: int | None) -> None:
        self.plan(anatomy)
        if self.search is None:
            return
        window = self.search.context_window
        name = f"OnTheFlySearch(context_window={window})"
        if anatomy.max_positions is not None and window >= anatomy.max_positions:
            raise SettingError(
                f"{name} is longer than any text of {anatomy.model_name}, which has {anatomy.max_positions} positions. "
                "Give a shorter window; 32 is usual."
            )
        if max_new is not None and max_new <= window:
            warn_once(
                f"{name} is longer than texts of {max_new} new tokens: no set of blocks is tried on them. Generate "
                "more, or give a shorter window.",
                ignore_numbers=True,
            )

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> LayerPlan:
        if self.search is None:
            return self.plan(anatomy)
        return chosen_plan(self, find_choice(SkipChoice), anatomy)

    def start(self, session: Session) -> Drafter:
        plan = self.plan(session.anatomy)
        if self.search is not None and session.takes_trees:
            return SearchingDraft(session, plan, self.search, self.ratio)
        if self.search is not None:
            model_name = session.anatomy.model_name
            why = f"{model_name} cannot run over its text a second time (it cannot take a tree mask)"
            if session.in_cascade:
                raise UnsupportedModelError(f"{why}, so there is no search for blocks to skip.")
            warn_once(f"{why}, so there is no search for blocks to skip, and its initial set drafts.")
        return PlanDrafter(session.with_usual_stop(USUAL_STOP), plan)
