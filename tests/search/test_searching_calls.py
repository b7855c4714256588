"""Calls that search while they generate: their tokens, what their trials see, what drafts meanwhile and afterwards."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.machine import Machine
from helpers.models import ragged_batch, tiny_llama
from helpers.searches import SEARCHES, an_end, fixed_draft, generated, lines_of, prefilled, prompt, search_of
from hf_selfspec import FixedLength, SelfSpec, SettingError, SkipLayers
from hf_selfspec.batch import Text
from hf_selfspec.drafts.layers.searching import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search.proposers import ClosestLayers, OnTheFlySearch, Search
from hf_selfspec.search.replay import Trace

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.every_run("swift")
@pytest.mark.parametrize(
    ("make", "search"),
    [
        (lambda: tiny_llama(), SEARCHES[0]),
        (lambda: tiny_llama(), SEARCHES[1]),
        (lambda: build("gemma3n_text"), SEARCHES[0]),
        (lambda: build("gpt_oss"), SEARCHES[1]),
    ],
    ids=["swift", "clasp", "swift, shared keys", "clasp, sinks"],
)
def test_searching_changes_no_token(make: Callable[[], PreTrainedModel], search: Search) -> None:
    """Rows of other lengths, before the text and behind it, and drafts of a set that may change each round."""
    model, prompts, spec = make(), ragged_batch((4, 9, 6)), fixed_draft(search, 0.4)
    end, _ = an_end(generated(model, prompts, 32)[:, 9:])
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    plain, seconds = model.generate(**prompts, **options), 0.0
    for _ in range(2):
        assert torch.equal(model.generate(**prompts, assistant=spec, **options), plain)
        assert spec.stats is not None
        seconds += spec.stats.search_seconds
    found = search_of(spec, model)
    assert len(found.history) >= 4
    assert {len(done.traces) for done in found.trials} == {3}
    assert seconds > 0
    assert spec.stats.plan == found.best.picture()
    assert 0 < spec.stats.accepted < spec.stats.drafted


@pytest.mark.every_run("set")
@pytest.mark.parametrize("make", [lambda: fixed_draft(ClosestLayers(32), 0.4), SelfSpec.layerskip], ids=["set", "exit"])
def test_rows_shorter_than_a_window_behind_embedded_prompts(make: Callable[[], SelfSpec]) -> None:
    """What is before them has no ids."""
    model, spec = tiny_llama(), make()
    embedded = model.get_input_embeddings()(prompt(3, 12))
    options = {"inputs_embeds": embedded, "max_new_tokens": 36, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    end, ends = an_end(model.generate(**options))
    assert min(ends) < 8 < 32 < max(ends)
    plain = model.generate(eos_token_id=end, **options)
    for _ in range(2):
        assert torch.equal(model.generate(eos_token_id=end, assistant=spec, **options), plain)


@pytest.mark.every_run("drawn")
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_matchness_is_what_the_set_predicts_of_the_text(monkeypatch: pytest.MonkeyPatch, do_sample: bool) -> None:
    """In the text's place: whether it predicts the tokens, or how likely its own are accepted where they were drawn."""
    rows = 2
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
    generated(model, prompt(rows), 30, assistant=spec, **drawn)
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
    model, spec = tiny_llama(), SelfSpec(SkipLayers(search=ClosestLayers()))
    for seed in range(4):
        model.generate(**ragged_batch((20,), seed=seed), max_new_tokens=1, do_sample=False, assistant=spec)
    search = search_of(spec, model)
    assert (search.steps, search.timings.texts, search.search_seconds) == (0, 0, 0.0)


def test_trials_that_overflow_never_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose logits are no numbers is never right, and the search goes on."""
    original = Target.step

    def overflowing(
        target: Target, tokens: Any, cursors: Any, run: Any = None, nodes: Any = None, *first: Any, **counts: Any
    ) -> Any:
        step = original(target, tokens, cursors, run, nodes, *first, **counts)
        if nodes is not None and nodes.hidden and step.logits is not None:
            step.logits = step.logits * float("nan")
        return step

    monkeypatch.setattr(Target, "step", overflowing)
    model, spec = tiny_llama(), SelfSpec.swift(search=OnTheFlySearch(context_window=8, max_steps=5, budget=1.0))
    generated(model, prompt(), 24, assistant=spec, do_sample=True, top_k=5)
    search = search_of(spec, model)
    assert search.is_over
    assert all(value <= 0.2 for value in search.history)
    assert all(np.isfinite(trace.confidence).all() for done in search.trials for trace in done.traces)


@pytest.mark.usefixtures("no_warnings_yet")
def test_models_that_cannot_look_beside_their_text() -> None:
    model, spec = build("bloom"), SelfSpec.swift(search=OnTheFlySearch(context_window=4, budget=1.0))
    with pytest.warns(UserWarning, match="there is no search for blocks"):
        generated(model, prompt(), 20, assistant=spec)
    assert spec._knowledge.latest(model) is None


@pytest.mark.usefixtures("no_warnings_yet")
def test_windows_longer_than_texts() -> None:
    """No text of the model can have them, or this one does not, for which there is one warning whatever its length."""
    model = build("gpt2")
    with pytest.raises(SettingError, match=r"ClosestLayers\(context_window=128\) is longer .* has 128 positions"):
        generated(model, prompt(), 20, assistant=fixed_draft(ClosestLayers(context_window=128)))
    spec = fixed_draft(OnTheFlySearch(context_window=20, budget=1.0), 0.4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for tokens in (20, 19):
            generated(model, prompt(), tokens, assistant=spec)
    assert [str(warning.message)[:50] for warning in told] == ["OnTheFlySearch(context_window=20) is longer than t"]
    assert search_of(spec, model).history == []
    generated(model, prompt(), 30, assistant=spec)
    assert search_of(spec, model).history


def test_where_no_set_pays_calls_are_plain(machine: Machine) -> None:
    """Drafts are empty while the search goes on; then transformers' loop decodes."""
    machine.forwards_cost(step=50.0)
    search = OnTheFlySearch(context_window=8, max_steps=4, budget=1.0)
    model, spec = tiny_llama(), SelfSpec.swift(search=search)
    plain = generated(model, prompt(2), 20)
    generated(model, prompt(2), 20, assistant=spec)
    assert spec.stats is not None
    assert (spec.stats.drafted, spec.stats.draft_steps, spec.stats.drafts) == (0, 0, False)
    assert "no set pays" in str(spec.stats)
    found = search_of(spec, model)
    assert found.is_over
    assert torch.equal(generated(model, prompt(2), 20, assistant=spec), plain)
    stats = spec.stats
    assert (stats.tokens, stats.drafted, stats.drafts, stats.phase) == (20 * 2, 0, False, "acceleration")
    assert stats.left_to_generate == "no draft pays"
    assert str(stats).startswith("left to plain generate, since no draft pays: 40 tokens in")


def test_the_stop_rule_of_drafts(machine: Machine) -> None:
    """That of the search from when it has one, and the user's own where one is given."""
    machine.forwards_cost(several=1.0)
    model = tiny_llama(8)
    for own in (None, FixedLength(1)):
        spec = SelfSpec(SkipLayers(search=ClosestLayers(8, max_steps=3, budget=1.0)), stop=own)
        for tokens in (40, 12):
            generated(model, prompt(), tokens, assistant=spec)
        stop = own or spec.choice(model).stop
        assert isinstance(stop, FixedLength)
        assert max(size for size, _ in spec.stats.round_sizes) == stop.num_tokens


def test_kinds_of_calls_search_for_themselves() -> None:
    """With what another kind has found as their first set."""
    search = OnTheFlySearch(context_window=8, max_steps=12, budget=1.0)
    model, spec = tiny_llama(), SelfSpec.swift(ratio=0.4, search=search)
    generated(model, prompt(), 24, assistant=spec)
    single = search_of(spec, model)
    assert single.best != SkipLayers().plan(Anatomy.of(model))
    best, tried = single.best, len(single.history)
    generated(model, prompt(2), 12, assistant=spec)
    found = search_of(spec, model)
    assert found is not single
    assert found.best_sets[0][1] == best
    assert len(single.history) == tried
    generated(model, prompt(), 12, assistant=spec)
    assert search_of(spec, model) is single


def test_statistics_of_a_search() -> None:
    model = tiny_llama()
    spec = SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(context_window=8, max_steps=12, budget=1.0))
    phases = []
    for tokens in (9, 16, 28):
        generated(model, prompt(), tokens, assistant=spec)
        stats, search = spec.stats, search_of(spec, model)
        assert stats is not None
        phases.append(stats.phase)
        assert stats.matchness == search.history
        last = f", last of {len(search.history)} trials {search.history[-1]:.2f}" if search.history else ""
        assert lines_of(spec)["search"] == f"{search.phase}{last}"
        tokens_so_far, seconds = zip(*stats.timeline, strict=True)
        assert list(tokens_so_far) == sorted(set(tokens_so_far))
        assert tokens_so_far[-1] == stats.tokens == tokens
        assert [0, *seconds, stats.total_seconds] == sorted([0, *seconds, stats.total_seconds])
    assert phases == ["optimization"] * 2 + ["acceleration"]
    assert len(search.history) == 12
    blocks = {"attention blocks": search.best.skipped_attention, "MLP blocks": search.best.skipped_mlp}
    for name, skipped in blocks.items():
        assert lines_of(spec)[name] == "".join("□" if layer in skipped else "■" for layer in range(6))
