"""Searches whose trials and costs are given, in a space of ten layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_selfspec import FixedLength
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search import trials
from hf_selfspec.search.costs import MANY, ForwardCosts, Stopwatch
from hf_selfspec.search.proposers import Search, SkipSpace
from hf_selfspec.search.replay import Rule, Trace, replays
from hf_selfspec.search.skip_search import SkipSearch


def space(layers: int = 10) -> SkipSpace:
    return SkipSpace(layers, tuple((layer, name) for layer in range(1, layers - 1) for name in ("attention", "mlp")))


COSTS = ForwardCosts(fixed=0.1, attention=1.0, mlp=1.0, several=0.5, token=0.01, step=0.0, num_layers=10)


def timings(space: SkipSpace, costs: ForwardCosts) -> Stopwatch:
    """What a stopwatch shows where forwards cost that."""
    early, attention = space.timed_plans()
    seconds = {
        "early": costs.draft(early) - costs.step,
        "attention": costs.draft(attention) - costs.step,
        "full": costs.plain(),
        "few": costs.plain() + costs.several + costs.num_layers * costs.token,
        "many": costs.plain() + costs.several + costs.num_layers * costs.token * (MANY - 1),
        "draft": costs.draft(early),
    }
    return Stopwatch(early, attention, {name: [time] for name, time in seconds.items()})


def use_times(search: SkipSearch) -> None:
    """Forwards were timed on a text."""
    search.timings.seconds = timings(space(), COSTS).seconds
    search.time()


def predicted(share: float, tokens: int = 32) -> list[Trace]:
    """Of a text of 32 tokens by default a set predicts this share, equally likely everywhere."""
    return [Trace(np.full((1, tokens), share), np.full((1, tokens), 0.9))]


def skipping(*places: int) -> LayerPlan:
    return space().plan(places)


def matchness_of(known: frozenset[int], plan: LayerPlan) -> float:
    """Each block that should have run costs as much."""
    return 1 - len(space().places(plan) - known) / len(space().blocks)


def speedup(traces: list[Trace], plan: LayerPlan, rule: Rule) -> float:
    runs = replays(traces, [rule], plan, COSTS, 25)
    return COSTS.plain() / runs.seconds_per_token.item()


def timed_search(settings: Search, start: LayerPlan, rules: Sequence[Rule] = (FixedLength(2),)) -> SkipSearch:
    """A search for a ratio, too, where forwards have been timed."""
    search = SkipSearch(settings, space(), 0.5, start, auto=True, rules=rules)
    use_times(search)
    search.begin_window()
    return search


CAREFUL, BOLD = skipping(0, 3, 8, 11), skipping(*range(1, 11))
SHARES = ((CAREFUL, 0.9), (BOLD, 0.8))


def draft(search: SkipSearch, share: float, drafted: int = 16, plan: LayerPlan = BOLD) -> None:
    """One round, with the share of drafted tokens that is accepted."""
    search.watch(plan, drafted, round(share * drafted), 1 + round(share * drafted))


def draft_much(search: SkipSearch, share: float) -> None:
    for _ in range(trials._WATCHED // 16):
        draft(search, share)
    search.begin_window()
