"""A plugin of pytest: tests of transformers get what a ``SelfSpec`` generates, wherever they call ``generate``.

``SELFSPEC_AS=attached`` attaches one to each model, and puts others in the place of assisted decoding and prompt
lookup; tests that skip models with recurrent states run, and greedy ids are compared with plain ``generate``'s.
``SELFSPEC_AS=nothing`` tells which tests fail without. Both pad prompts on the left and generate more tokens. The
counts go into the file that ``SELFSPEC_COUNTS`` names.
"""

import copy
import functools
import json
import os
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import hf_selfspec
from hf_selfspec import Cascade, EarlyExit, FixedLength, Lookup, SelfSpec, SelfSpecError

ASSISTED = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "assistant_tokenizer")
CACHES = ("past_key_values", "cache", "cache_params")
# Of a test case: what gives the inputs to generate from.
PREPARE = "prepare_config_and_inputs_for_generate"
# What drafted tokens do not have: tests that ask for it get the rest.
NOT_RETURNED = ("output_attentions", "output_hidden_states")
CHECKS_OF_IT = ("_check_attentions_for_generate", "_check_hidden_states_for_generate")
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


def unless_left_out(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check(self: Any, *args: Any, **options: Any) -> None:
        if all(each is not None for each in (*args, options.get("attentions", 0), options.get("hidden_states", 0))):
            original(self, *args, **options)

    return check


def is_assisted(name: str) -> bool:
    return name.startswith("test_") and ("assisted" in name or "prompt_lookup" in name)


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


def specs(assisted: set[str]) -> Iterator[SelfSpec]:
    if assisted:
        yield SelfSpec.lookup() if "prompt_lookup_num_tokens" in assisted else SelfSpec()
    yield SelfSpec(Cascade([Lookup(), EarlyExit(1)]), FixedLength(3))


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
        assisted = {name for name in ASSISTED if options.pop(name, None) is not None}
        asked = {name: options.pop(name) for name in NOT_RETURNED if options.get(name)}
        compares = is_greedy(self, options) and not any(options.get(name) is not None for name in CACHES)
        for spec in specs(assisted):
            given = {name: value if name == "streamer" else copied(value) for name, value in options.items()}
            try:
                with nullcontext() if assisted else hf_selfspec.attach(self, spec):
                    output = original(self, *args, **given, **({"assistant": spec} if assisted else {}))
                left = spec.stats is None or spec.stats.left_to_generate
            except SelfSpecError as error:
                left = f"refused: {error}"
            if left:
                counts[f"left to plain: {left}"] += 1
                return original(self, *args, **options, **asked)
            counts["assisted" if assisted else "served"] += 1
            counts["drafted"] += spec.stats.drafted
            counts["accepted"] += spec.stats.accepted
            if compares:
                counts["compared"] += 1
                plain = {name: copied(value) for name, value in options.items() if name != "streamer"}
                if differ(self, output, original(self, *args, **plain, assistant=False)):
                    different.append(os.environ.get("PYTEST_CURRENT_TEST", ""))
        return output

    return wrapper


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["SELFSPEC_AS"] != "attached":
        return
    skip = unittest.TestCase.skipTest

    def unless_stateful(self: unittest.TestCase, reason: str) -> None:
        if "stateful" in reason.lower():
            counts["not skipped"] += 1
        else:
            skip(self, reason)

    unittest.TestCase.skipTest = unless_stateful  # type: ignore[method-assign]  # tests skip themselves by it
    GenerationMixin.generate = under_selfspec(GenerationMixin.generate)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj: Any) -> None:
    """Changes each class of test cases before its tests are looked up."""
    if not (isinstance(obj, type) and hasattr(obj, PREPARE)):
        return
    for name, wrapper in ({PREPARE: with_left_padding} | dict.fromkeys(CHECKS_OF_IT, unless_left_out)).items():
        setattr(obj, name, wrapper(getattr(obj, name)))
    obj.max_new_tokens = NEW_TOKENS  # type: ignore[attr-defined]
    if os.environ["SELFSPEC_AS"] == "attached":
        for name in filter(is_assisted, dir(obj)):
            # Types that assisted decoding does not serve skip what the mixin has, the last of the bases with it.
            setattr(obj, name, next(vars(base)[name] for base in reversed(obj.__mro__) if name in vars(base)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        counts[f"failed: {report.nodeid.rpartition('::')[2]}"] += 1


def pytest_sessionfinish() -> None:
    Path(os.environ["SELFSPEC_COUNTS"]).write_text(json.dumps({"counts": counts, "different": different}))
