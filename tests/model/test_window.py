"""Layers with a window, or chunks: what they keep is bounded, and texts many times as long as that are plain's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.calls import random_skip_set
from helpers.fitted import mtp_of
from helpers.machine import Machine
from helpers.models import ragged_batch
from hf_selfspec import (
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    OnTheFlySearch,
    SelfSpec,
    TopKTree,
)
from hf_selfspec.drafts import MTP
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.graphs.model_graphs import graphs_of

pytestmark = pytest.mark.machine("verification_is_free")

# All layers, some, with chunks, sinks, shared keys, states, and with positions that count from the cache's sizes.
KINDS = ("mistral", "gemma3_text", "llama4_text", "gpt_oss", "gemma3n_text", "lfm3", "inkling_text")
WINDOW, NEW = 8, 40
ROWS = {"row": (30,), "short row": (3,), "ragged": (3, 41, 19)}
THREE, WIDE = FixedLength(3), TopKTree(((0.9999, 3), (1.0, 1)))
SPECS: dict[str, Callable[[PreTrainedModel], SelfSpec]] = {
    "lookup": lambda model: SelfSpec.lookup(),
    "exit": lambda model: SelfSpec(EarlyExit(2), ConfidenceThreshold(0.05), max_draft=12),
    "chunks": lambda model: SelfSpec(EarlyExit(2), ConfidenceThreshold(0.05), max_draft=12),
    "tree": lambda model: SelfSpec(EarlyExit(2), THREE, WIDE),
    "skip": lambda model: SelfSpec(random_skip_set(model.config.model_type, model), THREE),
    "search": lambda model: SelfSpec.swift(0.4, OnTheFlySearch(8, budget=1.0)),
    "layerskip": lambda model: SelfSpec.layerskip(),
    "mtp": lambda model: SelfSpec(MTP(mtp_of(model)), THREE),
}
ONLY = {"llama4_text": {"mtp"}, "gemma3n_text": {"mtp"}, "lfm3": {"mtp", "skip"}, "inkling_text": {"mtp"}}


@cache
def model_of(kind: str) -> PreTrainedModel:
    model = build(kind)
    model.generation_config.eos_token_id = None
    return model


def ids(model: PreTrainedModel, rows: str, assistant: SelfSpec | None, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what some models cannot do is said once
        return model.generate(**ragged_batch(ROWS[rows], seed=11), **options, assistant=assistant)


@cache
def plain(kind: str, rows: str) -> torch.Tensor:
    found: torch.Tensor = ids(model_of(kind), rows, None)
    return found


@pytest.mark.every_run("ragged-gemma3_text-(exit|tree|mtp)|row-mistral-(lookup|search|chunks)|short row-gpt_oss-skip")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_texts_many_windows_long(rows: str, kind: str, name: str) -> None:
    if name in ONLY.get(kind, ()):
        pytest.skip("not of this type of model")
    model, options = model_of(kind), {"prefill_chunk_size": 13} if name == "chunks" else {}
    assert torch.equal(ids(model, rows, SPECS[name](model), **options), plain(kind, rows))


@pytest.mark.every_run("ragged-gemma3_text-line")
@pytest.mark.parametrize("tree", [None, WIDE], ids=["line", "tree"])
@pytest.mark.parametrize("kind", ["gemma3_text", "llama4_text"])
@pytest.mark.parametrize("rows", ["row", "ragged"])
def test_in_graphs(rows: str, kind: str, tree: TopKTree | None, machine: Machine) -> None:
    machine.graphs_are_taken()
    machine.windows_of_graphs_move()
    model, options = model_of(kind), {"max_new_tokens": 60 - max(ROWS[rows])}
    spec = SelfSpec(EarlyExit(2), THREE, tree)
    assert torch.equal(ids(model, rows, spec, **options), ids(model, rows, None, **options))
    assert graphs_of(model).count > 2


@pytest.mark.every_run("ragged")
@pytest.mark.parametrize("rows", ROWS)
def test_what_is_kept(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window, the longest forward and a bounded rest; layers that see the whole text keep it."""
    slots, let_go = dict[bool, set[int]](), SpeculativeCache.free

    def noted(cache: SpeculativeCache) -> None:
        for layer in cache.layers:
            slots.setdefault(layer.is_sliding, set()).update(buffer.shape[2] for buffer in layer.buffers())
        let_go(cache)

    monkeypatch.setattr(SpeculativeCache, "free", noted)
    model = model_of("gemma3_text")
    for spec in (SelfSpec.lookup(), SPECS["tree"](model), SPECS["search"](model)):
        slots.clear()
        ids(model, rows, spec)
        assert max(slots[True]) <= WINDOW + max(16, 32)
        assert min(slots[False]) >= max(ROWS[rows]) + NEW
