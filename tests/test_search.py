"""Which blocks to skip: passes beside the text, and what chooses from them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from architectures import build
from conftest import tiny_llama
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from hf_selfspec import SettingError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.partial import LayerPlan
from hf_selfspec.model.target import Nodes, Target
from hf_selfspec.search.clasp import closest_layers
from hf_selfspec.search.skip_space import SkipSpace
from hf_selfspec.types import Text

WINDOW = 7


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def after_prefill(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    """Rows of these lengths, all tokens of which but the last are in the cache; prepare the target to use it."""
    anatomy = Anatomy.of(model)
    width = max(lengths)
    ids = torch.randint(3, 90, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    text = Text.of(ids, [0] * len(lengths), 20)
    text.lengths = list(lengths)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, len(lengths), width + 20))
    with target.prepared():
        target.prefill(ids[:, :-1], [0] * len(lengths), [length - 1 for length in lengths])
    target.roots = text.roots()
    return target, text


@pytest.mark.parametrize("lengths", [(20,), (20, 13, 16)], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "mixtral"])
def test_window_beside_the_text(name: str, lengths: tuple[int, ...]) -> None:
    """A plan says after tokens of the text what it would have said in their place, and nothing there changes."""
    target, text = after_prefill(build(name), lengths)
    layers = target.anatomy.num_layers
    plan = LayerPlan(layers, frozenset([1]), frozenset([1]))
    columns = torch.tensor(lengths)[:, None] - 1 - WINDOW + torch.arange(WINDOW)
    tokens = text.ids.gather(1, columns)
    with target.prepared():
        before = [(layer.keys.clone(), layer.values.clone()) for layer in target.cache.layers]
        beside = target.step(tokens, text.roots(), plan, nodes=Nodes.again(WINDOW)).logits
        for (keys, values), layer in zip(before, target.cache.layers, strict=True):
            for row, root in enumerate(text.roots()):
                assert torch.equal(layer.keys[row, :, :root], keys[row, :, :root])
                assert torch.equal(layer.values[row, :, :root], values[row, :, :root])
        in_place = target.step(tokens, [root - WINDOW for root in text.roots()], plan).logits
    assert beside is not None
    assert in_place is not None
    torch.testing.assert_close(beside, in_place, rtol=1e-5, atol=1e-5)


def by_hand(model: LlamaForCausalLM, ids: torch.Tensor, count: int) -> list[int]:
    """The dynamic programme with the layers called one by one, for the last of ``ids`` ``[1, s]``."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    position = torch.tensor([[ids.shape[1] - 1]])
    start = model.model.embed_tokens(ids[:, -1:])
    rotary = model.model.rotary_emb(start, position)

    def run(layer: int, state: torch.Tensor) -> torch.Tensor:
        return model.model.layers[layer](
            state, position_embeddings=rotary, position_ids=position, past_key_values=copy.deepcopy(cache)
        )

    last = model.config.num_hidden_layers - 1
    states = {0: (run(0, start), [])}
    for layer in range(1, last):
        whole = run(layer, states[0][0])
        found = {0: (whole, [])}
        for skipped in range(1, min(count, layer) + 1):
            ways = [(states[skipped - 1][0], [*states[skipped - 1][1], layer])]
            if skipped in states:
                ways.append((run(layer, states[skipped][0]), states[skipped][1]))
            found[skipped] = max(ways, key=lambda way: torch.cosine_similarity(way[0], whole, dim=-1).item())
        states = found
    return states[count][1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_closest_layers(count: int, seed: int) -> None:
    model = tiny_llama(8, seed, factor=1.0)
    target, text = after_prefill(model, (20,))
    with target.prepared():
        plan = closest_layers(target, text, count)
    assert sorted(plan.skipped_layers) == by_hand(model, text.ids[:, :20], count)
    assert plan.skipped_attention == plan.skipped_mlp


def test_closest_layers_of_a_batch() -> None:
    """One plan for all rows: that of one row where all are alike, and not that of the first where they differ."""
    model = tiny_llama(8, factor=1.0)
    plans = []
    for text_of in (lambda ids: ids[:1].repeat(3, 1), lambda ids: ids):
        target, text = after_prefill(model, (20, 20, 20))
        text.ids = text_of(text.ids)
        with target.prepared():
            target.prefill(text.ids[:, :19], [0] * 3, [19] * 3)
            plans.append(closest_layers(target, text, 3))
    assert sorted(plans[0].skipped_layers) == by_hand(model, text.ids[:1, :20], 3)
    assert plans[1] != plans[0]


def test_skip_space() -> None:
    space = SkipSpace.of(Anatomy.of(tiny_llama(6)))
    assert len(space.blocks) == 8
    assert space.count(0.5) == 4
    assert space.count(0.01) == 1
    plan = space.highest(np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6]), 0.5)
    assert plan == LayerPlan(6, frozenset(), frozenset([1, 2, 3, 4]))
    assert space.plan(space.places(plan)) == plan
    chance = np.random.default_rng(0)
    drawn = [space.places(space.random(chance, 0.25)) for _ in range(200)]
    assert {len(places) for places in drawn} == {2}
    assert set().union(*drawn) == set(range(8))


def test_skip_space_of_shared_keys() -> None:
    """Gemma 3n: attention whose keys later layers read always runs."""
    anatomy = Anatomy.of(build("gemma3n_text"))
    blocks = SkipSpace.of(anatomy).blocks
    assert anatomy.kv_sources
    assert not any((layer, "attention") in blocks for layer in anatomy.kv_sources)


def test_too_few_layers() -> None:
    with pytest.raises(SettingError, match=r"at least 4 layers, LlamaForCausalLM has 3"):
        SkipSpace.of(Anatomy.of(tiny_llama(3)))
