"""A search for blocks to skip, as it is saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..files import as_count, as_number
from ..model.partial import LayerPlan
from .choice import Choice, SkipChoice
from .costs import ForwardCosts
from .trials import Trial

# The phases of SWIFT (Figure 4), by whether the search is over.
PHASES = {False: "optimization", True: "acceleration"}


@dataclass(frozen=True)
class SearchState:
    """What of a search lasts.

    Attributes:
        is_over: whether its best set is final.
        generated: tokens generated with it.
        costs: measured forwards.
        choice: what drafts.
        trials: those of the sets that compete.
    """

    is_over: bool
    generated: int
    costs: ForwardCosts | None
    choice: SkipChoice
    trials: list[Trial]

    def to_json(self) -> dict[str, Any]:
        """The state, as JSON has it."""
        return {
            "phase": PHASES[self.is_over],
            "generated": self.generated,
            "costs": None if self.costs is None else asdict(self.costs),
            "set": self.choice.plan.picture(),
            "drafts": self.choice.drafts,
            **self.choice.state(),
            "matchness": self.choice.matchness,
            "tries": [trial.state() for trial in self.trials],
        }

    @classmethod
    def of_json(cls, state: dict[str, Any], num_layers: int) -> SearchState:
        """The reverse of :meth:`to_json`, for a model of ``num_layers`` layers; trials are in order.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        trials = sorted((Trial.of(one) for one in state["tries"]), key=lambda trial: trial.generated)
        plan, phase, drafts = LayerPlan.of_picture(state["set"]), state["phase"], state["drafts"]
        if any(one.num_layers != num_layers for one in (plan, *(trial.plan for trial in trials))):
            raise ValueError(f"a set for another depth than {num_layers} layers")
        if phase not in PHASES.values() or not isinstance(drafts, bool):
            raise ValueError(f"{phase!r} is no phase, or {drafts!r} neither yes nor no")
        return cls(
            is_over=phase == PHASES[True],
            generated=as_count(state["generated"]),
            costs=None if state["costs"] is None else _costs_of(state["costs"], num_layers),
            choice=SkipChoice(plan, drafts, **Choice.settings_of(state), matchness=as_number(state["matchness"])),
            trials=trials,
        )


def _costs_of(state: dict[str, Any], num_layers: int) -> ForwardCosts:
    if as_count(state["num_layers"]) != num_layers:
        raise ValueError(f"costs of {state['num_layers']} layers")
    found = {name: as_number(value) for name, value in state.items() if name != "num_layers"}
    costs = ForwardCosts(**found, num_layers=num_layers)
    if not costs.plain():
        raise ValueError("forwards that take no time")
    return costs
