"""Training mode, and gradient checkpointing, which generation suspends: layers that checkpoint drop the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from .forwards import InstanceForwards, SharedChange
from .modules import all_modules

_FLAG = "gradient_checkpointing"
_suspended = SharedChange()


def checkpoints(model: nn.Module) -> bool:
    """Returns whether a forward of ``model`` would checkpoint now: it is switched on, and in training mode."""
    return any(module.training and getattr(module, _FLAG, False) for module in all_modules(model))


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Suspends gradient checkpointing; training mode, and dropout with it, stays as it is."""

    def suspend(forwards: InstanceForwards) -> None:
        for module in all_modules(model):
            if module.training and getattr(module, _FLAG, False):
                forwards.set(module, _FLAG, False)

    with _suspended.of(model, suspend):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, and restores the mode of each of its modules afterwards."""
    was_training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in was_training:
            module.training = True
