"""What a search or a probe has chosen: the blocks that draft, the stop rule, and the expected speed-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..drafts.controller import LEAST_SPEEDUP
from ..drafts.stop.rules import StopRule
from ..learned.files import as_count, as_number
from ..learned.saving import decode, encode
from ..model.plan import LayerPlan
from .forward_costs import ForwardCosts
from .replay import Rule, Trace, replays


@dataclass(frozen=True)
class Choice:
    """Part of a model that was chosen to draft.

    Attributes:
        plan: the blocks that run in a draft.
        drafts: whether it drafts at all; it does not if no draft would be faster than none.
        stop: the stop rule of its drafts, ``None`` as long as none was chosen.
        expected_speedup: expected speed-up over one-token steps, ``None`` where matchness decides.
        acceptance_rate: expected acceptance rate α of its drafts.
    """

    plan: LayerPlan
    drafts: bool
    stop: StopRule | None
    expected_speedup: float | None
    acceptance_rate: float

    def state(self) -> dict[str, Any]:
        return {
            "stop": encode(self.stop, "stop"),
            "expected_speedup": self.expected_speedup,
            "acceptance_rate": self.acceptance_rate,
        }


def _settings_of(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :meth:`Choice.state`: arguments of a choice."""
    stop, speedup = decode(state["stop"], "stop"), state["expected_speedup"]
    if not isinstance(stop, Rule | None):
        raise ValueError(f"{stop!r} is not a rule that a search compares")
    return {
        "stop": stop,
        "expected_speedup": None if speedup is None else as_number(speedup),
        "acceptance_rate": as_number(state["acceptance_rate"]),
    }


@dataclass(frozen=True)
class ExitChoice(Choice):
    """The exit layer that a probe has chosen.

    Attributes:
        by_layer: for each exit layer that was tried its best expected speed-up.
        reuse_from: the number of drafted tokens from which KVQ reuse pays.
        tokens: number of tokens of text on which the choice is based.
    """

    stop: StopRule
    expected_speedup: float
    by_layer: dict[int, float]
    reuse_from: int
    tokens: int

    @property
    def layer(self) -> int | None:
        """The exit layer ``E``, ``None`` if no draft would have been faster than none."""
        return self.plan.first_altered if self.drafts else None

    def state(self) -> dict[str, Any]:
        by_layer = list(self.by_layer.items())
        of_exits = {"layer": self.layer, "by_layer": by_layer, "reuse_from": self.reuse_from, "tokens": self.tokens}
        return of_exits | super().state()

    @classmethod
    def of_state(cls, state: dict[str, Any], num_layers: int) -> ExitChoice:
        """The inverse of :meth:`state`; raises KeyError, TypeError or ValueError for anything else."""
        layer, settings = state["layer"], _settings_of(state)
        by_layer = {as_count(exit_layer): as_number(speed) for exit_layer, speed in state["by_layer"]}
        if not (by_layer and all(0 < exit_layer < num_layers for exit_layer in by_layer)):
            raise ValueError(f"exit layers {sorted(by_layer)} of {num_layers} layers")
        if None in (settings["stop"], settings["expected_speedup"]) or not (layer is None or layer in by_layer):
            raise ValueError(f"exit layer {layer!r} with {settings}")
        plan = LayerPlan(num_layers) if layer is None else LayerPlan.early_exit(num_layers, as_count(layer))
        reuse_from, tokens = as_count(state["reuse_from"]), as_count(state["tokens"])
        return cls(plan, layer is not None, **settings, by_layer=by_layer, reuse_from=reuse_from, tokens=tokens)

    def __str__(self) -> str:
        what = "no draft" if self.layer is None else f"exit layer {self.layer}, {self.stop}"
        head = (
            f"{what}: expected speed-up {self.expected_speedup:.2f}, acceptance rate {self.acceptance_rate:.2f} "
            f"({self.tokens} tokens)"
        )
        rows = [f"{layer:>4} {speedup:>8.2f}" for layer, speedup in sorted(self.by_layer.items())]
        return "\n".join([head, "exit  speed-up", *rows])


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


def choice_of_state(state: dict[str, Any], num_layers: int) -> ExitChoice | SkipChoice | None:
    """Returns the choice in the state of a probe or a search, ``None`` for the state of something else."""
    if "by_layer" in state:
        return ExitChoice.of_state(state, num_layers)
    return SkipChoice.of_state(state) if "set" in state else None


def pays(speedup: float) -> bool:
    """Whether a draft is expected to be faster than none by more than the error of the estimate."""
    return speedup >= LEAST_SPEEDUP


def replayed(
    plan: LayerPlan, rules: Sequence[Rule], traces: Iterable[Trace], costs: ForwardCosts, max_draft: int
) -> Choice:
    """The choice of a plan with the one of ``rules`` that is the fastest along texts, which ``traces`` show."""
    runs = replays(traces, rules, plan, costs, max_draft)
    index = runs.fastest
    speedup = costs.plain() / float(runs.seconds_per_token[index])
    return Choice(plan, pays(speedup), rules[index], speedup, float(runs.acceptance_rate[index]))
