"""What attention gets: which kernels it may take, and masks where there have to be some."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, LlamaForCausalLM, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from helpers.calls import PAST
from hf_selfspec import Adapter, EarlyExit, EarlyExitAdapter, FixedLength, SelfSpec
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.model import prefill
from hf_selfspec.model.attention import without_cudnn_attention

SPECS = {
    "default": SelfSpec,
    "exit": lambda: SelfSpec(EarlyExit(2), FixedLength(3)),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(Adapter(2, 64, 4)), FixedLength(3)),
}
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


class Calls(TorchFunctionMode):
    """Records each call of scaled dot-product attention: its queries, its mask, and whether cuDNN may serve it.

    And the strides of its keys, with which a kernel's plans are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, torch.Tensor | None, bool]] = []
        self.strides: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            self.strides.add(args[1].stride())
            self.found.append((args[0].shape[-2], mask, torch.backends.cuda.cudnn_sdp_enabled()))
        return func(*args, **kwargs)


def ragged(rows: int = 3, width: int = 40) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (rows, width), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 7 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Telling(type(ALL_MASK_ATTENTION_FUNCTIONS)):  # type: ignore[misc]  # a class that is found at runtime
    """Masks that are told something of which nobody knows."""

    def __getitem__(self, name: str) -> Any:
        return partial(ALL_MASK_ATTENTION_FUNCTIONS[name], is_packed=True)


def test_a_mask_argument_that_is_not_known_is_refused(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ours; plain ``generate`` goes on beside it."""
    expected = llama.generate(**ragged(), **OPTIONS)
    monkeypatch.setattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", Telling())
    with pytest.raises(UnsupportedModelError, match=r"masks made with is_packed, .* Call generate without `assistant`"):
        llama.generate(**ragged(), **OPTIONS, assistant=SelfSpec())
    assert torch.equal(llama.generate(**ragged(), **OPTIONS), expected)


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_off_in_each_attention_of_ours(llama: LlamaForCausalLM, enabled: bool) -> None:
    """But stays where it is the only kernel: attention without any raises an error on a GPU."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        with Calls() as calls:
            llama.generate(**ragged(), **OPTIONS, assistant=SPECS["adapter"]())
        assert calls.found
        assert not any(on for *_, on in calls.found)
        assert torch.backends.cuda.cudnn_sdp_enabled() is enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn_attention():
        assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", SPECS)
def test_keys_have_the_same_strides_after_prompts_of_similar_lengths(llama: LlamaForCausalLM, name: str) -> None:
    strides = []
    for width in (40, 90):
        with Calls() as calls:
            llama.generate(**ragged(width=width), **OPTIONS, assistant=SPECS[name]())
        strides.append(calls.strides)
    assert strides[0] == strides[1]


@pytest.mark.parametrize("name", SPECS)
def test_prompts_of_different_lengths_need_no_mask(llama: LlamaForCausalLM, name: str) -> None:
    """The causal rule alone is exact, so that flash attention can serve them."""
    inputs = ragged()
    expected = llama.generate(**inputs, **OPTIONS)
    with Calls() as calls:
        found = llama.generate(**inputs, **OPTIONS, assistant=SPECS[name]())
    assert torch.equal(found, expected)
    prompts = [mask for queries, mask, _ in calls.found if queries == inputs["input_ids"].shape[1]]
    assert len(prompts) == llama.config.num_hidden_layers + (name == "adapter")
    assert all(mask is None for mask in prompts)


def test_sdpa_gets_one_additive_mask_a_forward(llama: LlamaForCausalLM) -> None:
    """It would make one of a boolean mask in each layer."""
    with Calls() as calls:
        llama.generate(**ragged(), **OPTIONS, assistant=SelfSpec.lookup())
    masks = [mask for _, mask, _ in calls.found if mask is not None]
    assert {mask.dtype for mask in masks} == {torch.float32}
    assert len({id(mask) for mask in masks}) == len(masks) / llama.config.num_hidden_layers


@pytest.mark.parametrize("name", SPECS)
def test_texts_continue_in_pieces(llama: LlamaForCausalLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask over a long text is as large as a piece of it needs."""
    monkeypatch.setattr(prefill, "_MASK", 1)
    monkeypatch.setattr(prefill, "_LEAST", 5)
    first, further = ragged(), torch.randint(3, 90, (3, 23), generator=torch.Generator().manual_seed(2))
    inputs = {
        "input_ids": torch.cat([first["input_ids"], further], dim=1),
        "attention_mask": torch.cat([first["attention_mask"], torch.ones_like(further)], dim=1),
    }
    caches = []
    for _ in range(2):
        cache = DynamicCache(config=llama.config)
        llama(**first, **{PAST: cache}, use_cache=True)
        caches.append(cache)
    expected = llama.generate(**inputs, **OPTIONS, **{PAST: caches[0]})
    with Calls() as calls:
        found = llama.generate(**inputs, **OPTIONS, **{PAST: caches[1]}, assistant=SPECS[name]())
    assert torch.equal(found, expected)
    group = llama.config.num_attention_heads // llama.config.num_key_value_heads
    pieces = [mask for _, mask, _ in calls.found[: 5 * llama.config.num_hidden_layers] if mask is not None]
    assert pieces
    assert max(mask.shape[-2] for mask in pieces) <= 5 * group
