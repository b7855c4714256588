"""What drafts while a search goes on and behind it, and what the statistics show of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import tiny_llama
from helpers.search.generating import SEARCHES, fixed_drafts, generated, lines_of, prompt, search_of, use_costs
from hf_selfspec import EarlyExit, SelfSpec, SkipLayers
from hf_selfspec.batch import Draft, Text
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.search.on_the_fly import ClosestLayers, OnTheFlySearch, Search

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("several", "is_over"), [(20.0, True), (0.0, False)])
def test_a_search_without_hope_ends_early(monkeypatch: pytest.MonkeyPatch, several: float, is_over: bool) -> None:
    """Where a verification costs as much as two one-token forwards, no closest set can pay."""
    use_costs(monkeypatch, several=several)
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=ClosestLayers(context_window=8, budget=1.0)))
    plain = generated(model, prompt(), 40)
    assert torch.equal(generated(model, prompt(), 40, assistant=spec), plain)
    found = search_of(spec, model)
    assert found.is_over == is_over
    sizes = {len(trial.plan.skipped_layers) for trial in found.trials}
    assert len(sizes) >= 5
    assert {trial.window for trial in found.trials} == ({1, 2} if is_over else {1, 2, 3, 4})


def test_where_no_set_pays_drafts_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, step=50.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=OnTheFlySearch(context_window=8, budget=1.0))
    plain = generated(model, prompt(3), 40)
    assert torch.equal(generated(model, prompt(3), 40, assistant=spec), plain)
    assert spec.stats is not None
    assert spec.stats.drafted == 0  # before it is known to pay as well
    tried = len(spec.stats.matchness)
    assert torch.equal(generated(model, prompt(3), 40, assistant=spec), plain)
    assert (spec.stats.drafted, spec.stats.draft_steps, spec.stats.drafts) == (0, 0, False)
    assert "no set pays" in str(spec.stats)
    assert len(spec.stats.matchness) > tried  # the search goes on
    use_costs(monkeypatch, step=0.0)
    generated(model, prompt(3), 40, assistant=spec)  # the second and last text at which forwards are timed was seen
    assert not search_of(spec, model).choice.drafts


def plain_calls(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> list[int]:
    """Rows of the calls that transformers' own loop decodes from now on."""
    calls: list[int] = []
    original = type(model)._sample
    monkeypatch.setattr(
        type(model),
        "_sample",
        lambda self, input_ids, **options: calls.append(len(input_ids)) or original(self, input_ids, **options),
    )
    return calls


def test_calls_without_anything_to_do_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no draft pays, transformers' loop decodes until it is time to ask again."""
    use_costs(monkeypatch, step=50.0)
    search = OnTheFlySearch(context_window=8, max_steps=4, budget=1.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=search)
    plain = generated(model, prompt(3), 40, return_dict_in_generate=True, output_scores=True)
    generated(model, prompt(3), 40, assistant=spec)
    assert search_of(spec, model).is_over
    calls, ours = plain_calls(monkeypatch, model), []
    for _ in range(8):
        options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "assistant": spec}
        found = generated(model, prompt(3), 40, **options)
        assert torch.equal(found.sequences, plain.sequences)
        for score, same in zip(found.scores, plain.scores, strict=True):
            torch.testing.assert_close(score, same, atol=1e-5, rtol=1e-4)
        assert spec.stats is not None
        assert (spec.stats.tokens, spec.stats.drafted, spec.stats.drafts) == (40 * 3, 0, False)
        assert (spec.stats.mean_generated_length, spec.stats.phase) == (1.0, "acceleration")
        assert len(spec.stats.from_draft) == 3
        ours.append(not calls)
        assert spec.stats.left_to_generate == ("no draft pays" if calls else "")
        told = str(spec.stats)
        if calls:
            assert re.fullmatch(
                rf"left to plain generate, since no draft pays: {40 * 3} tokens in \d+\.\d\d seconds", told
            )
        else:
            assert "left to" not in told
        calls.clear()
    assert not ours[0]
    assert 2 <= ours.count(True) <= 4


STOPS: dict[str, Any] = {
    "chosen": None,
    "a function": lambda ids, logits, states: torch.ones(len(ids), dtype=torch.bool),
}


@pytest.mark.parametrize(("name", "search"), list(zip(STOPS, SEARCHES, strict=True)))
def test_the_stop_rule_of_drafts(monkeypatch: pytest.MonkeyPatch, search: Search, name: str) -> None:
    """That of the search from when it has one, and the user's own where one is given."""
    own, used = STOPS[name], []
    propose = SearchingDraft.propose

    def watched(self: SearchingDraft, text: Text, room: list[int]) -> Draft:
        used.append((self.search.choice.stop, self.limits.stop))
        return propose(self, text, room)

    monkeypatch.setattr(SearchingDraft, "propose", watched)
    use_costs(monkeypatch, several=1.0)
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=search), stop=own)
    plain = generated(model, prompt(), 40)
    for _ in range(2):
        assert torch.equal(generated(model, prompt(), 40, assistant=spec), plain)
    chosen = [stop for stop, _ in used if stop is not None]
    assert len(chosen) > 3
    if own is None:
        assert all(stop == choice for choice, stop in used if choice is not None)
    else:
        assert all(stop is own for _, stop in used)


@pytest.mark.parametrize(("budget", "tries"), [(1e-9, False), (1.0, True)])
def test_trials_while_generating_keep_to_the_budget(budget: float, tries: bool) -> None:
    model, spec = tiny_llama(8), fixed_drafts(OnTheFlySearch(context_window=8, budget=budget), 0.4)
    generated(model, prompt(), 60, assistant=spec)
    assert spec.stats is not None
    rounds = len(spec.stats.timeline) - 3  # before the first window
    assert rounds > 10
    assert (len(search_of(spec, model).history) >= rounds - 3) if tries else not search_of(spec, model).history


def test_kinds_of_calls_search_for_themselves() -> None:
    """With what another kind has found as their first set."""
    model, spec = (
        tiny_llama(8),
        SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(context_window=8, max_steps=20, budget=1.0)),
    )
    generated(model, prompt(), 40, assistant=spec)
    single = search_of(spec, model)
    assert single.best != SkipLayers().plan(Anatomy.of(model))
    best, tried = single.best, len(single.history)
    for rows, options in ((3, {}), (1, {"do_sample": True, "top_k": 1})):
        generated(model, prompt(rows), 40, assistant=spec, **options)
        found = search_of(spec, model)
        assert found is not single
        assert found.found[0][1] == best
    assert len(single.history) == tried
    generated(model, prompt(), 40, assistant=spec)
    assert search_of(spec, model) is single


def test_statistics_of_a_search() -> None:
    model = tiny_llama(8)
    spec = SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(context_window=8, max_steps=12, budget=1.0))
    phases = []
    for tokens in (9, 16, 40):
        generated(model, prompt(), tokens, assistant=spec)
        stats, search = spec.stats, search_of(spec, model)
        assert stats is not None
        phases.append((stats.phase, stats.phase == search.phase))
        assert stats.matchness == search.history
        assert stats.drafts
        last = f", last of {len(search.history)} trials {search.history[-1]:.2f}" if search.history else ""
        assert lines_of(spec)["search"] == f"{search.phase}{last}"
        tokens_so_far, seconds = zip(*stats.timeline, strict=True)
        assert len(stats.timeline) == stats.verify_passes
        assert list(tokens_so_far) == sorted(set(tokens_so_far))
        assert tokens_so_far[-1] == stats.tokens == tokens
        assert seconds[0] > 0
        assert list(seconds) == sorted(seconds)
        assert seconds[-1] < stats.total_seconds
    assert phases == [("optimization", True)] * 2 + [("acceleration", True)]
    assert len(search.history) == 12
    blocks = {"attention blocks": search.best.skipped_attention, "MLP blocks": search.best.skipped_mlp}
    for name, skipped in blocks.items():
        assert lines_of(spec)[name] == "".join("□" if layer in skipped else "■" for layer in range(8))


@pytest.mark.parametrize(
    ("draft", "attention", "mlp"),
    [
        (SkipLayers(attention=(1, 4), mlp=(2, 4)), "■□■■□■", "■■□■□■"),
        (EarlyExit(2), "■■■■■■", "■■■■■■"),  # no exit is known to pay yet
    ],
)
def test_pictures_of_blocks(draft: Any, attention: str, mlp: str) -> None:
    spec = SelfSpec(draft)
    generated(tiny_llama(6), prompt(), 4, assistant=spec)
    assert spec.stats is not None
    assert (spec.stats.phase, spec.stats.matchness, spec.stats.drafts) == ("", [], True)
    lines = lines_of(spec)
    assert (lines["attention blocks"], lines["MLP blocks"]) == (attention, mlp)
    assert "search" not in lines
