"""A plugin of pytest: transformers' own tests get what a ``SelfSpec`` generates, wherever they call ``generate``.

They are not in its package, so they need a checkout of the installed version, or near it, and the packages
``parameterized``, ``datasets`` and ``timeout-decorator``. In the checkout, for types of models that differ in what we
do (llama mistral gemma2 gemma3 qwen3_moe deepseek_v3 gpt2 opt mamba mamba2 falcon_h1 jamba bamba qwen3_next qwen3_5
lfm2)::

    PYTHONPATH=hf_selfspec:hf_selfspec/tests python -m pytest -p helpers.under_selfspec tests/models/llama -k \\
        "(generate or assisted or prompt_lookup or left_padding or stop_string or past_key_values)
        and not compil and not continuous_batching"

A test fails where greedy ids are not plain ``generate``'s. Prompts are padded on the left and more tokens generated;
which tests fail for that alone is seen with ``SELFSPEC_AS=nothing``.
"""

import copy
import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import hf_selfspec
from hf_selfspec import Cascade, EarlyExit, FixedLength, Lookup, SelfSpec

CACHES = ("past_key_values", "cache", "cache_params")
# Of a test case: what gives the inputs to generate from.
PREPARE = "prepare_config_and_inputs_for_generate"
# Enough to draft and to reject; transformers' tests generate three.
NEW_TOKENS = 12

counts: Counter[str] = Counter()


def with_left_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Moves the masked tokens of what a test case generates from to the left; each row has at least one other."""

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **options: Any) -> Any:
        config, inputs = original(self, *args, **options)
        mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
        if mask is None or ids is None or mask.shape != ids.shape:
            return config, inputs
        order = mask.argsort(dim=1, stable=True)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.shape == ids.shape:
                inputs[name] = value.gather(1, order)
        inputs["attention_mask"][:, -1] = 1
        return config, inputs

    return prepare


def differ(model: Any, ours: Any, plain: Any) -> bool:
    """Whether ids are others, or in float32 scores, which show more than the highest of them does."""
    ids = (output if isinstance(output, torch.Tensor) else output.sequences for output in (ours, plain))
    scores = (getattr(output, "scores", None) or () for output in (ours, plain))
    pairs = zip(*scores, strict=True) if model.dtype is torch.float32 else ()
    return not torch.equal(*ids) or not all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in pairs)


def under_selfspec(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        # While the call runs, transformers has its own methods: a model with others' would be compared first.
        GenerationMixin.generate = original
        try:
            return generate(self, *args, **options)
        finally:
            GenerationMixin.generate = wrapper

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        plain = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in options.items()
            if name != "streamer"
        }
        config = options.get("generation_config") or self.generation_config
        beams = options.get("num_beams", config.num_beams) or 1
        is_greedy = beams == 1 and not options.get("do_sample", config.do_sample)
        spec = SelfSpec(Cascade([Lookup(), EarlyExit(1)]), FixedLength(3))
        with hf_selfspec.attach(self, spec):
            output = original(self, *args, **options)
        if spec.stats is None or spec.stats.left_to_generate:
            counts[f"left to plain: {spec.stats and spec.stats.left_to_generate}"] += 1
            return output
        counts.update(served=1, drafted=spec.stats.drafted, accepted=spec.stats.accepted)
        if is_greedy and not any(options.get(name) is not None for name in CACHES):
            counts["compared"] += 1
            if differ(self, output, original(self, *args, **plain, assistant=False)):
                pytest.fail("ids are not plain generate's")
        return output

    return wrapper


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("SELFSPEC_AS") != "nothing":
        GenerationMixin.generate = under_selfspec(GenerationMixin.generate)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: Any) -> None:
    """Changes each class of test cases before its tests are looked up."""
    if isinstance(obj, type) and hasattr(obj, PREPARE):
        setattr(obj, PREPARE, with_left_padding(getattr(obj, PREPARE)))
        obj.max_new_tokens = NEW_TOKENS  # type: ignore[attr-defined]  # of test cases


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"calls with a SelfSpec: {dict(counts)}")
