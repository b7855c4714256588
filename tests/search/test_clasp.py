"""Passes beside the text, and the layers without which its states stay closest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.search.beside_text import after_prefill, by_hand, keys_and_values, prefilled
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.partial import ForwardPass
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.proposers import closest_layers

pytestmark = pytest.mark.usefixtures("no_grad")


WINDOW = 7


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "mixtral"])
def test_window_beside_the_text(name: str) -> None:
    """A plan predicts after tokens of the text what it would predict in their place, and nothing there changes."""
    lengths = (20, 13, 16)
    target, text = after_prefill(build(name), lengths)
    layers = target.anatomy.num_layers
    plan = LayerPlan(layers, frozenset([1]), frozenset([1]))
    columns = torch.tensor(lengths)[:, None] - 1 - WINDOW + torch.arange(WINDOW)
    tokens = text.ids.gather(1, columns)
    with target.prepared():
        before = keys_and_values(target, text)
        beside = target.step(tokens, text.last_slots(), ForwardPass(plan), TreeLayout.replay(WINDOW)).logits
        assert all(map(torch.equal, keys_and_values(target, text), before))
        in_place = target.step(tokens, [root - WINDOW for root in text.last_slots()], ForwardPass(plan)).logits
    assert beside is not None
    assert in_place is not None
    torch.testing.assert_close(beside, in_place, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layers", "most", "seed"), [(range(1, 7), 5, 0), (range(1, 7), 2, 1), ((1, 2, 4, 6), 4, 2)])
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
