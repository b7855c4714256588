"""The ways of generating that are compared; one more line adds another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...draft.early_exit import EarlyExit
from ...selfspec import SelfSpec
from ...stop.rules import FixedLength

# The number of tokens in a draft.
NUM_DRAFT = 4


@dataclass(frozen=True)
class Way:
    """One way of generating.

    Attributes:
        options: returns the arguments of ``generate`` for an exit layer.
        is_compiled: whether it runs as a graph on devices for which transformers compiles (not on a CPU).
    """

    options: Callable[[int], dict[str, Any]]
    is_compiled: bool = False


def _ours(exit_layer: int) -> SelfSpec:
    return SelfSpec(EarlyExit(exit_layer), FixedLength(NUM_DRAFT))


WAYS = {
    "plain": Way(lambda exit_layer: {}),
    "plain, static and compiled": Way(lambda exit_layer: {"cache_implementation": "static"}, is_compiled=True),
    "ours": Way(lambda exit_layer: {"assistant": _ours(exit_layer)}),
    "ours, compiled": Way(
        lambda exit_layer: {"assistant": _ours(exit_layer), "cache_implementation": "static"}, is_compiled=True
    ),
}


@dataclass(frozen=True)
class Graphs:
    """What torch compiled during a run.

    Attributes:
        compiled: number of graphs that were compiled.
        skips: how often CUDA graphs were skipped.
    """

    compiled: int
    skips: int


def graphs_of(run: Callable[[], object]) -> Graphs:
    """Calls ``run`` and counts its graphs."""
    from torch._dynamo.utils import counters

    counters.clear()
    run()
    return Graphs(counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"])
