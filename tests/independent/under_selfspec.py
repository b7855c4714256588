"""A plugin of pytest: tests of transformers get what a ``SelfSpec`` generates, wherever they call ``generate``.

``SELFSPEC_AS=attached`` attaches one to each model, and compares greedy ids with plain ``generate``'s;
``SELFSPEC_AS=nothing`` tells which tests fail without. Both pad prompts on the left and generate more tokens. The
counts go into the file that ``SELFSPEC_COUNTS`` names.
"""

import copy
import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
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
different: list[str] = []


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


def is_greedy(model: Any, options: dict[str, Any]) -> bool:
    config = options.get("generation_config") or model.generation_config
    return not options.get("do_sample", config.do_sample) and options.get("num_beams", config.num_beams) in (None, 1)


def differ(model: Any, ours: Any, plain: Any) -> bool:
    """Whether ids are others, or in float32 scores, which show more than the highest of them does."""
    ids = (output if isinstance(output, torch.Tensor) else output.sequences for output in (ours, plain))
    scores = (getattr(output, "scores", None) or () for output in (ours, plain))
    pairs = zip(*scores, strict=True) if model.dtype is torch.float32 else ()
    return not torch.equal(*ids) or not all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in pairs)


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


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
        plain = {name: copied(value) for name, value in options.items() if name != "streamer"}
        spec = SelfSpec(Cascade([Lookup(), EarlyExit(1)]), FixedLength(3))
        with hf_selfspec.attach(self, spec):
            output = original(self, *args, **options)
        if spec.stats is None or spec.stats.left_to_generate:
            counts[f"left to plain: {spec.stats and spec.stats.left_to_generate}"] += 1
            return output
        counts.update(served=1, drafted=spec.stats.drafted, accepted=spec.stats.accepted)
        if is_greedy(self, options) and not any(options.get(name) is not None for name in CACHES):
            counts["compared"] += 1
            if differ(self, output, original(self, *args, **plain, assistant=False)):
                different.append(os.environ.get("PYTEST_CURRENT_TEST", ""))
        return output

    return wrapper


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["SELFSPEC_AS"] == "attached":
        GenerationMixin.generate = under_selfspec(GenerationMixin.generate)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: Any) -> None:
    """Changes each class of test cases before its tests are looked up."""
    if isinstance(obj, type) and hasattr(obj, PREPARE):
        setattr(obj, PREPARE, with_left_padding(getattr(obj, PREPARE)))
        obj.max_new_tokens = NEW_TOKENS  # type: ignore[attr-defined]  # of test cases


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        counts[f"failed: {report.nodeid.rpartition('::')[2]}"] += 1


def pytest_sessionfinish() -> None:
    Path(os.environ["SELFSPEC_COUNTS"]).write_text(json.dumps({"counts": counts, "different": different}))
