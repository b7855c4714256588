"""The model as the package sees it: anatomy, partial forwards, cache, masks, attention, prompts."""

from __future__ import annotations

from collections import Counter
from math import nan

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.calls import check_lossless, new_spec
from helpers.machine import Machine
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from hf_selfspec import (
    Architecture,
    EarlyExit,
    FixedLength,
    SelfSpec,
    SkipLayers,
    TopKTree,
    register_architecture,
)
from hf_selfspec.errors import SettingError, UnsupportedModelError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.attention.interface import MaskSpec
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.forward_pass import ForwardPass, obeying, partial_forwards
from hf_selfspec.model.logits import Logits, Tops
from hf_selfspec.model.plan import LayerPlan


def test_what_is_uncertain_is_an_error_that_says_what_to_do(machine: Machine) -> None:
    """Layers, and blocks within them."""
    machine.no_architectures_are_registered()
    with pytest.raises(SettingError, match="takes a model type and an Architecture"):
        register_architecture("llama", "model.layers")
    model = tiny_llama(layers=3)
    model.model.other = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)])
    with pytest.raises(UnsupportedModelError, match=r"2 module lists of num_hidden_layers=3.*register_architecture"):
        Anatomy.of(model)
    register_architecture("llama", Architecture(layers="model.layers", attention="mixer"))
    anatomy = Anatomy.of(model)
    assert anatomy.num_layers == 3
    with pytest.raises(UnsupportedModelError, match="attention block of layer 1 was not found"):
        SkipLayers(attention=[1]).plan(anatomy)
    assert SkipLayers(attention=[1], mlp=[1]).plan(anatomy).skipped_layers == {1}


def test_skipped_blocks_contribute_nothing(llama: LlamaForCausalLM, fresh_llama: LlamaForCausalLM) -> None:
    ids, silent = torch.randint(2, VOCABULARY, (1, 7)), fresh_llama
    silent.model.layers[2].self_attn.o_proj.weight.data.zero_()
    silent.model.layers[3].mlp.down_proj.weight.data.zero_()
    plan = LayerPlan(6, frozenset({2}), frozenset({3}))
    with torch.no_grad(), partial_forwards(llama, Anatomy.of(llama)), obeying(ForwardPass(plan)):
        logits = llama(ids).logits
    torch.testing.assert_close(logits, silent(ids).logits)


@pytest.mark.parametrize("draft", [EarlyExit(3), SkipLayers([2], [4])])
def test_an_mlp_that_stands_in_several_layers(fresh_llama: LlamaForCausalLM, draft: EarlyExit | SkipLayers) -> None:
    """It is skipped where the plan says so, and nowhere else."""
    fresh_llama.model.layers[4].mlp = fresh_llama.model.layers[2].mlp
    for tree in (None, TopKTree(((0.999, 3), (1.0, 1)))):
        check_lossless(fresh_llama, SelfSpec(draft, FixedLength(4), tree))


@pytest.mark.parametrize("tree", [None, TopKTree(((0.999, 3), (1.0, 1)))])
@pytest.mark.parametrize("draft", [EarlyExit(3), SkipLayers([3], [4])])
def test_verification_does_not_recompute_the_exact_prefix(draft: EarlyExit | SkipLayers, tree: TopKTree | None) -> None:
    model = tiny_llama()
    tokens: Counter[int] = Counter()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, index=index: tokens.update({index: args[0].shape[1]}))
    spec = SelfSpec(draft=draft, stop=FixedLength(4), tree=tree)
    ids = torch.randint(2, VOCABULARY, (1, 5))
    model.generate(ids, max_new_tokens=5, do_sample=False, assistant=spec)  # which checks the hooks
    tokens.clear()
    model.generate(ids, max_new_tokens=16, do_sample=False, assistant=spec)
    stats = spec.stats
    assert stats is not None
    # Each drafted token and each round's first token goes through layers 0 to 2 once; siblings come on top.
    once = 5 + stats.drafted + stats.rounds
    if tree is None:
        assert [tokens[index] for index in range(3)] == [once] * 3
        assert tokens[5] == once + (0 if isinstance(draft, EarlyExit) else stats.drafted)
    else:
        assert tokens[0] == tokens[1] == tokens[2] > once
        assert tokens[5] == tokens[0] + (0 if isinstance(draft, EarlyExit) else stats.drafted)


def test_nothing_unknown_is_seen(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers begin as they come from memory; whatever that holds, no forward sees it."""
    make = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kwargs: make(self, *args, **kwargs).fill_(nan))
    inputs = ragged_batch()
    plain = llama.generate(**inputs, max_new_tokens=12)
    for spec in (new_spec(), SelfSpec.lookup(), SelfSpec(EarlyExit(3), FixedLength(3), TopKTree(((1.0, 3),)))):
        assert torch.equal(llama.generate(**inputs, max_new_tokens=12, assistant=spec), plain)
    cache, states = SpeculativeCache(1, 2, capacity=8), torch.ones(2, 1, 1, 1)
    cache.seek([3, 1], 1)
    assert cache.update(states, states, 0)[0].view(2, 4).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    cache.addresses()
    assert cache.layers[0].buffers()[0].isfinite().all()


@pytest.mark.parametrize("vocabulary", [64 * 5, 97])
def test_of_equal_logits_the_first_is_the_best(vocabulary: int) -> None:
    """As in plain ``generate``, a NaN before all; the likeliest tokens tell it, too, unless some may be missing."""
    found = torch.randn(2, 9, vocabulary, generator=torch.Generator().manual_seed(0))
    for equal in range(1, 10):
        found[0, 0, torch.randperm(vocabulary, generator=torch.Generator().manual_seed(equal))[:equal]] = 9.0 + equal
        logits = Logits(found)
        best = found.numpy().argmax(-1).tolist()
        assert logits.best[0].tolist() == best
        sure = Tops(logits).best(2)
        assert sure == (None if equal > 7 else (best, found.amax(-1).tolist()))
    found[0, 4, 70:] = torch.nan
    logits = Logits(found)
    assert logits.best[0].tolist() == found.numpy().argmax(-1).tolist()
    assert logits.best[1].nan_to_num(-1).tolist() == found.amax(-1).nan_to_num(-1).tolist()
    assert Tops(logits).best(2) is None


def test_a_mask_that_was_freed_is_not_taken_for_another() -> None:
    """Layers may make masks of their own, which get the memory of earlier ones."""
    positions = torch.arange(6)[None]
    geometry, whole = MaskSpec(positions, 6, positions), torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    for layer in range(12):
        mask = whole.triu(-2) if layer % 2 else whole.clone()
        expected = torch.zeros(1, 1, 6, 6).masked_fill(~mask, -torch.inf).repeat(1, 1, 2, 1)
        found = geometry.for_groups(mask, 2, torch.float32)
        assert torch.equal(found, expected)
        assert found.stride(2) % 8 == 0  # what sdpa on a GPU would copy a mask for in each layer
        del mask
