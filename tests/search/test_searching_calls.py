"""Calls that search while they generate: their tokens, what their trials see, what drafts meanwhile and afterwards."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.architectures import build
from helpers.models import ragged_batch, tiny_llama
from helpers.searches import SEARCH, Clock, an_end, fixed_draft, generated, lines_of, prefilled, prompt, search_of
from hf_selfspec import Cascade, FixedLength, Lookup, SelfSpec, SettingError, SkipLayers
from hf_selfspec.batch import Text
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.drafts.layers.searching import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search.budget import Budget
from hf_selfspec.search.skip_search import SkipSearch
from hf_selfspec.search.skip_space import OnTheFlySearch

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.every_run("llama")
@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "gpt_oss", "mamba2", "nemotron_h"])
def test_searching_changes_no_token(name: str) -> None:
    """Rows of other lengths, before the text and behind it, and drafts of a set that may change each round."""
    model = tiny_llama() if name == "llama" else build(name)
    prompts, spec = ragged_batch((4, 9, 6)), fixed_draft(SEARCH, 0.4)
    end, _ = an_end(generated(model, prompts, 32)[:, 9:])
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    plain, seconds = model.generate(**prompts, **options), 0.0
    for _ in range(2):
        assert torch.equal(model.generate(**prompts, assistant=spec, **options), plain)
        assert spec.stats is not None
        seconds += spec.stats.search_seconds
    found = search_of(spec, model)
    assert len(found.history) >= 4
    assert seconds > 0
    assert spec.stats.plan == found.best.picture()
    assert 0 < spec.stats.accepted < spec.stats.drafted


def test_rows_shorter_than_a_window_behind_embedded_prompts() -> None:
    """What is before them has no ids."""
    model, spec = tiny_llama(), fixed_draft(OnTheFlySearch(16, budget=1.0), 0.4)
    embedded = model.get_input_embeddings()(prompt(3, 12))
    options = {"inputs_embeds": embedded, "max_new_tokens": 36, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    end, ends = an_end(model.generate(**options))
    assert min(ends) < 8 < 32 < max(ends)
    plain = model.generate(eos_token_id=end, **options)
    for _ in range(2):
        assert torch.equal(model.generate(eos_token_id=end, assistant=spec, **options), plain)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_matchness_is_the_share_of_the_text_that_the_set_predicts(
    monkeypatch: pytest.MonkeyPatch, do_sample: bool
) -> None:
    """Of the last tokens that the model has generated, in the text's place, also in a row that ended early."""
    rows, window, first = 2, 12, 14
    model = tiny_llama(8, factor=1.0)
    tried: list[tuple[LayerPlan, list[torch.Tensor]]] = []
    original = SearchingDraft._matchness

    def watched(self: SearchingDraft, text: Text, plan: LayerPlan, size: int) -> float:
        tried.append((plan, [text.ids[row : row + 1, :length].clone() for row, length in enumerate(text.lengths)]))
        assert size == min(window, *text.last_slots())
        return original(self, text, plan, size)

    monkeypatch.setattr(SearchingDraft, "_matchness", watched)
    search = OnTheFlySearch(context_window=window, budget=1.0, target_matchness=1.0)
    spec = SelfSpec(SkipLayers(search=search, ratio=0.2), FixedLength(1))
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    torch.manual_seed(0)
    prompts = generated(model, prompt(rows, 2), first - 2, **options)  # of which sets predict some, but it is not new
    if not do_sample:
        end, ends = an_end(generated(model, prompts, 30)[:, first:])
        assert min(ends) < 10
        options = {"eos_token_id": end}
    torch.manual_seed(0)
    generated(model, prompts, 30, assistant=spec, **options)
    assert len({plan for plan, _ in tried}) > 5
    assert any(len({row.shape[1] for row in texts}) > 1 for _, texts in tried)
    matched = []
    for plan, texts in tried:
        agreed = tokens = 0
        for ids in texts:
            s = ids.shape[1]
            target, _ = prefilled(model, ids, (s,))
            with target.prepared():
                logits = target.step(ids[:, s - 1 - window : -1], [s - 1 - window], ForwardPass(plan)).logits
            assert logits is not None
            count = min(window, s - first)
            agreed += (logits.argmax(-1) == ids[:, s - window :])[0, -count:].sum().item()
            tokens += count
        matched.append(agreed / tokens)
    assert search_of(spec, model).history == pytest.approx(matched)
    assert len(set(matched)) > 1


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
    with pytest.raises(SettingError, match=r"OnTheFlySearch\(context_window=128\) is longer .* has 128 positions"):
        generated(model, prompt(), 20, assistant=fixed_draft(OnTheFlySearch(context_window=128)))
    spec = fixed_draft(OnTheFlySearch(context_window=20, budget=1.0), 0.4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for tokens in (20, 19):
            generated(model, prompt(), tokens, assistant=spec)
    assert [str(warning.message)[:50] for warning in told] == ["OnTheFlySearch(context_window=20) is longer than t"]
    assert search_of(spec, model).history == []
    generated(model, prompt(), 30, assistant=spec)
    assert search_of(spec, model).history


def test_a_budget_is_a_share_of_the_time_so_far() -> None:
    budget = Budget(0.1, clock := Clock())
    assert not budget.allows(0.1)
    clock.now += 20.0
    assert budget.allows(2.0)
    assert not budget.allows(2.1)
    with budget.spending():
        clock.now += 1.5
    assert budget.allows(0.1 * 21.5 - 1.51)
    assert not budget.allows(0.1 * 21.5 - 1.49)
    assert Budget(1.0, clock).allows(1e9)


def test_no_call_spends_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the first; a forward over ``n`` tokens takes ``1 + 0.1 n`` seconds here."""
    model = tiny_llama(8)
    clock = Clock().of(model, monkeypatch)
    spec = SelfSpec.swift(search=OnTheFlySearch(8, target_matchness=1.0, budget=0.1))
    shares = []
    for _ in range(3):
        begun = clock.now
        generated(model, prompt(), 64, assistant=spec)
        assert spec.stats is not None
        shares.append(spec.stats.search_seconds / (clock.now - begun))
    assert shares[0] > 0.0
    assert max(shares) <= 0.1
    assert len(search_of(spec, model).history) >= 6


def test_rounds_of_an_earlier_set_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether drafts pay is measured anew for each set."""
    model, anew = tiny_llama(8), list[str]()
    monkeypatch.setattr(Controller, "begin_anew", lambda self, name: anew.append(name))
    spec = SelfSpec.swift(search=OnTheFlySearch(8, target_matchness=1.0, budget=1.0))
    generated(model, prompt(), 40, assistant=spec)
    changes = len(search_of(spec, model).best_sets) - 1
    assert len(anew) == changes > 0


def test_two_searches_in_one_cascade_learn_apart(tmp_path: Path) -> None:
    """Each tries and keeps sets of its own size, also in a file."""
    sources = [SkipLayers(search=OnTheFlySearch(8, 6, budget=1.0), ratio=ratio) for ratio in (0.2, 0.6)]
    model, spec = tiny_llama(8), SelfSpec(Cascade([Lookup(), *sources]))
    generated(model, prompt(), 40, assistant=spec)
    spec.save_pretrained(tmp_path)
    loaded = SelfSpec.from_pretrained(tmp_path)
    generated(model, prompt(), 10, assistant=loaded)
    for each in (spec, loaded):
        searches = [found for found in each._knowledge.record(model).findings.values() if isinstance(found, SkipSearch)]
        sizes = [{len(found.space.places(trial.plan)) for trial in list(found.trials)[1:]} for found in searches]
        assert sizes == [{2}, {7}]
        assert {found.phase for found in searches} == {"acceleration"}


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
    spec = SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(8, max_steps=12, target_matchness=1.0, budget=1.0))
    phases = []
    for tokens in (8, 14, 28):
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
