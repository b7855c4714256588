"""Memory that a call reserves follows from what it can use."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from hf_selfspec import ClosestLayers, CostTree, EarlyExit, FixedLength, SelfSpec, SettingError, SkipLayers, TopKTree
from hf_selfspec.batch import Text
from hf_selfspec.model import cache
from hf_selfspec.model.cache import SpeculativeCache

PROMPT, NEW, LAYERS = 9, 10, 6


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of caches and columns of texts, as they are made and when they grow."""
    found: list[int] = []

    class Watched(SpeculativeCache):
        def __init__(self, num_layers: int, batch_size: int, capacity: int, *given: Any) -> None:
            found.append(capacity)
            super().__init__(num_layers, batch_size, capacity, *given)

        def seek(self, *given: Any) -> None:
            super().seek(*given)
            found.append(self.capacity)

    ensure = Text.ensure

    def watched(self: Text, columns: int) -> None:
        ensure(self, columns)
        found.append(self.ids.shape[1])

    monkeypatch.setattr(cache, "SpeculativeCache", Watched)
    monkeypatch.setattr(Text, "ensure", watched)
    return found


SPECS: dict[str, tuple[SelfSpec, int]] = {
    "line": (SelfSpec(EarlyExit(3), FixedLength(1024), max_draft=1024), NEW + 1),
    "rule": (SelfSpec(EarlyExit(3), max_draft=1024), NEW + 1),
    "tree": (SelfSpec(EarlyExit(3), FixedLength(4), TopKTree(((1.0, 256),))), 4 * VOCABULARY),
    "priced tree": (SelfSpec(EarlyExit(3), FixedLength(4), CostTree(1.0, most=256)), 4 + VOCABULARY),
    "window": (SelfSpec(SkipLayers(search=ClosestLayers(context_window=400))), 25 + 1),
}


@pytest.mark.parametrize("name", SPECS)
def test_room_is_for_what_a_call_can_use(name: str, reserved: list[int], llama: LlamaForCausalLM) -> None:
    spec, ahead = SPECS[name]
    inputs, options = ragged_batch((PROMPT,)), {"max_new_tokens": NEW, "do_sample": False}
    ids = llama.generate(**inputs, **options, assistant=spec)
    assert ids.tolist() == llama.generate(**inputs, **options).tolist()
    assert len(reserved) > 3
    # The line of the draft and its siblings, or the layers' copies; a quarter more where a buffer had to grow. Caches
    # have multiples of 256 slots.
    assert max(reserved) <= 256 * math.ceil((1.25 * (PROMPT + NEW + max(ahead, LAYERS)) + 1) / 256)


def test_room_for_a_text_that_ends_early(reserved: list[int]) -> None:
    """What is reserved follows from the most that it may get."""
    llama = tiny_llama()  # its drafts end early too
    ends = llama.generate(**ragged_batch((PROMPT,)), max_new_tokens=NEW, do_sample=False)[0, -1].item()
    spec = SelfSpec(EarlyExit(3), FixedLength(1024), TopKTree(((1.0, 256),)), max_draft=1024)
    llama.generate(**ragged_batch((PROMPT,)), max_new_tokens=100, do_sample=False, eos_token_id=ends, assistant=spec)
    assert reserved[0] <= PROMPT + 2 * 100 + VOCABULARY


@pytest.mark.parametrize("number", [1025, 10**5000], ids=["1025", "1e5000"])
def test_numbers_that_nobody_can_use(number: int) -> None:
    with pytest.raises(SettingError, match=r"layerskip\(max_draft\) must be at most 1024"):
        SelfSpec.layerskip(max_draft=number)
    with pytest.raises(SettingError, match=r"FixedLength\(num_tokens\) must be at most 1024"):
        FixedLength(number)
    with pytest.raises(SettingError, match=r"CostTree\(most\) must be at most 256"):
        CostTree(most=number)
