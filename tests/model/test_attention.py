"""What attention gets: which kernels it may take, and masks where there have to be some."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, LlamaForCausalLM, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from helpers.calls import PAST
from helpers.captured import attention_with_sums
from helpers.machine import Machine
from helpers.models import BATCH, ROW, ragged_batch
from hf_selfspec import Adapter, EarlyExit, EarlyExitAdapter, FixedLength, SelfSpec, TopKTree
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.model.attention import interface as attention
from hf_selfspec.model.attention import split as split_attention
from hf_selfspec.model.attention.split import attention_in_parts, masks_of_parts

SPECS = {
    "default": SelfSpec,
    "exit": lambda: SelfSpec(EarlyExit(2), FixedLength(3)),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(Adapter(2, 64, 4)), FixedLength(3)),
}
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


class Calls(TorchFunctionMode):
    """Records the number of queries and the mask of each call of scaled dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, torch.Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.found.append((args[0].shape[-2], kwargs.get("attn_mask")))
        return func(*args, **kwargs or {})


RAGGED = ragged_batch((40, 33, 26), vocabulary=90)


class Telling(type(ALL_MASK_ATTENTION_FUNCTIONS)):  # type: ignore[misc]  # a class that is found at runtime
    """Masks that are told something of which nobody knows."""

    def __getitem__(self, name: str) -> Any:
        return partial(ALL_MASK_ATTENTION_FUNCTIONS[name], is_packed=True)


def test_a_mask_argument_that_is_not_known_is_refused(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ours; plain ``generate`` goes on beside it."""
    expected = llama.generate(**RAGGED, **OPTIONS)
    monkeypatch.setattr(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", Telling())
    with pytest.raises(UnsupportedModelError, match=r"masks made with is_packed, .* call generate without `assistant`"):
        llama.generate(**RAGGED, **OPTIONS, assistant=SelfSpec())
    assert torch.equal(llama.generate(**RAGGED, **OPTIONS), expected)


@pytest.mark.parametrize("name", SPECS)
def test_prompts_of_different_lengths_need_no_mask(llama: LlamaForCausalLM, name: str) -> None:
    """The causal rule alone is exact, so that flash attention can serve them."""
    expected = llama.generate(**RAGGED, **OPTIONS)
    with Calls() as calls:
        found = llama.generate(**RAGGED, **OPTIONS, assistant=SPECS[name]())
    assert torch.equal(found, expected)
    prompts = [mask for queries, mask in calls.found if queries == RAGGED["input_ids"].shape[1]]
    assert len(prompts) == llama.config.num_hidden_layers + (name == "adapter")
    assert all(mask is None for mask in prompts)


@pytest.mark.parametrize("name", SPECS)
def test_texts_continue_in_pieces(llama: LlamaForCausalLM, name: str, machine: Machine) -> None:
    """A mask over a long text is as large as a piece of it needs."""
    machine.masks_have_rows(5)
    further = torch.randint(3, 90, (3, 23), generator=torch.Generator().manual_seed(2))
    mask = torch.cat([RAGGED["attention_mask"], torch.ones_like(further)], dim=1)
    inputs = {"input_ids": torch.cat([RAGGED["input_ids"], further], dim=1), "attention_mask": mask}
    caches = [DynamicCache(config=llama.config) for _ in range(2)]
    for cache in caches:
        llama(**RAGGED, **{PAST: cache}, use_cache=True)
    expected = llama.generate(**inputs, **OPTIONS, **{PAST: caches[0]})
    with Calls() as calls:
        found = llama.generate(**inputs, **OPTIONS, **{PAST: caches[1]}, assistant=SPECS[name]())
    assert torch.equal(found, expected)
    group = llama.config.num_attention_heads // llama.config.num_key_value_heads
    pieces = [mask for _, mask in calls.found[: 5 * llama.config.num_hidden_layers] if mask is not None]
    assert pieces
    assert max(mask.shape[-2] for mask in pieces) <= 5 * group


STARTS = {"line": (90, 90, 90), "ragged": (3, 250, 70), "at the front": (0, 1, 0)}


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_parts_are_the_whole(parts: int, starts: tuple[int, ...]) -> None:
    """In double precision, with rows in parts where they see nothing, and whatever is in hidden slots."""
    (k, m, n, h), generator = (2, 6, 256, 8), torch.Generator().manual_seed(0)
    query = torch.randn(3, k, m, h, generator=generator, dtype=torch.float64)
    key, value = 30 * torch.randn(2, 3, k, n, h, generator=generator, dtype=torch.float64)
    tree = torch.tensor([[start, start, start + 1, start + 1, start + 2, start + 2] for start in starts])
    slots = torch.arange(n)
    visible = (slots <= tree[:, None, :, None]) & ((slots != 2) | (tree[:, None, :, None] < 3))
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    expected, _ = attention_with_sums(query, key, value, mask, 0.3)
    found = attention_in_parts(query, key, value, masks_of_parts(mask, k, parts), 0.3, attention_with_sums)
    assert (found - expected).abs().max() < 1e-12


def test_parts_are_aligned_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a device of 132 processors runs at once, whose masks have aligned rows and little memory."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    for has_kernel, shape, keys, parts in (
        (True, (1, 8, 128, 128), 8192, 32),
        (True, (1, 8, 4, 128), 4672, 8),  # a window
        (True, (8, 8, 256, 128), 8192, 1),  # whose masks would take too much memory
        (False, (1, 8, 64, 128), 8192, 1),
    ):
        monkeypatch.setattr(split_attention, "can_use_efficient_attention", lambda _, has_kernel=has_kernel: has_kernel)
        query: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"), dtype=torch.bfloat16, shape=shape)
        assert split_attention.parts_for(query, torch.empty(1, 1, keys, 1)) == parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_part_without_keys_counts_for_nothing(dtype: torch.dtype) -> None:
    mask = torch.full((1, 1, 2, 8), -torch.inf, dtype=dtype)
    mask[..., 0] = 0.0
    states = torch.ones(1, 1, 8, 4, dtype=dtype)
    masks = masks_of_parts(mask, 1, 2)
    assert (1.5 * masks.float()).isfinite().all()  # kernels multiply by log2(e)
    states[:, :, 4:] = 3.0
    found = attention_in_parts(states[:, :, :2], states, states, masks, None, attention_with_sums)
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("spec", ["line", "tree"])
@pytest.mark.parametrize("prompt", [ROW, BATCH], ids=["row", "batch"])
def test_lines_of_even_rows_have_no_mask(
    prompt: dict[str, torch.Tensor], spec: str, llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel knows what tokens at a text's end see. Trees, and rows of different lengths, have one."""
    expected = llama.generate(**prompt, **OPTIONS)
    monkeypatch.setattr(attention, "takes_lines", lambda query, key: True)
    specs = {"line": SelfSpec(EarlyExit(2), FixedLength(3)), "tree": SelfSpec(EarlyExit(2), FixedLength(3), TopKTree())}
    with Calls() as calls:
        ids = llama.generate(**prompt, **OPTIONS, assistant=specs[spec])
    assert torch.equal(ids, expected)
    masks = [mask for _, mask in calls.found if mask is not None]
    assert masks
    if spec == "line" and prompt is ROW:
        assert all(type(mask) is CausalBias for mask in masks)
    else:
        assert any(type(mask) is torch.Tensor for mask in masks)
