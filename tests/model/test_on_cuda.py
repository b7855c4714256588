"""What a GPU alone can show: `pytest -m cuda tests/model/test_on_cuda.py`, which `examples/benchmarks/gpu.py` runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.captured import attention_with_sums
from helpers.leaves import check_differences
from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.generate.decoder import Decoder
from hf_selfspec.model import transfer
from hf_selfspec.model.attention.split import attention_in_parts, masks_of_parts, parts_for, takes_lines
from hf_selfspec.model.graphs.model_graphs import graphs_of
from hf_selfspec.model.transfer import read, upload
from hf_selfspec.tools.audits import differences_of, new_tokens

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("default"),  # torch warns of what a machine could do
]

SPECS = {
    "line": SelfSpec(EarlyExit(3), FixedLength(4)),
    "tree": SelfSpec(EarlyExit(3), FixedLength(3), TopKTree()),
    "skips": SelfSpec(SkipLayers(attention=(4,), mlp=(3,)), FixedLength(3)),
    "lookup": SelfSpec.lookup(),
    "default": SelfSpec(),
    "layerskip": SelfSpec.layerskip(),
}


def test_numbers_come_back_as_they_went() -> None:
    device = torch.device(DEVICE)
    whole = [upload([[1, -2], [1 << 40, count]], device) for count in range(50)]
    flags, shares = torch.tensor([True, False], device=device), torch.tensor([0.1, -1.5, torch.inf], device=device)
    for count, numbers in enumerate(whole):
        assert read(numbers, flags, shares) == [[[1, -2], [1 << 40, count]], flags.tolist(), shares.tolist()]


def test_kernels_of_leaves_round_as_torch_does() -> None:
    from helpers.triton_kernels import differences  # which imports Triton

    check_differences(differences(DEVICE))


@pytest.mark.parametrize("name", SPECS)
def test_drawn_tokens_leave_the_device_usable(name: str) -> None:
    """Indices out of range would end all that runs on a GPU afterwards."""
    model = tiny_llama().to(DEVICE)
    batch = {key: value.to(DEVICE) for key, value in ragged_batch().items()}
    ids = model.generate(**batch, max_new_tokens=60, do_sample=True, top_p=0.9, assistant=SPECS[name])
    assert 0 <= int(ids.min()) <= int(ids.max()) < 97


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_split_keys_are_the_whole(dtype: torch.dtype) -> None:
    """By kernels of the device, whose results are those of double precision."""
    query, states = torch.randn(2, 8, 12, 128, device=DEVICE), torch.randn(2, 2, 8, 4096, 128, device=DEVICE)
    key, value = states.to(dtype)
    mask = torch.zeros(2, 1, 12, 4096, device=DEVICE, dtype=dtype)
    for row, start in enumerate((3000, 100)):
        mask[row, :, :, start:] = torch.full((12, 4096 - start), -torch.inf, device=DEVICE).triu(1)
    parts = parts_for(query.to(dtype), key)
    assert parts > 1
    found = attention_in_parts(query.to(dtype), key, value, masks_of_parts(mask, 8, parts), None)
    expected, _ = attention_with_sums(*(x.to(dtype).double() for x in (query, key, value)), mask.double(), None)
    assert (found - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert takes_lines(query.to(dtype), key)


@contextmanager
def sync_debug_mode(name: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(name)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture
def _waits_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, except the first two, raise where the host waits for the device outside ``transfer.read``."""
    original_round, original_read = Decoder._round, transfer.read

    def strict_round(decoder: Decoder) -> None:
        with sync_debug_mode("error" if len(decoder.stats.timeline) >= 2 else "default"):
            original_round(decoder)

    def allowed_read(*tensors: torch.Tensor, **options: Any) -> list[Any]:
        with sync_debug_mode("default"):
            return original_read(*tensors, **options)

    monkeypatch.setattr(Decoder, "_round", strict_round)
    for module in [module for name, module in sys.modules.items() if name.startswith("hf_selfspec.")]:
        if getattr(module, "read", None) is original_read:
            monkeypatch.setattr(module, "read", allowed_read)


@pytest.mark.usefixtures("_waits_are_errors")
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", ["line", "skips", "lookup"])
def test_rounds_wait_only_where_numbers_are_read(name: str, do_sample: bool) -> None:
    model = tiny_llama().to(DEVICE)
    batch = {key: value.to(DEVICE) for key, value in ragged_batch().items()}
    model.generate(**batch, max_new_tokens=40, do_sample=do_sample, assistant=replace(SPECS[name], graphs=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 7)], ids=["row", "batch"])
@pytest.mark.parametrize("name", SPECS)
def test_ids_of_captured_forwards_are_plain_but_for_near_ties(
    name: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Forwards are captured by default, while other threads draw numbers, and a static cache changes nothing."""
    model, stopped = tiny_llama().to(DEVICE, dtype), threading.Event()

    def draw() -> None:
        while not stopped.is_set():
            torch.rand(8, device=DEVICE)

    with ThreadPoolExecutor(1) as other:
        drawing = other.submit(draw)
        try:
            batch = {key: value.to(DEVICE) for key, value in ragged_batch(lengths, seed=5).items()}
            options = {"max_new_tokens": 60, "do_sample": False}
            for static in ({}, {}, {"cache_implementation": "static"}):
                ids = model.generate(**batch, **static, **options, assistant=SPECS[name])
                ours = new_tokens(model, ids, batch["input_ids"].shape[1])
                for difference in differences_of(model, batch, options, ours):
                    assert difference.is_near_tie, difference
        finally:
            stopped.set()
        drawing.result()
    assert graphs_of(model).count > 0
    assert not graphs_of(model).refused


def test_captured_forwards_own_their_memory() -> None:
    """What torch frees when its compiler captures something is not theirs."""
    with torch.device(DEVICE):
        config = LlamaConfig(
            vocab_size=97, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()  # as wide as needs scratch memory
    batch, spec = {name: values.to(DEVICE) for name, values in ragged_batch((9,), seed=5).items()}, SPECS["line"]
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    for _ in range(2):
        before = model.generate(**batch, **options, assistant=spec)
    assert graphs_of(model).count > 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 24,), 7, dtype=torch.int32, device=DEVICE) for _ in range(4)]
    assert torch.equal(model.generate(**batch, **options, assistant=spec), before)
    assert all(bool((values == 7).all()) for values in others)
