"""Changes of a model end, wherever they are interrupted, and copies that are made meanwhile do not have them."""

import copy
import copyreg
import functools
import gc
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization
from transformers.generation.streamers import BaseStreamer

from helpers.calls import new_spec, unchanged
from helpers.models import ROW, tiny_llama
from hf_selfspec.model import forward_pass
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.attention import interface as attention
from hf_selfspec.model.forward_pass import partial_forwards
from hf_selfspec.model.kernels import linear
from hf_selfspec.model.patching import InstanceForwards, SharedChange

# Where interrupts come: as functions of these files begin.
INSIDE = ("patching.py", "contextlib.py")


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small linear layers have forwards of ours, too."""
    monkeypatch.setattr(linear, "_SMALLEST", 1)


def interrupted(at: int, run: Callable[[], object]) -> tuple[int, KeyboardInterrupt | None]:
    """Interrupts at a place; returns how many there were, and the interrupt, which keeps all frames alive."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        callers = (*INSIDE, "target.py", "forward_pass.py")
        if frame.f_code.co_filename.endswith(INSIDE) and frame.f_back.f_code.co_filename.endswith(callers):
            count += 1
            if count == at:
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt as error:
        return count, error
    finally:
        sys.settrace(None)
    return count, None


@pytest.mark.usefixtures("linears")
def test_interrupts_at_each_place_of_a_change() -> None:
    model = tiny_llama(layers=2)
    anatomy = Anatomy.of(model)

    def run() -> None:
        with partial_forwards(model, anatomy):
            pass

    gc.disable()  # what is not referred to any more is gone at once, or not at all
    try:
        with unchanged(model):
            places, _ = interrupted(0, run)
            assert places > 100
            for place in range(1, places + 1):
                _, error = interrupted(place, run)
                if error is not None:
                    run()  # works while frames of the interrupted one are alive
                del error
                left = [name for name, module in model.named_modules() if "forward" in module.__dict__]
                assert not left, f"after an interrupt at place {place}"
    finally:
        gc.enable()


@pytest.mark.usefixtures("linears")
def test_interrupts_of_calls() -> None:
    model, spec = tiny_llama(layers=4), new_spec()
    plain = model.generate(**ROW, max_new_tokens=4)

    def run() -> None:
        model.generate(**ROW, max_new_tokens=4, assistant=spec)

    run()
    places, _ = interrupted(0, run)
    with unchanged(model):
        for place in range(places, 0, -19):
            _, error = interrupted(place, run)
            assert forward_pass._current.now is None
            assert attention._current.now is None
            del error
            gc.collect()
            left = [name for name, module in model.named_modules() if "forward" in module.__dict__]
            assert not left, f"after an interrupt at place {place}"
        assert torch.equal(model.generate(**ROW, max_new_tokens=4, assistant=spec), plain)


def test_changes_whose_end_was_lost() -> None:
    """A change ends when it is collected."""
    values = {"a": 1}
    changed = SharedChange().of(sys, lambda forwards: forwards.put(values, "a", 2))
    changed.__enter__()
    assert values == {"a": 2}
    del changed
    assert values == {"a": 1}


def test_changes_end_in_any_order_and_leave_what_others_have_put_on_top() -> None:
    layer, first, second = torch.nn.Linear(2, 2), InstanceForwards(), InstanceForwards()
    first.replace(layer, lambda *_: "first")
    below = layer.forward
    second.replace(layer, lambda *args: ["second", below(*args)])
    ours = layer.forward
    layer.forward = lambda *args: ["theirs", ours(*args)]
    assert layer(None) == ["theirs", ["second", "first"]]
    first.close()
    second.close()
    states = torch.ones(1, 2)
    word, found = layer(states)
    assert word == "theirs"
    assert torch.equal(found, torch.nn.functional.linear(states, layer.weight, layer.bias))
    del layer.forward
    first.replace(layer, lambda *_: "first")
    second.replace(layer, lambda *_: "second")
    first.close()
    assert layer(states) == "second"
    assert "forward" not in copy.deepcopy(layer).__dict__
    second.close()
    assert "forward" not in layer.__dict__
    assert type(layer) not in copyreg.dispatch_table


class Copying(BaseStreamer):
    """Copies a model at a token of a call."""

    def __init__(self, model: Any, copied: Callable[[Any], Any]) -> None:
        self.model, self.copied, self.tokens = model, copied, 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == 3:
            assert "forward" in self.model.lm_head.__dict__
            self.copy = self.copied(self.model)

    def end(self) -> None:
        pass


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.usefixtures("linears")
@pytest.mark.parametrize("copied", COPIES)
def test_copies_made_meanwhile(copied: str) -> None:
    model = tiny_llama(layers=4)
    plain, streamer = model.generate(**ROW, max_new_tokens=8), Copying(model, COPIES[copied])
    model.generate(**ROW, max_new_tokens=8, assistant=new_spec(), streamer=streamer)
    twin = streamer.copy
    assert not [name for name, module in twin.named_modules() if "forward" in module.__dict__]
    assert torch.equal(twin.generate(**ROW, max_new_tokens=8), plain)
    twin(ROW["input_ids"], labels=ROW["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    for module in (*model.modules(), *twin.modules()):
        assert type(module) not in copyreg.dispatch_table


def test_copies_of_modules_with_forwards_of_others_or_copying_of_their_own() -> None:
    """Accelerate's forwards are copied as ever; parametrized modules copy their attributes themselves."""
    model = tiny_llama(layers=4)
    layer = model.model.layers[1]
    layer.forward = functools.partial(run_class_forward, layer)
    register_parametrization(model.lm_head, "weight", torch.nn.Identity())
    streamer = Copying(model, copy.deepcopy)
    model.generate(**ROW, max_new_tokens=8, assistant=new_spec(), streamer=streamer)
    twin = streamer.copy
    assert twin.lm_head.forward.__self__ is twin.lm_head
    assert copy.deepcopy(twin).lm_head.weight is not twin.lm_head.weight
    assert twin.model.layers[1].forward.args == (twin.model.layers[1],)
    assert [name for name, module in twin.named_modules() if "forward" in module.__dict__] == [
        "model.layers.1",
        "lm_head",
    ]


def test_hooks_in_copies() -> None:
    """They are not there, nor what torch knows of them; classes that copy their attributes themselves keep a stub."""
    seen: list[Any] = []
    layer, forwards = torch.nn.Linear(2, 2), InstanceForwards()
    theirs = layer.register_forward_hook(lambda *_, **__: None, with_kwargs=True)
    forwards.hook(layer.register_forward_hook, lambda *args: seen.append(args), with_kwargs=True)
    forwards.hook(layer.register_forward_pre_hook, lambda *args: seen.append(args))
    for _ in range(2):
        twin = copy.deepcopy(layer)
        twin(torch.ones(1, 2))
        assert seen == []
        if type(layer) is torch.nn.Linear:
            assert [*twin._forward_hooks, *twin._forward_hooks_with_kwargs] == [theirs.id] * 2
            assert not twin._forward_pre_hooks
        register_parametrization(layer, "weight", torch.nn.Identity())
    layer(torch.ones(1, 2))
    assert len(seen) == 2


def run_class_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)
