"""What has been chosen to draft: an exit, by the rounds that were measured, or the set of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..drafts.controller import LEAST_SPEEDUP, ArmStats
from ..learned.files import as_number
from ..learned.findings import Findings
from ..model.plan import LayerPlan


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


@dataclass(frozen=True)
class SkipChoice:
    """The set of skipped blocks that a search has chosen so far.

    Attributes:
        plan: the blocks that run in a draft.
        matchness: share of the last tokens that the set predicted when it was tried, 0 before that.
    """

    plan: LayerPlan
    matchness: float

    def state(self) -> dict[str, Any]:
        return {"set": self.plan.picture(), "matchness": self.matchness}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> SkipChoice:
        """The inverse of :meth:`state`; raises KeyError, TypeError or ValueError for anything else."""
        return cls(LayerPlan.of_picture(state["set"]), as_number(state["matchness"]))
