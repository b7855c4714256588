"""Calls whose searches are looked at, texts in the cache of a target, and searches on costs that tests give."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_selfspec import FixedLength, SelfSpec, SkipLayers
from hf_selfspec.batch import Text
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search import trials
from hf_selfspec.search.forward_costs import MANY, ForwardCosts, Stopwatch
from hf_selfspec.search.proposers import ClosestLayers, OnTheFlySearch, Search, SkipSpace
from hf_selfspec.search.replay import Rule, Trace, replays
from hf_selfspec.search.skip_search import SkipSearch


def search_of(spec: SelfSpec, model: PreTrainedModel) -> SkipSearch:
    """What ``spec`` has found for the last kind of call of ``model``."""
    search = spec._knowledge.latest(model)
    assert isinstance(search, SkipSearch)
    return search


def generated(model: PreTrainedModel, prompts: torch.Tensor | dict[str, Any], tokens: int = 48, **options: Any) -> Any:
    """Greedily by default."""
    if isinstance(prompts, torch.Tensor):
        prompts = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    model.generation_config.eos_token_id = None
    return model.generate(**prompts, max_new_tokens=tokens, pad_token_id=0, **{"do_sample": False} | options)


def prompt(rows: int = 1, length: int = 6, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def an_end(texts: torch.Tensor) -> tuple[int, list[int]]:
    """The token at which the texts would end at the most different lengths, and these."""
    ends = {
        token: [row.index(token) if token in row else len(row) for row in texts.tolist()]
        for token in texts.unique().tolist()
    }
    token = max(ends, key=lambda token: max(ends[token]) - min(ends[token]))
    return token, ends[token]


SEARCHES = [
    OnTheFlySearch(context_window=8, bayes_interval=4, budget=1.0),
    ClosestLayers(context_window=8, target_matchness=1.0, budget=1.0),
]


def fixed_draft(search: Search, ratio: Any = "auto") -> SelfSpec:
    """Drafts of three tokens, some of which are rejected."""
    return SelfSpec(SkipLayers(search=search, ratio=ratio), FixedLength(3))


def lines_of(spec: SelfSpec) -> dict[str, str]:
    """The lines of the statistics, by what comes first in them."""
    assert spec.stats is not None
    return {line[:24].rstrip(): line[25:] for line in str(spec.stats).splitlines()}


def after_prefill(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    """Rows of these lengths, all tokens of which but the last are in the cache; prepare the target to use it."""
    width = max(lengths)
    ids = torch.randint(3, 90, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    return prefilled(model, ids, lengths)


def prefilled(model: PreTrainedModel, ids: torch.Tensor, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    anatomy, width = Anatomy.of(model), max(lengths)
    text = Text.of(ids, [0] * len(lengths), 20)
    text.lengths = list(lengths)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, len(lengths), width + 20))
    with target.prepared():
        target.prefill(ids[:, :-1], [0] * len(lengths), [length - 1 for length in lengths])
    target.roots = text.last_slots()
    return target, text


def keys_and_values(target: Target, text: Text) -> list[torch.Tensor]:
    """Copies of what the cache holds of the text."""
    return [
        buffer[row, :, :root].clone()
        for layer in target.cache.layers
        for buffer in layer.buffers()
        for row, root in enumerate(text.last_slots())
    ]


# Without a model, in a space of ten layers ---------------------------------------------------------------------------


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
