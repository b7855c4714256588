"""Whatever happens, the model and transformers are afterwards as they were, and the next call is right."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from helpers.calls import assert_serves, new_spec, unchanged
from helpers.models import BATCH, ROW, ragged_batch, tiny_llama
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    SelfSpec,
    SkipLayers,
    TopKTree,
)

EXIT = new_spec()
SKIPS = SelfSpec(SkipLayers())
TREE = SelfSpec(draft=SkipLayers(attention=[1, 2], mlp=[1]), stop=FixedLength(3), tree=TopKTree(((0.5, 3), (1.0, 1))))


def test_while_it_runs_the_model_is_changed(llama: LlamaForCausalLM) -> None:
    """What the other tests find restored is really touched."""
    are_changed: list[bool] = []

    def stop(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        are_changed.append(all("forward" in layer.__dict__ for layer in llama.model.layers))
        are_changed.append(bool(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping))
        return input_ids[:, -1] > 50

    llama.generate(**ROW, max_new_tokens=8, assistant=SelfSpec(draft=EarlyExit(3), stop=stop))
    assert are_changed
    assert all(are_changed)


@pytest.mark.parametrize("spec", [EXIT, TREE], ids=["exit", "tree"])
def test_forwards_that_others_put_there(spec: SelfSpec) -> None:
    """As accelerate does it: an instance ``forward`` on layers and blocks runs underneath and stays the same object."""
    model = tiny_llama(factor=0.5)
    calls: list[str] = []

    def watched(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_of_another(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return forward(*args, **kwargs)

        return forward_of_another

    layer = model.model.layers[1]
    for name in ("model", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp", "lm_head"):
        module = model.get_submodule(name)
        module.forward = watched(name, module.forward)
    mine = layer.forward
    with unchanged(model):
        assert_serves(model, spec)
    assert layer.__dict__["forward"] is mine
    assert set(calls) == {"model", "model.layers.1", "model.layers.1.self_attn", "model.layers.1.mlp", "lm_head"}


class BoomError(Exception):
    pass


class Bomb(BaseStreamer):
    """Raises when called for the ``fuse``-th time, whatever it is called as."""

    def __init__(self, fuse: int, error: type[BaseException]) -> None:
        self.fuse, self.error = fuse, error

    def tick(self, *_: Any) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise self.error

    put = end = tick

    def rule(self, input_ids: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        """A stop rule and a stopping criterion, at which nothing ends."""
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def explode(model: LlamaForCausalLM, place: str, bomb: Bomb, inputs: dict[str, torch.Tensor]) -> None:
    """Generates with the bomb in its place."""
    places: dict[str, dict[str, Any]] = {
        "processor": {"logits_processor": [lambda ids, scores: bomb.tick() or scores]},
        "criterion": {"stopping_criteria": [bomb.rule]},
        "streamer": {"streamer": bomb},
        "stop rule": {"assistant": SelfSpec(EarlyExit(3), bomb.rule)},
    }
    handle = None if place in places else model.get_submodule(place).register_forward_pre_hook(bomb.tick)
    try:
        model.generate(**inputs, **{"assistant": EXIT, "max_new_tokens": 16} | places.get(place, {}))
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.every_run("(processor|streamer|stop rule|model.layers.1.mlp)-.*")
@pytest.mark.parametrize(
    ("place", "fuse", "inputs"),
    [
        ("processor", 1, ROW),
        ("criterion", 6, BATCH),
        ("streamer", 4, BATCH),
        ("stop rule", 6, ROW),
        ("model.layers.1", 1, ROW),
        ("model.layers.1.mlp", 4, BATCH),
        ("model.layers.5.self_attn", 3, BATCH),
        ("lm_head", 3, ROW),
    ],
)
def test_after_an_exception(llama: LlamaForCausalLM, inputs: dict[str, torch.Tensor], place: str, fuse: int) -> None:
    error = KeyboardInterrupt if place == "streamer" else BoomError
    bomb = Bomb(fuse, error)
    with unchanged(llama):
        with pytest.raises(error):
            explode(llama, place, bomb, inputs)
        assert bomb.fuse == 0
    assert_serves(llama, EXIT)


class Obeying(BaseStreamer):
    """Records with each token whether the first layer has a forward of ours, and fails at a token."""

    def __init__(self, model: LlamaForCausalLM, fails_at: int = -1) -> None:
        self.layer, self.fails_at, self.obeyed = model.model.layers[0], fails_at, list[bool]()

    def put(self, value: torch.Tensor) -> None:
        self.obeyed.append("forward" in self.layer.__dict__)
        if len(self.obeyed) == self.fails_at:
            raise BoomError

    def end(self) -> None:
        pass


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_threads(llama: LlamaForCausalLM) -> None:
    """Layers obey one thread's drafts while those of others, failing ones too, and of plain calls do not."""
    prompts = [ragged_batch((5 + index,), seed=index) for index in range(2)]
    expected = [llama.generate(**prompt, max_new_tokens=12) for prompt in prompts]
    specs: list[SelfSpec | None] = [EXIT, EXIT, SKIPS, SelfSpec.lookup(), SelfSpec.layerskip(), None]
    together = threading.Barrier(len(specs) + 1)

    def work(spec: SelfSpec | None) -> bool:
        together.wait()
        ids = [llama.generate(**prompt, max_new_tokens=12, assistant=spec) for prompt in prompts]
        return all(map(torch.equal, ids, expected))

    def fail() -> None:
        together.wait()
        for index, prompt in enumerate(prompts):
            with pytest.raises(BoomError):
                explode(llama, "stop rule", Bomb(5, BoomError), prompt)
            streamer = Obeying(llama, 2 + 3 * index)
            with pytest.raises(BoomError):
                llama.generate(**prompt, max_new_tokens=12, assistant=SelfSpec.lookup(), streamer=streamer)

    with unchanged(llama), ThreadPoolExecutor(len(specs) + 1) as pool:
        failing = pool.submit(fail)
        assert all(pool.map(work, specs))
        failing.result()
    assert_serves(llama, EXIT)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


def test_no_growth_over_many_calls(llama: LlamaForCausalLM) -> None:
    """One leaked cache would be 1.6 MB a call."""
    specs = [EXIT, SKIPS, SelfSpec()]

    def call(index: int) -> None:
        inputs = BATCH if index % 2 else ROW
        options = {"return_dict_in_generate": True, "output_scores": True} if index % 5 == 0 else {}
        llama.generate(**inputs, max_new_tokens=3, assistant=specs[index % 3], **options)

    for index in range(12):
        call(index)
    process = psutil.Process()
    tensors, memory = live_tensors(), process.memory_info().rss
    for index in range(30):
        call(index)
    assert live_tensors() <= tensors
    assert process.memory_info().rss - memory < 32 * 2**20
