"""The blocks of a model that draft on their own, for export as a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import SettingError
from ..model.anatomy import Anatomy
from ..model.plan import LayerPlan
from ..modules.adapter import Adapter
from ..search.choice import Choice

_C = TypeVar("_C", bound=Choice)


@dataclass(frozen=True)
class DraftBlocks:
    """A draft that needs nothing but some of the model's blocks.

    Attributes:
        plan: the blocks that run.
        adapter: what follows the last block in place of the final norm, ``None`` for nothing.
    """

    plan: LayerPlan
    adapter: Adapter | None = None


class FindChoice(Protocol):
    """Returns what a probe or a search has chosen for a model."""

    def __call__(self, kind: type[_C]) -> _C | None:
        """The choice of that kind, ``None`` where there is none yet."""


def chosen_plan(name: str, choice: Choice | None, anatomy: Anatomy) -> LayerPlan:
    """Returns the plan of a choice that drafts.

    Args:
        name: name of the source, for messages.
        choice: what was found.
        anatomy: the parts of the model.

    Raises:
        SettingError: nothing was found yet, or nothing that pays.
    """
    advice = "name the part yourself: EarlyExit(layer) or SkipLayers(attention=[...], mlp=[...])"
    if choice is None:
        raise SettingError(
            f"{name} has chosen no part of {anatomy.model_name} yet, so there is nothing to export. Generate with this "
            f"SelfSpec first, use what hf_selfspec.tune returns, or {advice}."
        )
    if not choice.drafts:
        raise SettingError(
            f"{name} has found no part of {anatomy.model_name} whose drafts pay on this machine. Generate more with "
            f"this SelfSpec, or {advice}."
        )
    return choice.plan
