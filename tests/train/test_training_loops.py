"""Training loops without a ``Trainer``."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from helpers.distributed_training import rows, tiny, weights
from helpers.train.by_hand import BOTH, assert_close, stacked, train
from helpers.train.watching import attributes_of
from hf_selfspec import (
    EarlyExitLoss,
    LayerDropout,
    SettingError,
    SettingTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_selfspec.train import training


def test_a_loop_trains_as_the_trainer_does(tmp_path: Path) -> None:
    """Also with a step of two batches, of which the ``Trainer`` divides the losses by the targets of both."""
    model, data = tiny(), rows(16)
    optimizer, losses, before = torch.optim.SGD(model.parameters(), lr=0.05), [], attributes_of(model.train())
    with training(model, BOTH["both"](), steps=3) as loop:
        for step in range(3):
            with loop.step():
                batches = [stacked(data[step * 4 + begin : step * 4 + begin + 2]) for begin in (0, 2)]
                count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
                for batch in batches:
                    model(**batch, num_items_in_batch=count).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loop.logs())
    after = attributes_of(model)
    assert after.keys() == before.keys()
    assert all(after[key] is value or after[key] == value for key, value in before.items())
    expected = train(tmp_path, BOTH["both"]())
    assert_close(weights(model), weights(expected.model))
    for logs, logged in zip(losses, expected.state.log_history, strict=False):  # at the end come times
        assert logs == pytest.approx({name: value for name, value in logged.items() if "exit" in name}, rel=1e-4)


class Around(LlamaDecoderLayer):
    """As layers were before transformers 5.23, and as the code of models may have it: checkpointing runs all of a call
    again, also what stands in place of the forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again = partial(super().__call__, **kwargs)
        if self.is_own:
            return self._gradient_checkpointing_func(again, *args)
        return checkpoint(again, *args, use_reentrant=False)


def gradients(is_own: bool | None, waits: bool, reentrant: bool = False) -> dict[str, torch.Tensor]:
    """Of two batches in one step, with the model's own checkpointing, another, or none: ``waits`` for one backward."""
    model, batches = tiny().train(), [stacked(rows(4, seed)) for seed in (1, 2)]
    if is_own is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        for layer in model.model.layers:
            layer.__class__, layer.is_own, layer.gradient_checkpointing = Around, is_own, False
    with training(model, [LayerDropout(0.9)], steps=1) as loop, loop.step():
        losses = []
        for batch in batches:
            losses.append(model(**batch, use_cache=False).loss)
            if not waits:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_layers_that_run_again_leave_out_the_same_rows() -> None:
    """Also where another forward came between, as with pairs; what cannot be told apart is refused."""
    for is_own, waits, reentrant in (
        (True, True, False),
        (True, True, True),
        (True, False, False),
        (False, False, False),
    ):
        assert_close(gradients(is_own, waits, reentrant), gradients(None, waits))
    with pytest.raises(UnsupportedOptionError, match=r"LayerDropout cannot tell which of 2 .* gradient checkpointing"):
        gradients(False, waits=True)


def without_loss() -> None:
    with training(tiny(), [EarlyExitLoss()], steps=1) as loop, loop.step():
        pass


def without_forward() -> None:
    with training(tiny(), [LayerDropout()], steps=1) as loop, loop.step():
        pass


def too_many_steps() -> None:
    model = tiny()
    with training(model, [LayerDropout()], steps=1) as loop:
        for _ in range(2):
            with loop.step():
                model(**stacked(rows(2))).loss.backward()


def in_copies() -> None:
    """As DataParallel runs them."""
    model = tiny()
    with training(model, [LayerDropout()], steps=1) as loop, loop.step(), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: model(**stacked(rows(2))).loss.backward()).result()


class FullyShardedDataParallel(torch.nn.Module):
    """By its name, in which one layer lies."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def in_flat_parameters() -> None:
    model = tiny()
    model.model.layers[0] = FullyShardedDataParallel(model.model.layers[0])
    training(model, [LayerDropout()], 1).__enter__()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no loss": (without_loss, UnsupportedModelError, "EarlyExitLoss had no effect"),
    "no forward": (without_forward, UnsupportedModelError, "LayerDropout had no effect"),
    "copies": (in_copies, UnsupportedModelError, "LayerDropout had no effect"),
    "FSDP 1": (in_flat_parameters, UnsupportedOptionError, "FSDP version 1"),
    "too many steps": (too_many_steps, SettingError, r"training\(steps=1\) has taken all of its steps"),
    "no callbacks": (lambda: training(tiny(), [], 1).__enter__(), SettingTypeError, r"callbacks\) must be .* got \[\]"),
    "twice": (
        lambda: training(tiny(), [LayerDropout(), LayerDropout()], 1).__enter__(),
        SettingError,
        r"training\(callbacks\) has more than one LayerDropout",
    ),
    "no steps": (lambda: training(tiny(), [LayerDropout()], 0).__enter__(), SettingError, r"training\(steps\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_loop_cannot_train(case: str) -> None:
    make, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        make()
