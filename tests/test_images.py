"""Images and sound in the prompt: plain generate's tokens, whatever drafts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from architectures import build as build_text
from conftest import BATCH, tiny_llama
from multimodal import MODELS, build, prompt_of
from transformers import PreTrainedModel

from hf_selfspec import (
    EarlyExit,
    FixedLength,
    SelfSpec,
    SelfSpecError,
    SkipLayers,
    TopKTree,
    UnsupportedOptionError,
)
from hf_selfspec.model.anatomy import Anatomy

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
SPECS = {
    "exit": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
    "skip": SelfSpec(draft=SkipLayers(attention=[1], mlp=[2]), stop=FixedLength(3)),
    "tree": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=TopKTree(((0.9999, 3), (1.0, 1)))),
}
SPEC = SPECS["exit"]
# Tokens of text in each row: one row, equal lengths, left-padded.
ROWS = {"one": (6,), "equal": (6, 6, 6), "ragged": (4, 9, 6)}


@cache
def _model(name: str) -> PreTrainedModel:
    return build(name)


def check(name: str, spec: SelfSpec, texts: tuple[int, ...] = ROWS["one"], **options: Any) -> None:
    """Asserts that a prompt with images has plain generate's tokens."""
    prompt = prompt_of(name, texts)
    expected = _model(name).generate(**prompt, **OPTIONS | options)
    assert torch.equal(_model(name).generate(**prompt, **OPTIONS | options, assistant=spec), expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_generate(name: str, rows: str) -> None:
    drafted = accepted = 0
    for spec in SPECS.values():
        check(name, spec, ROWS[rows])
        assert spec.stats is not None
        drafted, accepted = drafted + spec.stats.drafted, accepted + spec.stats.accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", MODELS)
def test_tokens_depend_on_the_image(name: str) -> None:
    ids = [_model(name).generate(**prompt_of(name, sign=sign), **OPTIONS, assistant=SPEC) for sign in (1.0, -1.0)]
    assert not torch.equal(*ids)


# Refused --------------------------------------------------------------------------------------------------------------


def refused(model: PreTrainedModel, error: type[SelfSpecError], words: tuple[str, ...], **inputs: Any) -> None:
    """Asserts that a call is refused in these words before a layer of the decoder has run."""
    forwards: list[torch.nn.Module] = []
    hooks = [layer.register_forward_pre_hook(lambda module, _: forwards.append(module)) for layer in layers_of(model)]
    try:
        with pytest.raises(error) as caught:
            model.generate(**inputs, **OPTIONS, assistant=SPEC)
    finally:
        for hook in hooks:
            hook.remove()
    assert not forwards
    for word in words:
        assert word in str(caught.value)


def layers_of(model: PreTrainedModel) -> tuple[torch.nn.Module, ...]:
    return () if model.config.is_encoder_decoder else Anatomy.of(model).layers


def test_tensors_of_models_of_text_alone_are_refused() -> None:
    words = ("tensor argument `token_type_ids`", "without `assistant`")
    refused(build_text("gpt2"), UnsupportedOptionError, words, **BATCH, token_type_ids=torch.zeros(3, 9).long())
    refused(tiny_llama(), UnsupportedOptionError, ("`inputs`",), inputs=torch.zeros(1, 3, 8, 8))
