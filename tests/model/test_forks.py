"""Processes that are forked while threads generate."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from helpers.calls import new_spec
from helpers.models import ROW
from hf_selfspec import SelfSpec
from hf_selfspec.model import forks
from hf_selfspec.model.forks import new_lock

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


class Calling(BaseStreamer):
    """Calls a function at a token in the middle of a call."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function, self.tokens = function, 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == 3:
            self.function()

    def end(self) -> None:
        pass


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


@pytest.fixture
def while_another_generates(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[SelfSpec]:
    """Another thread is in the middle of a call with a ``SelfSpec``, and holds all locks of the package."""
    monkeypatch.setattr(forks, "_PATIENCE", 0.05)
    spec, is_inside, is_done = new_spec(), threading.Event(), threading.Event()

    def hold() -> None:
        locks = list(forks._locks.values())
        for lock in locks:
            lock.acquire()
        is_inside.set()
        is_done.wait()
        for lock in locks:
            lock.release()

    options: dict[str, Any] = {"assistant": spec, "max_new_tokens": 8, "streamer": Calling(hold)}
    thread = threading.Thread(target=llama.generate, kwargs={**ROW, **options})
    thread.start()
    is_inside.wait()
    yield spec
    is_done.set()
    thread.join()


def test_children_generate(llama: LlamaForCausalLM, while_another_generates: SelfSpec) -> None:
    assert "forward" in llama.lm_head.__dict__

    def run() -> bool:
        is_clean = not any("forward" in module.__dict__ for module in llama.modules())
        plain = llama.generate(**ROW, max_new_tokens=8)
        return is_clean and torch.equal(
            llama.generate(**ROW, max_new_tokens=8, assistant=while_another_generates), plain
        )

    assert is_right_in_child(run)


def test_a_call_goes_on_in_the_child(llama: LlamaForCausalLM) -> None:
    plain, children = llama.generate(**ROW, max_new_tokens=8), list[int]()
    streamer = Calling(lambda: children.append(os.fork()))
    try:
        ids = llama.generate(**ROW, max_new_tokens=8, assistant=new_spec(), streamer=streamer)
        is_clean = not any("forward" in module.__dict__ for module in llama.modules())
        is_right = torch.equal(ids, plain) and is_clean
    finally:
        if children == [0]:
            os._exit(0 if is_right else 1)
    assert is_right
    assert os.waitpid(children[0], 0)[1] == 0


def test_a_fork_waits_for_what_locks_guard() -> None:
    """Another thread is in the middle of a change for a moment: the child sees it whole."""
    lock, halves, is_inside = new_lock(), list[int](), threading.Event()

    def change() -> None:
        with lock:
            halves.append(1)
            is_inside.set()
            threading.Event().wait(0.05)
            halves.append(2)

    thread = threading.Thread(target=change)
    thread.start()
    is_inside.wait()
    assert is_right_in_child(lambda: halves == [1, 2])
    thread.join()
