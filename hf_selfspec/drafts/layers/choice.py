"""Which exit drafts best, by the rounds that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...learned.findings import Findings
from ...model.plan import LayerPlan
from ..controller import LEAST_SPEEDUP, ArmStats


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
