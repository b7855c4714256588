"""Behind a training, also one that fails, everything is as before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from helpers.distributed_training import CHECKPOINTING, Row, rows, tiny, trainer, weights
from helpers.train.by_hand import BOTH, assert_equal, history, stacked, train
from helpers.train.watching import left_as_it_was
from hf_selfspec import EarlyExitLoss, LayerDropout


class BoomError(Exception):
    pass


class Bomb(TrainerCallback):
    """Raises when called for the ``fuse``-th time at its place: a module, an event of the Trainer or the data."""

    def __init__(self, place: str, fuse: int, error: type[BaseException] = BoomError) -> None:
        self.fuse, self.error = fuse, error
        if place.startswith("on_"):
            setattr(self, place, self.tick)

    def tick(self, *args: Any, **kwargs: Any) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise self.error


class Mined(torch.utils.data.Dataset):
    """Rows that tell a bomb when they are read."""

    def __init__(self, bomb: Bomb | None) -> None:
        self.bomb, self.rows = bomb, rows(16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if self.bomb is not None:
            self.bomb.tick()
        return self.rows[index]


def changed_while_it_runs(run: Any) -> bool:
    """What the tests find restored is really touched."""
    layers = run.model.model.layers
    return all("forward" in layer.__dict__ and layer._forward_hooks for layer in layers) and "log" in run.__dict__


@pytest.mark.parametrize("own", [(), ("log",)], ids=str)
def test_after_a_training(tmp_path: Path, own: tuple[str, ...]) -> None:
    """Also where the Trainer's methods were replaced on the instance before."""
    seen: list[bool] = []

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(changed_while_it_runs(run))

    callbacks = BOTH["both"]()
    run = trainer(tiny(), [*callbacks, Look()], tmp_path)
    mine = {name: getattr(run, name) for name in own}
    run.__dict__.update(mine)
    with left_as_it_was(run):
        run.train()
    assert seen == [True] * 3
    assert all(run.__dict__[name] is method for name, method in mine.items())
    again = trainer(tiny(), callbacks, tmp_path)
    again.train()
    assert_equal(weights(again.model), weights(run.model))
    assert history(again, "loss/exit_3") == history(run, "loss/exit_3")


@pytest.mark.parametrize(
    ("place", "fuse", "error"),
    [
        ("model.layers.2", 3, KeyboardInterrupt),
        ("lm_head", 2, BoomError),
        ("on_train_begin", 1, BoomError),
        ("on_pre_optimizer_step", 2, KeyboardInterrupt),
        ("on_log", 1, BoomError),
        ("data", 7, BoomError),
    ],
)
def test_after_an_exception(tmp_path: Path, place: str, fuse: int, error: type[BaseException]) -> None:
    """Wherever it comes from; the same callbacks then train as if nothing had been."""
    callbacks = BOTH["both"]()
    bomb = Bomb(place, fuse, error)
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    model = tiny()
    if "." in place or place in ("model", "lm_head"):
        model.get_submodule(place).register_forward_pre_hook(bomb.tick)
    settings = {"eval_dataset": rows(2)}
    run = trainer(model, [*callbacks, bomb], tmp_path, Mined(bomb if place == "data" else None), settings, **options)
    with left_as_it_was(run), pytest.raises(error):
        run.train()
    assert bomb.fuse == 0
    bomb.fuse = -1
    model.load_state_dict(tiny().state_dict())
    again = trainer(model, callbacks, tmp_path, **options, settings=settings)
    again.train()
    fresh = trainer(tiny(), BOTH["both"](), tmp_path, **options, settings=settings)
    fresh.train()
    assert_equal(weights(again.model), weights(fresh.model))
    assert history(again, "loss/exit_3") == history(fresh, "loss/exit_3")


def test_forwards_that_others_put_there(tmp_path: Path) -> None:
    """As accelerate does it: they run underneath and stay the same objects."""
    model, calls = tiny(), []

    def watched(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_of_another(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return forward(*args, **kwargs)

        return forward_of_another

    names = ("model", "model.layers.1", "lm_head")
    for name in names:
        module = model.get_submodule(name)
        module.forward = watched(name, module.forward)
    run = trainer(model, BOTH["both"](), tmp_path)
    with left_as_it_was(run):
        run.train()
    assert set(calls) == set(names)
    assert_equal(weights(model), weights(train(tmp_path, BOTH["both"]()).model))


def test_a_loss_function_that_was_there(tmp_path: Path) -> None:
    """Set by the user to the one that is trained with anyway."""
    model = tiny()
    model.loss_function = model.loss_function
    run = trainer(model, BOTH["both"](), tmp_path)
    with left_as_it_was(run):
        run.train()


@pytest.mark.parametrize(
    ("make", "checkpointed"), [(lambda: [EarlyExitLoss(1.0, None)], False), (lambda: [LayerDropout(0.9)], True)]
)
def test_other_threads(tmp_path: Path, make: Callable[[], list[TrainerCallback]], checkpointed: bool) -> None:
    """Forwards of the same model in another thread, in the middle of one that trains, go their own way."""
    options = {CHECKPOINTING: True} if checkpointed else {}
    logits: list[torch.Tensor] = []
    ids = stacked(rows(2))["input_ids"]
    model, trains = tiny(), threading.current_thread()

    def serve(module: Any, args: Any) -> None:
        if threading.current_thread() is trains:
            thread = threading.Thread(target=lambda: logits.append(model(ids).logits.detach()))
            thread.start()
            thread.join()

    model.model.layers[3].register_forward_pre_hook(serve)
    train(tmp_path, make(), model, **options)
    assert_equal(weights(model), weights(train(tmp_path, make(), **options).model))
    assert len(logits) >= 3
    torch.testing.assert_close(logits[0], tiny()(ids).logits.detach())
