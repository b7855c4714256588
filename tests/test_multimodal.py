"""Models that take more than text: prompts of text alone have plain generate's tokens, others are refused early."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from architectures import build as build_text
from conftest import ragged_batch, tiny_llama
from multimodal import IMAGE, MODELS, build
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

import hf_selfspec
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree, UnsupportedOptionError

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
BATCH = ragged_batch((4, 9, 6), vocabulary=IMAGE)
SPECS = {
    "exit": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
    "skip": SelfSpec(draft=SkipLayers(attention=[1], mlp=[2]), stop=FixedLength(3)),
    "tree": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=TopKTree(((0.9999, 3), (1.0, 1)))),
}
QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
SPEC = SPECS["exit"]


@cache
def _model(name: str) -> PreTrainedModel:
    return build(name)


def picture_of(name: str) -> dict[str, torch.Tensor]:
    """A prompt with a picture of four tokens."""
    ids = ragged_batch((10,), vocabulary=IMAGE)["input_ids"]
    ids[:, 2:6] = IMAGE
    torch.manual_seed(5)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name not in QWEN:
        return inputs | {"pixel_values": torch.randn(1, 3, 8, 8)}
    marks = {"mm_token_type_ids": (ids == IMAGE).int(), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return inputs | marks | {"pixel_values": torch.randn(16, 96)}


# Text alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_text_alone(name: str, rows: int) -> None:
    model = _model(name)
    batch = {key: value[3 - rows :] if rows == 3 else value[1:2] for key, value in BATCH.items()}
    expected = model.generate(**batch, **OPTIONS)
    drafted = accepted = 0
    for spec in SPECS.values():
        assert torch.equal(model.generate(**batch, **OPTIONS, assistant=spec), expected)
        assert spec.stats is not None
        drafted, accepted = drafted + spec.stats.drafted, accepted + spec.stats.accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "qwen3_vl"])
def test_marks_of_text_are_no_input_beside_it(name: str) -> None:
    """Processors give them with prompts that have no image."""
    marks = {"token_type_ids" if name == "gemma3" else "mm_token_type_ids": torch.zeros_like(BATCH["input_ids"])}
    expected = _model(name).generate(**BATCH, **marks, **OPTIONS)
    assert torch.equal(_model(name).generate(**BATCH, **marks, **OPTIONS, assistant=SPEC), expected)


@pytest.mark.parametrize("name", QWEN)
def test_chats_of_text_go_on(name: str) -> None:
    model = _model(name)
    first = model.generate(**BATCH, **OPTIONS, assistant=SPEC, return_dict_in_generate=True)
    more = torch.cat([first.sequences, BATCH["input_ids"][:, -2:]], dim=1)
    mask = torch.cat([BATCH["attention_mask"], torch.ones(3, 22, dtype=torch.long)], dim=1)
    expected = model.generate(more, attention_mask=mask, **OPTIONS)
    ids = model.generate(more, attention_mask=mask, past_key_values=first.past_key_values, **OPTIONS, assistant=SPEC)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("name", QWEN)
def test_images_before_and_after(name: str) -> None:
    """What an image call leaves on the model (``rope_deltas``) disturbs no call of text, and the other way round."""
    model, picture = _model(name), picture_of(name)
    expected = model.generate(**BATCH, **OPTIONS)
    with_picture = model.generate(**picture, **OPTIONS)
    assert torch.equal(model.generate(**BATCH, **OPTIONS, assistant=SPEC), expected)
    assert torch.equal(model.generate(**picture, **OPTIONS), with_picture)
    assert torch.equal(model.generate(**BATCH, **OPTIONS), expected)


def test_usual_positions_in_several_dimensions() -> None:
    model = _model("qwen2_vl")
    positions = torch.arange(9)[None, None].expand(3, 1, -1)
    row = {name: value[1:2] for name, value in BATCH.items()}
    expected = model.generate(**row, **OPTIONS)
    assert torch.equal(model.generate(**row, **OPTIONS, position_ids=positions, assistant=SPEC), expected)


# More than text -------------------------------------------------------------------------------------------------------


def refused(model: PreTrainedModel, words: tuple[str, ...], **inputs: Any) -> None:
    """Asserts that a call is refused in these words before any module of the model has run."""
    forwards: list[torch.nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda module, _: forwards.append(module)) for module in model.modules()]
    try:
        with pytest.raises(UnsupportedOptionError) as caught:
            model.generate(**inputs, **OPTIONS)
    finally:
        for hook in hooks:
            hook.remove()
    assert not forwards
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("argument", ["assistant", "custom_generate"])
@pytest.mark.parametrize("name", ["llava", "paligemma", "idefics3", "smolvlm", "internvl", "llama4", "gemma3", *QWEN])
def test_images_are_refused(name: str, argument: str) -> None:
    words = ("`pixel_values`", type(_model(name)).__name__, "Prompts of text alone are", "without `assistant`")
    refused(_model(name), words, **picture_of(name), **{argument: SelfSpec()})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("llava", {"image_embeds": torch.zeros(1, 4, 32)}),
        ("llava", {"pixel_values": [torch.zeros(3, 8, 8)]}),
        ("llava", {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=torch.zeros(1, 4, 32))}}),
        ("qwen2_audio", {"input_features": torch.zeros(1, 8, 32)}),
        ("qwen2_vl", {"mm_token_type_ids": torch.ones(1, 9, dtype=torch.long)}),
    ],
)
def test_any_input_beside_text_is_refused(name: str, given: dict[str, Any]) -> None:
    ids = BATCH["input_ids"][1:2]
    refused(_model(name), (f"`{next(iter(given))}`", "beside the text"), input_ids=ids, **given, assistant=SPEC)


def test_marks_that_change_the_attention_are_refused() -> None:
    """Zeros make a prefix of PaliGemma's see all of itself."""
    given = {"token_type_ids": torch.zeros_like(BATCH["input_ids"])}
    refused(_model("paligemma"), ("`token_type_ids`",), **BATCH, **given, assistant=SPEC)
    refused(build_text("gpt2"), ("tensor argument `token_type_ids`",), **BATCH, **given, assistant=SPEC)


def test_floating_inputs_are_refused() -> None:
    refused(tiny_llama(), ("`inputs`",), inputs=torch.zeros(1, 3, 8, 8), assistant=SPEC)


def test_encoded_images_are_refused_without_the_wrapper() -> None:
    """Without it transformers has run the image encoder; no layer of the decoder runs."""
    hf_selfspec.uninstall()
    try:
        with pytest.raises(UnsupportedOptionError, match="input of LlavaForConditionalGeneration beside"):
            _model("llava").generate(**picture_of("llava"), **OPTIONS, custom_generate=SPEC)
    finally:
        hf_selfspec.install()


@pytest.mark.parametrize("name", QWEN)
def test_text_behind_a_picture_is_refused(name: str) -> None:
    picture = picture_of(name)
    output = _model(name).generate(**picture, **OPTIONS, return_dict_in_generate=True)
    ids = torch.cat([output.sequences, BATCH["input_ids"][1:2]], dim=1)
    words = ("`position_ids`", "behind an image in the cache", "without `assistant`")
    refused(_model(name), words, input_ids=ids, past_key_values=output.past_key_values, assistant=SPEC)


def test_positions_of_ones_own_in_several_dimensions() -> None:
    positions = torch.arange(9)[None, None].repeat(3, 1, 1)
    positions[1] += 1
    ids = BATCH["input_ids"][1:2]
    refused(_model("qwen2_vl"), ("`position_ids` that differ",), input_ids=ids, position_ids=positions, assistant=SPEC)
