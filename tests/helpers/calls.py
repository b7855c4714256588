"""Calls that many tests make, and what they look at afterwards."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.machine import knowledge_of
from helpers.models import BATCH, ROW, VOCABULARY, ragged_batch
from hf_selfspec import EarlyExit, FixedLength, GenerationStats, SelfSpec, SkipLayers
from hf_selfspec.learned.knowledge import Knowledge
from hf_selfspec.model.anatomy import Anatomy

# What transformers calls caches, since 5.24 and before.
PAST = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


PLAIN = {"assistant": False}


def new_spec() -> SelfSpec:
    return SelfSpec(EarlyExit(3), FixedLength(4))


def calls(spec: SelfSpec) -> int:
    """Returns how many calls ``spec`` has served, without those that were left to plain generate."""
    return _served.get(knowledge_of(spec), 0)


_served, _add_call = WeakKeyDictionary[Knowledge, int](), Knowledge.add_call


def counted(knowledge: Knowledge, stats: GenerationStats) -> None:
    """In the place of ``Knowledge.add_call`` in every test."""
    _add_call(knowledge, stats)
    _served[knowledge] = _served.get(knowledge, 0) + (not stats.left_to_generate)


def new_tokens(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    """What plain ``generate`` adds to each row."""
    ids = model.generate(**inputs, **({"max_new_tokens": 24} | options))
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


def assert_mixed(spec: SelfSpec) -> None:
    """The drafts of the last call were partly kept and partly rejected."""
    assert spec.stats is not None
    # A search may have found a draft that is always right.
    assert 0 < spec.stats.accepted < spec.stats.drafted + bool(spec.stats.phase)


def assert_serves(model: Any, spec: SelfSpec, reference: Any = None) -> None:
    """One row and a batch: tokens of ``model`` with ``spec`` are those of plain ``reference`` (``model`` if none)."""
    for inputs in (ROW, BATCH):
        plain = (model if reference is None else reference).generate(**inputs, max_new_tokens=14)
        assert torch.equal(model.generate(**inputs, max_new_tokens=14, assistant=spec), plain)
        assert_mixed(spec)


def assert_used(model: Any, spec: SelfSpec, inputs: dict[str, torch.Tensor] = BATCH, **options: Any) -> None:
    """The next call is plain's, token for token, and was served by ``spec``."""
    options = {"max_new_tokens": 8} | options
    plain = model.generate(**inputs, **options, **PLAIN)
    before = calls(spec)
    assert torch.equal(model.generate(**inputs, **options), plain)
    assert calls(spec) == before + 1


def assert_not_used(model: Any, spec: SelfSpec, **options: Any) -> None:
    before = calls(spec)
    model.generate(**ROW, **({"max_new_tokens": 4} | options))
    assert calls(spec) == before


class Recorder(BaseStreamer):
    """Keeps what a streamer receives."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class Counting(LogitsProcessor):
    """Favours a token that follows from how often it was called; keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        favoured = 2 + (5 * len(self.seen) + torch.arange(len(scores))) % (VOCABULARY - 2)
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 0.5))


PROMPTS = (ragged_batch((12,)), BATCH)


def check_lossless(
    model: PreTrainedModel, spec: SelfSpec, new_tokens: int = 24, prompts: Sequence[dict[str, torch.Tensor]] = PROMPTS
) -> list[GenerationStats]:
    """Prompts have the ids of plain ``generate``; returns the statistics of each."""
    found = []
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    for inputs in prompts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what some models cannot do is said once
            ids = model.generate(**inputs, **options, assistant=spec)
        assert torch.equal(ids, model.generate(**inputs, **options))
        assert spec.stats is not None
        found.append(spec.stats)
    return found


def random_skip_set(name: str, model: PreTrainedModel) -> SkipLayers:
    """A set of blocks drawn for this architecture, always the same one."""
    draw = random.Random(name)
    anatomy = Anatomy.of(model)
    middle = range(1, anatomy.num_layers - 1)
    attention = [index for index in middle if index not in anatomy.kv_sources and draw.random() < 0.5]
    mlp = [index for index in middle if draw.random() < 0.5]
    # Some hybrids have layers without one of the blocks.
    attention = [index for index in attention if anatomy.attention[index] is not None]
    mlp = [index for index in mlp if anatomy.mlp[index]]
    if not attention and not mlp:
        return SkipLayers([], [1]) if anatomy.mlp[1] else SkipLayers([1], [])
    return SkipLayers(attention, mlp)


def attributes_of(
    model: torch.nn.Module, ignored: tuple[str, ...] = ("training", "_is_accelerate_prepared")
) -> dict[str, Any]:
    """Every attribute of every module, by default but its mode and accelerate's mark, and how many hooks it has."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in module.__dict__.items() if key not in ignored}
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            found[f"{name}.{kind} (number)"] = len(getattr(module, kind))
    return found


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Asserts that every module has the very same attributes, and transformers its own attention, as before."""
    before = attributes_of(model, ())
    yield
    after = attributes_of(model, ())
    assert after.keys() == before.keys()
    assert [key for key, value in before.items() if after[key] is not value] == []
    for registry in (ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS):
        assert registry._local_mapping == {}
