"""A plugin of pytest: tests of transformers get what a ``SelfSpec`` generates, wherever they call ``generate``.

Assisted decoding and prompt lookup are replaced by it, batches that are padded on the right are turned round, tests
that skip models with recurrent states run, and greedy ids are compared with plain ``generate``'s. The counts go into
the file that ``SELFSPEC_COUNTS`` names.
"""

import copy
import functools
import json
import os
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

import hf_selfspec
from hf_selfspec import Cascade, EarlyExit, FixedLength, Lookup, SelfSpec, SelfSpecError

ASSISTED = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "assistant_tokenizer")
CACHES = ("past_key_values", "cache")

counts: Counter[str] = Counter()
different: list[str] = []


def turned_round(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs with padding on the left: a batch that is padded on the right, with the tokens of each row reversed."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if mask is None or ids is None or mask.shape != ids.shape or bool(mask[:, -1].all()):
        return inputs
    return inputs | {"attention_mask": mask.flip(1), "input_ids": ids.flip(1)}


def is_greedy(model: Any, options: dict[str, Any]) -> bool:
    config = options.get("generation_config") or model.generation_config
    return not options.get("do_sample", config.do_sample) and options.get("num_beams", config.num_beams) in (None, 1)


def sequences_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def under_selfspec(original: Any) -> Any:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **options: Any) -> Any:
        was_assisted = any(options.pop(name, None) is not None for name in ASSISTED)
        options = turned_round(options)
        spec = SelfSpec(Cascade([Lookup(), EarlyExit(1)]), FixedLength(3))
        plain = None
        if is_greedy(self, options) and not args and not any(options.get(name) is not None for name in CACHES):
            plain = {name: value if name == "streamer" else copy.deepcopy(value) for name, value in options.items()}
        try:
            attached = hf_selfspec.attach(self, spec)
        except SelfSpecError:
            return original(self, *args, **options)
        with attached:
            output = original(self, *args, **options)
        if spec.stats is None or spec.stats.left_to_generate:
            counts["left to plain"] += 1
            return output
        counts["assisted" if was_assisted else "served"] += 1
        if plain is not None and "streamer" not in plain:
            counts["compared"] += 1
            if not torch.equal(sequences_of(original(self, **plain, assistant=False)), sequences_of(output)):
                different.append(os.environ.get("PYTEST_CURRENT_TEST", ""))
        return output

    return generate


def pytest_configure(config: pytest.Config) -> None:
    skip = unittest.TestCase.skipTest

    def unless_stateful(self: unittest.TestCase, reason: str) -> None:
        if "stateful" in reason.lower():
            counts["not skipped"] += 1
        else:
            skip(self, reason)

    unittest.TestCase.skipTest = unless_stateful  # type: ignore[method-assign]  # tests skip themselves by it
    GenerationMixin.generate = under_selfspec(GenerationMixin.generate)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        counts[f"failed: {report.nodeid.rpartition('::')[2]}"] += 1


def pytest_sessionfinish() -> None:
    Path(os.environ["SELFSPEC_COUNTS"]).write_text(json.dumps({"counts": counts, "different": different}))
