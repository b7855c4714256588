"""Calls whose searches are looked at, and texts in the cache of a target."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.machine import knowledge_of
from hf_selfspec import OnTheFlySearch, SelfSpec
from hf_selfspec.batch import Text
from hf_selfspec.generate import decoder
from hf_selfspec.model import target
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search.skip_search import SkipSearch, SkipSpace


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def of(self, model: Any, patch: pytest.MonkeyPatch) -> Clock:
        """The time of calls, in which a forward over ``n`` tokens takes ``1 + 0.1 n`` seconds, all layers the same."""
        for place in (target, decoder):
            patch.setattr(place, "perf_counter", self)

        def forward(_: Any, args: tuple[torch.Tensor]) -> None:
            self.now += (1 + 0.1 * args[0].shape[1]) / len(model.model.layers)

        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(forward)
        return self


def search_of(spec: SelfSpec, model: PreTrainedModel) -> SkipSearch:
    """What ``spec`` has found for the last kind of call of ``model``."""
    search = knowledge_of(spec).latest(model)
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


def lines_of(spec: SelfSpec) -> dict[str, str]:
    """The lines of the statistics, by what comes first in them."""
    assert spec.stats is not None
    return {line[:24].rstrip(): line[25:] for line in str(spec.stats).splitlines()}


def prefilled(model: PreTrainedModel, ids: torch.Tensor, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    anatomy, width = Anatomy.of(model), max(lengths)
    text = Text.of(ids, [0] * len(lengths), 20)
    text.lengths = list(lengths)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, len(lengths), width + 20))
    with target.prepared():
        target.prefill(ids[:, :-1], [0] * len(lengths), [length - 1 for length in lengths])
    target.roots = text.last_slots()
    return target, text


# Findings that last ------------------------------------------------------------------------------------------------

FILE = "selfspec.json"
LAYERS = 6

SEARCHES = {
    "begun": SelfSpec.swift(search=OnTheFlySearch(8, bayes_interval=4, target_matchness=1.0, budget=1.0)),
    "over": SelfSpec.swift(search=OnTheFlySearch(8, max_steps=3, target_matchness=1.0, budget=1.0)),
    "ratio given": SelfSpec.swift(0.3, OnTheFlySearch(8, max_steps=6, budget=1.0)),
}


def assert_lossless(model: Any, spec: SelfSpec, tokens: int = 12, rows: int = 1) -> None:
    ids = prompt(rows)
    assert torch.equal(generated(model, ids, tokens, assistant=spec), generated(model, ids, tokens))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert all("forward" not in module.__dict__ for module in inner.modules())


def begins_with(model: Any, spec: SelfSpec, rows: int = 1) -> tuple[Any, str]:
    """What a call drafts with before it has learned anything, and whether it goes on searching."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text is too short for a search
        generated(model, prompt(rows), 2, assistant=spec)
    assert spec.stats is not None
    return spec.choice(model), spec.stats.phase


# Without a model, in a space of ten layers ---------------------------------------------------------------------------


def space(layers: int = 10) -> SkipSpace:
    return SkipSpace(layers, tuple((layer, name) for layer in range(1, layers - 1) for name in ("attention", "mlp")))


def skipping(*places: int) -> LayerPlan:
    return space().plan(places)
