"""Whatever happens, the model and transformers are afterwards as they were, and the next call is right."""

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from helpers.calls import assert_serves, new_spec, unchanged
from helpers.models import BATCH, ROW, character_tokenizer, ragged_batch
from hf_selfspec import EarlyExit, SelfSpec, SelfSpecError, SkipLayers

EXIT = new_spec()
SKIPS = SelfSpec(SkipLayers())


class BoomError(Exception):
    pass


class Bomb(BaseStreamer):
    """Raises when called for the ``fuse``-th time, whatever it is called as."""

    def __init__(self, fuse: int, error: type[BaseException] = BoomError) -> None:
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


@pytest.mark.parametrize("options", [{"logits_processor": [Bomb(6).rule]}, {"num_beams": 2}], ids=["late", "refused"])
def test_a_stream_whose_call_fails_ends(llama: LlamaForCausalLM, options: dict[str, Any]) -> None:
    """Its reader would wait in another thread for ever."""
    streamer = TextIteratorStreamer(character_tokenizer(), timeout=5)
    with pytest.raises((BoomError, SelfSpecError)):
        llama.generate(**ROW, max_new_tokens=16, assistant=EXIT, streamer=streamer, **options)
    list(streamer)


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
            for place, fuse in (("stop rule", 5), ("streamer", 2 + 3 * index)):
                with pytest.raises(BoomError):
                    explode(llama, place, Bomb(fuse), prompt)

    with unchanged(llama), ThreadPoolExecutor(len(specs) + 1) as pool:
        failing = pool.submit(fail)
        assert all(pool.map(work, specs))
        failing.result()
    assert_serves(llama, EXIT)


def test_no_growth_over_many_calls(llama: LlamaForCausalLM) -> None:
    def live_tensors_after(calls: int) -> int:
        for index in range(calls):
            options = {"return_dict_in_generate": True, "output_scores": True} if index % 5 == 0 else {}
            spec, inputs = (EXIT, SKIPS, SelfSpec())[index % 3], (ROW, BATCH)[index % 2]
            llama.generate(**inputs, max_new_tokens=3, assistant=spec, **options)
        gc.collect()
        return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())

    assert live_tensors_after(12) >= live_tensors_after(18)
