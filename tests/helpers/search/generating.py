"""Calls whose searches are looked at, and texts of which a target holds all but the last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_selfspec import FixedLength, SelfSpec, SkipLayers
from hf_selfspec.batch import Text
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.target import Target
from hf_selfspec.search.costs import ForwardCosts, Stopwatch
from hf_selfspec.search.proposers import ClosestLayers, OnTheFlySearch, Search
from hf_selfspec.search.skip_search import SkipSearch


def search_of(spec: SelfSpec, model: PreTrainedModel) -> SkipSearch:
    """What ``spec`` has found for the last kind of call of ``model``."""
    search = spec._knowledge.latest(model)
    assert isinstance(search, SkipSearch)
    return search


def generated(model: PreTrainedModel, prompts: torch.Tensor | dict[str, Any], tokens: int, **options: Any) -> Any:
    """Greedily by default."""
    if isinstance(prompts, torch.Tensor):
        prompts = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    model.generation_config.eos_token_id = None
    return model.generate(**prompts, max_new_tokens=tokens, pad_token_id=0, **{"do_sample": False} | options)


def prompt(rows: int = 1, length: int = 6) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(5))


def an_end(texts: torch.Tensor) -> tuple[int, list[int]]:
    """The token at which the texts would end at the most different lengths, and these."""
    ends = {
        token: [row.index(token) if token in row else len(row) for row in texts.tolist()]
        for token in texts.unique().tolist()
    }
    token = max(ends, key=lambda token: max(ends[token]) - min(ends[token]))
    return token, ends[token]


def use_costs(monkeypatch: pytest.MonkeyPatch, **costs: float) -> None:
    """Forwards of a model of 8 layers are taken to cost that."""
    usual = {"fixed": 0.1, "attention": 1.0, "mlp": 1.0, "several": 0.0, "token": 0.01, "step": 0.0}
    found = ForwardCosts(num_layers=8, **usual | costs)
    monkeypatch.setattr(Stopwatch, "costs", lambda self, of=min: found)


SEARCHES = [
    OnTheFlySearch(context_window=8, bayes_interval=4, budget=1.0),
    ClosestLayers(context_window=8, target_matchness=1.0, budget=1.0),
]


def fixed_drafts(search: Search, ratio: Any = "auto") -> SelfSpec:
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
        for buffer in (layer.keys, layer.values)
        for row, root in enumerate(text.last_slots())
    ]
