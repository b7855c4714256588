"""Changes of a model end, wherever they are interrupted; copies that are made meanwhile, and forked processes, do not
have them."""

import copy
import copyreg
import functools
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from helpers.calls import new_spec, unchanged
from helpers.machine import Machine
from helpers.models import ROW, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec
from hf_selfspec.model import forks
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import partial_forwards
from hf_selfspec.model.patching import InstanceForwards

OPTIONS: dict[str, Any] = ROW | {"max_new_tokens": 8}
# Where interrupts come: as functions of these files begin.
INSIDE = ("patching.py", "contextlib.py")
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
small_linears = pytest.mark.machine("small_linears_have_ways")  # and forwards of ours
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


class Calling(BaseStreamer):
    """Calls a function at a token in the middle of a call, and keeps its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.tokens = function, 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == 3:
            self.result = self.function()

    def end(self) -> None:
        pass


def replaced(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


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


@small_linears
@pytest.mark.parametrize("step", [1, 19], ids=["a change", "a call"])
def test_interrupts_at_each_place(step: int, machine: Machine) -> None:
    model, spec = tiny_llama(layers=2), SelfSpec(EarlyExit(1), FixedLength(4))
    anatomy, plain = Anatomy.of(model), model.generate(**OPTIONS)

    def run() -> None:
        if step > 1:
            model.generate(**ROW, max_new_tokens=4, assistant=spec)
        else:
            with partial_forwards(model, anatomy):
                pass

    run()
    gc.disable()  # what is not referred to any more is gone at once, or not at all
    try:
        with unchanged(model):
            places, _ = interrupted(0, run)
            assert places > 100
            for place in range(places, 0, -step):
                _, error = interrupted(place, run)
                assert machine.forwards_obey() == []
                if step > 1:
                    del error
                    gc.collect()
                elif error is not None:
                    run()  # works while frames of the interrupted one are alive
                    del error
                assert not replaced(model), f"after an interrupt at place {place}"
            assert torch.equal(model.generate(**OPTIONS, assistant=spec), plain)
    finally:
        gc.enable()


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
    assert not replaced(copy.deepcopy(layer))
    second.close()
    assert not replaced(layer)
    assert type(layer) not in copyreg.dispatch_table


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@small_linears
@pytest.mark.parametrize("copied", COPIES)
def test_copies_made_meanwhile(copied: str) -> None:
    model = tiny_llama(layers=4)
    plain, streamer = model.generate(**OPTIONS), Calling(lambda: (replaced(model), COPIES[copied](model)))
    model.generate(**OPTIONS, assistant=new_spec(), streamer=streamer)
    before, twin = streamer.result
    assert "lm_head" in before
    assert not replaced(twin)
    assert torch.equal(twin.generate(**OPTIONS), plain)
    twin(ROW["input_ids"], labels=ROW["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not copyreg.dispatch_table.keys() & set(map(type, model.modules()))


def run_class_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def test_copies_of_modules_with_forwards_of_others_or_copying_of_their_own() -> None:
    """Accelerate's forwards are copied as ever; parametrized modules copy their attributes themselves."""
    model = tiny_llama(layers=4)
    layer = model.model.layers[1]
    layer.forward = functools.partial(run_class_forward, layer)
    register_parametrization(model.lm_head, "weight", torch.nn.Identity())
    streamer = Calling(lambda: copy.deepcopy(model))
    model.generate(**OPTIONS, assistant=new_spec(), streamer=streamer)
    twin = streamer.result
    assert twin.lm_head.forward.__self__ is twin.lm_head
    assert copy.deepcopy(twin).lm_head.weight is not twin.lm_head.weight
    assert twin.model.layers[1].forward.args == (twin.model.layers[1],)
    assert replaced(twin) == ["model.layers.1", "lm_head"]


def test_hooks_in_copies() -> None:
    """They are not there, nor what torch knows of them; classes that copy their attributes themselves keep a stub."""
    seen: list[Any] = []
    layer, forwards = torch.nn.Linear(2, 2), InstanceForwards()
    theirs = layer.register_forward_hook(lambda *_, **__: None, with_kwargs=True)
    forwards.hook(layer.register_forward_hook, lambda *args: seen.append(args), with_kwargs=True)
    forwards.hook(layer.register_forward_pre_hook, lambda *args: seen.append(args))
    twin = copy.deepcopy(layer)
    assert [*twin._forward_hooks, *twin._forward_hooks_with_kwargs, *twin._forward_pre_hooks] == [theirs.id] * 2
    register_parametrization(layer, "weight", torch.nn.Identity())
    for each in (twin, copy.deepcopy(layer)):
        each(torch.ones(1, 2))
    assert seen == []
    layer(torch.ones(1, 2))
    assert len(seen) == 2


def is_right_in_child(run: Callable[[], bool]) -> bool:
    """Whether ``run`` returns true in a forked process, within a minute."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    signal.alarm(60)
    code = 1
    try:
        code = 0 if run() else 1
    finally:
        os._exit(code)


@small_linears
@pytest.mark.machine("forks_wait_briefly")
@forking
def test_children_generate(llama: LlamaForCausalLM) -> None:
    """While another thread is in the middle of a call, whose locks are free in the child."""
    spec, lock, is_inside, is_done = new_spec(), forks.new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_inside.set()
            is_done.wait()

    def run() -> bool:
        is_clean, plain = not replaced(llama), llama.generate(**OPTIONS)
        with lock:
            return is_clean and torch.equal(llama.generate(**OPTIONS, assistant=spec), plain)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(llama.generate, **OPTIONS, assistant=spec, streamer=Calling(hold))
        is_inside.wait()
        try:
            assert "lm_head" in replaced(llama)
            assert is_right_in_child(run)
        finally:
            is_done.set()


@forking
def test_a_call_goes_on_in_the_child(llama: LlamaForCausalLM) -> None:
    plain, children = llama.generate(**OPTIONS), list[int]()
    streamer = Calling(lambda: children.append(os.fork()))
    try:
        ids = llama.generate(**OPTIONS, assistant=new_spec(), streamer=streamer)
        is_right = torch.equal(ids, plain) and not replaced(llama)
    finally:
        if children == [0]:
            os._exit(0 if is_right else 1)
    assert is_right
    assert os.waitpid(children[0], 0)[1] == 0


@forking
def test_a_fork_waits_for_what_locks_guard() -> None:
    """Another thread is in the middle of a change for a moment: the child sees it whole."""
    lock, halves, is_inside = forks.new_lock(), list[int](), threading.Event()

    def change() -> None:
        with lock:
            halves.append(1)
            is_inside.set()
            threading.Event().wait(0.05)
            halves.append(2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(change)
        is_inside.wait()
        assert is_right_in_child(lambda: halves == [1, 2])
