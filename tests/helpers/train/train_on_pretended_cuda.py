"""Trains for one batch on a pretended device; what its loss is, and what the host waits for."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from helpers import pretend_cuda
from helpers.distributed import rows, tiny
from helpers.pretend_cuda import Pretended, counts, move, pretended
from helpers.train.by_hand import stacked
from hf_selfspec import EarlyExitLoss, LayerDropout, Rotational
from hf_selfspec.train import loss_scale, training

CASES: dict[str, Any] = {
    "plain": lambda: [],
    "distilled": lambda: [EarlyExitLoss(1.0, Rotational(1), scale=loss_scale, self_distillation=True)],
    "last exit alone": lambda: [EarlyExitLoss(0.0)],
    "dropout": lambda: [LayerDropout(0.9)],
}


def step(model: Any, callbacks: list[Any], batch: dict[str, torch.Tensor]) -> float:
    """Forward and backward of a step of a training; returns the loss."""
    with ExitStack() as stack:
        if callbacks:
            stack.enter_context(stack.enter_context(training(model, callbacks, steps=1, seed=5)).step())
        counts.is_on = True
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    counts.is_on = False
    return loss.item()


def measure(make: Any, device: torch.device) -> dict[str, float]:
    batch = stacked(rows(4))
    batch["num_items_in_batch"] = torch.tensor(30)
    expected = step(tiny().train(), make(), batch)
    counts.reset()
    model = tiny().train()
    with patch.object(pretend_cuda, "DEVICE", device), pretended():
        move(model, device)
        loss = step(model, make(), {name: Pretended(value, device) for name, value in batch.items()})
    return {"loss": loss, "expected": expected, "reads": counts.reads.total(), "uploads": counts.uploads.total()}


def steps() -> dict[str, dict[str, float]]:
    """Of all cases, last in a process: the backward pass of a CPU's build of torch takes no device that says ``cuda``,
    so that one of another name is registered."""
    _setup_privateuseone_for_python_backend("pretended")
    return {name: measure(make, torch.device("pretended", 0)) for name, make in CASES.items()}
