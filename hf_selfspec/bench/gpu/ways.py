"""The ways of generating that are compared; a further one is one more line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...draft.early_exit import EarlyExit
from ...selfspec import SelfSpec
from ...stop.rules import FixedLength

# Tokens of a draft.
NUM_DRAFT = 4


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        options: what ``generate`` is given, for an exit layer.
        is_compiled: whether it runs as a graph where transformers compiles, which a CPU is not.
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
    """What torch compiled while something ran.

    Attributes:
        compiled: number of graphs.
        skips: how often CUDA graphs were skipped.
    """

    compiled: int
    skips: int


def graphs_of(run: Callable[[], object]) -> Graphs:
    """Runs something and counts its graphs."""
    from torch._dynamo.utils import counters

    counters.clear()
    run()
    return Graphs(counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"])
