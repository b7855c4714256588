"""What runs while a model trains, and what is left behind it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from hf_selfspec.train.trainer import ModelCallback, TrainingRun


def attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """Every attribute of every module but its mode and accelerate's mark, and how many hooks it has."""
    found: dict[str, Any] = {}
    ignored = ("training", "_is_accelerate_prepared")
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in module.__dict__.items() if key not in ignored}
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            found[f"{name}.{kind} (number)"] = len(getattr(module, kind))
    return found


@contextmanager
def left_as_it_was(run: Any) -> Iterator[None]:
    """Asserts that the model and the Trainer have afterwards what they had, object by object."""
    before, keys = attributes_of(run.model), set(run.__dict__)
    yield
    after = attributes_of(run.model)
    assert after.keys() == before.keys()
    assert [key for key, value in before.items() if after[key] is not value and after[key] != value] == []
    assert "log" in keys or "log" not in run.__dict__
    ours = [callback for callback in run.callback_handler.callbacks if isinstance(callback, ModelCallback)]
    assert all(type(callback._run) is TrainingRun for callback in ours)


class RowsSeen(TrainerCallback):
    """Counts the rows that the layers' MLPs run on.

    Attributes:
        steps: for each training step the rows of each layer.
        evaluations: for each evaluated batch the same.
    """

    def __init__(self, model: Any) -> None:
        self.steps: list[list[int]] = []
        self.evaluations: list[list[int]] = []
        for index, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(self._counter(index))
        self.model = model
        model.register_forward_pre_hook(self._start)

    def _start(self, module: Any, args: Any) -> None:
        (self.steps if module.training else self.evaluations).append([0] * len(self.model.model.layers))

    def _counter(self, index: int) -> Callable[..., None]:
        def count(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            (self.steps if module.training else self.evaluations)[-1][index] += args[0].shape[0]

        return count
