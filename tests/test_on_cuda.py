"""What a GPU alone can show; `python -m hf_selfspec.bench gpu` runs these among its checks."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import ragged_batch, tiny_llama

from hf_selfspec import (
    EarlyExit,
    EarlyExitLoss,
    FixedLength,
    LayerDropout,
    SelfSpec,
    SkipLayers,
    TopKTree,
    first_differences,
)
from hf_selfspec.bench.training import TrainingShape, train
from hf_selfspec.transfer import read, upload

DEVICE = "cuda"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_ids_are_plain_but_for_near_ties(name: str, dtype: torch.dtype) -> None:
    model = tiny_llama().to(DEVICE, dtype)
    batch = {key: value.to(DEVICE) for key, value in ragged_batch((9, 5, 7), seed=5).items()}
    plain = model.generate(**batch, max_new_tokens=60, do_sample=False)
    ours = model.generate(**batch, max_new_tokens=60, do_sample=False, assistant=SPECS[name])
    for difference in first_differences(model, plain, ours, batch["attention_mask"]):
        assert difference.is_near_tie, difference


@pytest.mark.parametrize("name", SPECS)
def test_drawn_tokens_leave_the_device_usable(name: str) -> None:
    """Indices out of range would end all that runs on a GPU afterwards."""
    model = tiny_llama().to(DEVICE)
    batch = {key: value.to(DEVICE) for key, value in ragged_batch().items()}
    ids = model.generate(**batch, max_new_tokens=60, do_sample=True, top_p=0.9, assistant=SPECS[name])
    assert 0 <= int(ids.min()) <= int(ids.max()) < 97


@pytest.mark.parametrize("bf16", [False, True])
def test_training_with_both_callbacks(bf16: bool) -> None:
    shape = TrainingShape(64, 4, 128, 97, 4, 32, bf16)
    found = train(shape.model(), shape, lambda: [EarlyExitLoss(), LayerDropout(0.5)], 4, DEVICE)
    assert math.isfinite(found.loss)
    assert len(found.seconds) == 4
