"""Calls that search while they generate: their tokens and what their trials see."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.models import ragged_batch, tiny_llama
from helpers.search.beside_text import prefilled
from helpers.search.generating import SEARCHES, an_end, fixed_drafts, generated, prompt, search_of
from hf_selfspec import FixedLength, SelfSpec, SettingError, SkipLayers
from hf_selfspec.batch import Text
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model.partial import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search.on_the_fly import ClosestLayers, OnTheFlySearch, Search
from hf_selfspec.search.replay import Trace

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(
    "make",
    [lambda: tiny_llama(8), lambda: build("gemma3_text"), lambda: build("gpt_oss"), lambda: build("gemma3n_text")],
)
@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_searching_changes_no_token(make: Callable[[], PreTrainedModel], search: Search) -> None:
    model, ids = make(), prompt(3, 10)
    plain = generated(model, ids, 40)
    for spec in (SelfSpec.swift(search=search), fixed_drafts(search, 0.4)):
        seconds = 0.0
        for _ in range(2):
            assert torch.equal(generated(model, ids, 40, assistant=spec), plain)
            assert spec.stats is not None
            seconds += spec.stats.search_seconds
        found = search_of(spec, model)
        assert len(found.history) >= 4
        assert seconds > 0
        assert spec.stats.plan == found.best.picture()
    assert 0 < spec.stats.accepted < spec.stats.drafted
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_ragged_batches_that_end_early_keep_their_tokens(search: Search) -> None:
    """Rows of other lengths, before the text and behind it."""
    model, prompts, spec = tiny_llama(8), ragged_batch((4, 9, 6)), fixed_drafts(search, 0.4)
    end, ends = an_end(generated(model, prompts, 60)[:, 9:])
    assert min(ends) < 20 < 40 < max(ends)
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    plain = model.generate(**prompts, **options)
    for _ in range(2):
        assert torch.equal(model.generate(**prompts, assistant=spec, **options), plain)
    found = search_of(spec, model)
    assert len(found.history) >= 5
    assert {len(done.traces) for done in found.trials} == {3}


@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_searching_changes_no_drawn_token(search: Search) -> None:
    """Of one choice each token is drawn, so that it is the greedy one; then of several."""
    model, ids, spec = tiny_llama(8), prompt(3), fixed_drafts(search, 0.4)
    plain = generated(model, ids, 70)
    for _ in range(2):
        assert torch.equal(generated(model, ids, 70, assistant=spec, do_sample=True, top_k=1), plain)
    assert len(search_of(spec, model).history) >= 5
    assert generated(model, ids, 70, assistant=spec, do_sample=True, temperature=0.7).shape == plain.shape


def test_drawn_text_of_any_length_is_searched() -> None:
    """At the end of a text less than a window is left to look at."""
    model = tiny_llama(8)
    for search, lengths in ((OnTheFlySearch(context_window=64), (70,)), (ClosestLayers(), (30, 50, 70))):
        spec = fixed_drafts(search, 0.4)
        for tokens in lengths:
            assert generated(model, prompt(), tokens, assistant=spec, do_sample=True).shape == (1, 6 + tokens)


def test_a_search_ends_between_trials_while_tokens_are_drawn() -> None:
    """Trials that were due for the window are not made any more."""
    model = tiny_llama(8)
    for max_steps in (7, 8, 9):
        search = OnTheFlySearch(context_window=8, max_steps=max_steps, budget=1.0)
        spec = fixed_drafts(search, 0.4)
        for _ in range(2):
            assert generated(model, prompt(), 70, assistant=spec, do_sample=True, top_k=1).shape == (1, 76)
        assert len(search_of(spec, model).history) == max_steps


@pytest.mark.parametrize("ratio", ["auto", 0.4])
def test_rows_shorter_than_a_window_behind_embedded_prompts(ratio: Any) -> None:
    model, spec = tiny_llama(8), fixed_drafts(ClosestLayers(), ratio)
    embedded = model.get_input_embeddings()(prompt(3, 12))
    options = {"inputs_embeds": embedded, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    end, ends = an_end(model.generate(**options))
    assert min(ends) < 8 < 40 < max(ends)
    plain = model.generate(eos_token_id=end, **options)
    assert torch.equal(model.generate(eos_token_id=end, assistant=spec, **options), plain)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_matchness_is_what_the_set_predicts_of_the_text(monkeypatch: pytest.MonkeyPatch, do_sample: bool) -> None:
    """In the text's place: whether it predicts the tokens, or how likely its own are accepted where they were drawn."""
    rows = 3
    model = tiny_llama(8, factor=1.0)
    tried: list[tuple[LayerPlan, int, list[Trace], list[torch.Tensor]]] = []
    original = SearchingDraft._traces

    def watched(self: SearchingDraft, text: Text, plan: LayerPlan, window: int) -> list[Trace]:
        found = original(self, text, plan, window)
        rows = [text.ids[row : row + 1, :length] for row, length in enumerate(text.lengths)]
        tried.append((plan, window, found, rows))
        return found

    monkeypatch.setattr(SearchingDraft, "_traces", watched)
    search = OnTheFlySearch(context_window=12, budget=1.0, target_matchness=1.0)
    spec = SelfSpec(SkipLayers(search=search, ratio=0.2), FixedLength(1))
    torch.manual_seed(0)
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 0} if do_sample else {}
    generated(model, prompt(rows), 50, assistant=spec, **drawn)
    assert len({plan for plan, *_ in tried}) > 5
    assert any(len({row.shape[1] for row in texts}) > 1 for *_, texts in tried)
    matched = []
    for plan, window, traces, texts in tried:
        assert len(traces) == rows
        rights = 0.0
        for found, ids in zip(traces, texts, strict=True):
            n, s = found.tokens, ids.shape[1]
            assert 8 <= n <= window <= 12
            target, _ = prefilled(model, ids, (s,))
            with target.prepared():
                logits = target.step(ids[:, s - 1 - window : -1], [s - 1 - window], ForwardPass(plan)).logits
            assert logits is not None
            logits = logits[:, -n:]
            accept = (logits.argmax(-1) == ids[:, s - n :]).float()
            if do_sample:
                scores = model(ids[:, :-1]).logits[:, -n:]
                accept = torch.minimum((logits / 0.7).softmax(-1), (scores / 0.7).softmax(-1)).sum(-1)
            np.testing.assert_allclose(found.accept, accept, atol=1e-4)
            np.testing.assert_allclose(found.confidence, logits.softmax(-1).amax(-1), atol=1e-4)
            rights += accept.sum().item()
        matched.append(rights / sum(found.tokens for found in traces))
    assert search_of(spec, model).history == pytest.approx(matched, abs=1e-4)
    assert len(set(matched)) > 1


def test_calls_of_one_token_show_nothing() -> None:
    """Nothing is tried or timed on them: there is no text of the model's own to look at."""
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=ClosestLayers()))
    for seed in range(4):
        model.generate(**ragged_batch((20,), seed=seed), max_new_tokens=1, do_sample=False, assistant=spec)
    search = search_of(spec, model)
    assert (search.steps, search.timings.texts, search.search_seconds) == (0, 0, 0.0)


def test_trials_that_overflow_never_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose logits are no numbers is never right, and the search goes on."""
    original = Target.step

    def overflowing(target: Target, tokens: Any, cursors: Any, run: Any = None, nodes: Any = None, *first: Any) -> Any:
        step = original(target, tokens, cursors, run, nodes, *first)
        if nodes is not None and nodes.hidden and step.logits is not None:
            step.logits = step.logits * float("nan")
        return step

    monkeypatch.setattr(Target, "step", overflowing)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
        model, spec = tiny_llama(8), SelfSpec.swift(search=OnTheFlySearch(context_window=8, max_steps=5, budget=1.0))
        model.generate(**ragged_batch((9,)), max_new_tokens=40, assistant=spec, **options)
        search = search_of(spec, model)
        assert search.is_over
        assert all(value <= 0.2 for value in search.history)
        assert all(np.isfinite(trace.confidence).all() for done in search.trials for trace in done.traces)


@pytest.mark.usefixtures("no_warnings_yet")
def test_models_that_cannot_look_beside_their_text() -> None:
    model, spec = build("bloom"), SelfSpec.swift(search=OnTheFlySearch(context_window=4, budget=1.0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = generated(model, prompt(), 20, assistant=spec)
    assert any("there is no search for blocks" in str(warning.message) for warning in told)
    assert torch.equal(found, generated(model, prompt(), 20))
    assert spec._knowledge.latest(model) is None


@pytest.mark.usefixtures("no_warnings_yet")
def test_windows_longer_than_texts() -> None:
    """No text of the model can have them, or this one does not, for which there is one warning whatever its length."""
    model = build("gpt2")
    with pytest.raises(SettingError, match=r"ClosestLayers\(context_window=128\) is longer .* has 128 positions"):
        generated(model, prompt(), 20, assistant=fixed_drafts(ClosestLayers(context_window=128)))
    spec = fixed_drafts(OnTheFlySearch(context_window=30, budget=1.0), 0.4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for tokens in (30, 29, 28):
            generated(model, prompt(), tokens, assistant=spec)
    assert [str(warning.message)[:50] for warning in told] == ["OnTheFlySearch(context_window=30) is longer than t"]
    assert search_of(spec, model).history == []
    generated(model, prompt(), 40, assistant=spec)
    assert search_of(spec, model).history
