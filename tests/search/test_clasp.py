"""Passes beside the text, and the layers without which its states stay closest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.search.beside_text import after_prefill, by_hand, keys_and_values, prefilled
from helpers.search.generating import generated, prompt, search_of
from hf_selfspec import SelfSpec, SkipLayers
from hf_selfspec.batch import Text
from hf_selfspec.draft import searching
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search.clasp import closest_layers
from hf_selfspec.search.on_the_fly import ClosestLayers

pytestmark = pytest.mark.usefixtures("no_grad")


WINDOW = 7


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("lengths", [(20,), (20, 13, 16)], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "mixtral"])
def test_window_beside_the_text(name: str, lengths: tuple[int, ...]) -> None:
    """A plan predicts after tokens of the text what it would predict in their place, and nothing there changes."""
    target, text = after_prefill(build(name), lengths)
    layers = target.anatomy.num_layers
    plan = LayerPlan(layers, frozenset([1]), frozenset([1]))
    columns = torch.tensor(lengths)[:, None] - 1 - WINDOW + torch.arange(WINDOW)
    tokens = text.ids.gather(1, columns)
    with target.prepared():
        before = keys_and_values(target, text)
        beside = target.step(tokens, text.last_slots(), plan, nodes=TreeLayout.replay(WINDOW)).logits
        assert all(map(torch.equal, keys_and_values(target, text), before))
        in_place = target.step(tokens, [root - WINDOW for root in text.last_slots()], plan).logits
    assert beside is not None
    assert in_place is not None
    torch.testing.assert_close(beside, in_place, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layers", "most"), [(range(1, 7), 5), (range(1, 7), 2), ((1, 2, 4, 6), 4)], ids=["nearly all", "few", "some"]
)
def test_closest_layers(layers: Sequence[int], most: int, seed: int) -> None:
    """For each size those of the dynamic programme; the text's keys and values stay as they are."""
    model = tiny_llama(8, seed, factor=1.0)
    target, text = after_prefill(model, (20,))
    before = keys_and_values(target, text)
    with target.prepared():
        plans = closest_layers(target, text, layers, most)
    assert [sorted(plan.skipped_layers) for plan in plans] == by_hand(model, text.ids[:, :20], layers, most)
    assert [len(plan.skipped_layers) for plan in plans] == list(range(1, most + 1))
    assert all(plan.skipped_attention == plan.skipped_mlp for plan in plans)
    assert all(map(torch.equal, keys_and_values(target, text), before))


def test_closest_layers_of_a_batch() -> None:
    """One plan for all rows: that of one row where all are alike, and not that of the first where they differ."""
    model = tiny_llama(8, factor=1.0)
    found = []
    for text_of in (lambda ids: ids[:1].repeat(3, 1), lambda ids: ids):
        target, text = after_prefill(model, (20, 20, 20))
        target, text = prefilled(model, text_of(text.ids[:, :20]), (20, 20, 20))
        with target.prepared():
            found.append(closest_layers(target, text, range(1, 7), 3))
    alike, different = ([sorted(plan.skipped_layers) for plan in plans] for plans in found)
    assert alike == by_hand(model, text.ids[:1, :20], range(1, 7), 3)
    assert different != alike


def test_closest_layers_draft_from_the_second_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no window; each window of text after the first brings one proposal more."""
    model, proposals, drafts = tiny_llama(8, factor=1.0), [], []
    original, propose = searching.closest_layers, SearchingDraft.propose

    def watched(target: Target, text: Text, layers: Sequence[int], most: int) -> list[LayerPlan]:
        proposals.append(text.lengths[0])
        found = original(target, text, layers, most)
        expected = by_hand(model, text.ids[:, : text.lengths[0]], range(1, 7), most)
        assert [sorted(plan.skipped_layers) for plan in found] == expected
        return found

    monkeypatch.setattr(searching, "closest_layers", watched)
    monkeypatch.setattr(
        SearchingDraft, "propose", lambda self, text, room: drafts.append(self.plan) or propose(self, text, room)
    )
    spec = SelfSpec.swift(ratio=0.5, search=ClosestLayers(context_window=8, target_matchness=1.0, budget=1.0))
    generated(model, prompt(), 60, assistant=spec)
    search = search_of(spec, model)
    assert drafts[0] == SkipLayers().plan(Anatomy.of(model))
    assert len(drafts[1].skipped_layers) == 3
    assert proposals[0] <= 6 + 4
    assert 3 < len(proposals) <= 2 + 60 // 8
    assert len(search.history) > len(proposals)
    assert {len(done.plan.skipped_layers) for done in search.trials} == {3}
