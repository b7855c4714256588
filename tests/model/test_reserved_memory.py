"""Memory that a call reserves follows from what it can use."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaForCausalLM

from helpers.calls import PAST
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.processes import peft_calls_old_name
from hf_selfspec import EarlyExit, FixedLength, OnTheFlySearch, SelfSpec, TopKTree
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache, cache_for

PROMPT, NEW, LAYERS = 9, 10, 6


SPECS: dict[str, tuple[SelfSpec, int]] = {
    "line": (SelfSpec(EarlyExit(3), FixedLength(1024), max_draft=1024), NEW + 1),
    "rule": (SelfSpec(EarlyExit(3), max_draft=1024), NEW + 1),
    "tree": (SelfSpec(EarlyExit(3), FixedLength(4), TopKTree(((1.0, 256),))), 4 * VOCABULARY),
    "window": (SelfSpec.swift(search=OnTheFlySearch(context_window=400)), 25 + 1),
}


class Held(TorchDispatchMode):
    """Slots of keys or values that are in memory at the same time, all layers and rows together: at present, and the
    most of them; and the most of one tensor."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self._shape = (model.config.num_key_value_heads, model.config.head_dim)
        self._tensors = Counter[int]()  # of each piece of memory
        self.now = self.most = self.longest = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **kwargs or {})
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(tensor, torch.Tensor) and (*tensor.shape[-3:-2], *tensor.shape[-1:]) == self._shape:
                storage = tensor.untyped_storage()
                slots = storage.nbytes() // (math.prod(self._shape) * tensor.itemsize)
                self._count(1, storage.data_ptr(), slots)
                self.longest = max(self.longest, tensor.shape[-2])
                weakref.finalize(tensor, self._count, -1, storage.data_ptr(), slots)
        return found

    def _count(self, more: int, memory: int, slots: int) -> None:
        before = self._tensors[memory] > 0
        self._tensors[memory] += more
        self.now += slots * ((self._tensors[memory] > 0) - before)
        self.most = max(self.most, self.now)


@pytest.mark.filterwarnings("ignore:OnTheFlySearch:UserWarning")  # its window is longer than the text
@pytest.mark.parametrize("name", SPECS)
def test_room_is_for_what_a_call_can_use(name: str, llama: LlamaForCausalLM) -> None:
    spec, ahead = SPECS[name]
    inputs, options = ragged_batch((PROMPT,)), {"max_new_tokens": NEW, "do_sample": False}
    with Held(llama) as held:
        ids = llama.generate(**inputs, **options, assistant=spec)
    assert ids.tolist() == llama.generate(**inputs, **options).tolist()
    # The line of the draft and its siblings, or the layers' copies; a quarter more where a buffer had to grow. Caches
    # have multiples of 256 slots.
    most = 1.25 * (PROMPT + NEW + max(ahead, LAYERS)) + 1
    assert PROMPT + NEW <= held.longest <= 256 * math.ceil(most / 256)


def test_memory_is_free_after_a_call(llama: LlamaForCausalLM) -> None:
    """At once, without Python's search for reference cycles."""
    gc.disable()
    try:
        with Held(llama) as held:
            llama.generate(**ragged_batch((PROMPT,)), max_new_tokens=4, assistant=SelfSpec(EarlyExit(3)))
        assert held.now == 0 < held.most
    finally:
        gc.enable()


def test_a_chat_holds_keys_and_values_once(llama: LlamaForCausalLM) -> None:
    """A user's cache is moved: one layer's are there twice at a time, as in plain's steps, with room for a draft."""
    most = []
    for spec in (None, SelfSpec(EarlyExit(3), FixedLength(4)), SelfSpec()):
        past, ids, peaks = DynamicCache(config=llama.config), torch.zeros(1, 0, dtype=torch.long), list[int]()
        with Held(llama) as held:
            for turn in (torch.arange(1000)[None] % 89 + 3, torch.arange(40)[None] + 3):
                held.most = held.now
                ids = torch.cat([ids, turn], dim=1)
                ids = llama.generate(ids, **{PAST: past}, max_new_tokens=9, do_sample=False, assistant=spec)
                peaks.append(held.most)
        most.append(peaks)
    plain, *ours = most
    assert plain[1] > 2 * LAYERS * 1040
    for peaks in ours:
        assert all(found < expected + 2 * LAYERS * 256 for found, expected in zip(peaks, plain, strict=True))


def test_no_more_room_is_wanted_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After there was no memory to have more for a look, what needs no more goes on."""
    cache, states = SpeculativeCache(2, 1, 256), torch.ones(1, 2, 4, 8)
    cache.seek([0], 4)
    for layer in range(2):
        cache.update(states, states, layer)

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "new_empty", exhausted)
    cache.seek([4], 400)
    with pytest.raises(torch.OutOfMemoryError):
        cache.update(torch.ones(1, 2, 400, 8), torch.ones(1, 2, 400, 8), 0)
    cache.stay()
    cache.seek([4], 4)
    keys, _ = cache.update(2 * states, states, 0)
    assert keys[0, 0, :, 0].tolist() == [1.0] * 4 + [2.0] * 4


@peft_calls_old_name
def test_layers_share_buffers_where_adapters_wrap_their_weights() -> None:
    """A GPU is handed work for each buffer."""
    model: Any = tiny_llama(layers=3)
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    (shape,) = set(cache_for(model, Anatomy.of(model), 1, 64).shapes)
    assert shape is not None
