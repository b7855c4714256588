"""Which ``SelfSpec`` serves a call: that of a model around the one that decodes, and ways that none reaches."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    GenerationConfig,
    GenerationMixin,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from helpers.calls import assert_used, calls
from helpers.models import ROW, tiny_llama
from hf_selfspec import SelfSpec, UnsupportedOptionError, attach

pytestmark = pytest.mark.usefixtures("no_warnings_yet")


def blip_2() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 97, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    text |= {"word_embed_proj_dim": 64, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
    config = Blip2Config(
        vision_config=small | {"image_size": 30, "patch_size": 15},
        qformer_config=small | {"vocab_size": 97, "encoder_hidden_size": 32},
        text_config=text | {"model_type": "opt"},
        num_query_tokens=4,
        image_token_index=96,
    )
    ids = torch.cat([torch.full((1, 4), 96), ROW["input_ids"]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 30, 30)}
    return Blip2ForConditionalGeneration(config).eval(), inputs


def kosmos_2() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 97, "embed_dim": 64, "layers": 6, "ffn_dim": 64, "attention_heads": 4}
    config = Kosmos2Config(
        text_config=text | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        vision_config=vision | {"image_size": 32, "patch_size": 16},
        latent_query_num=4,
    )
    places = torch.zeros_like(ROW["input_ids"])
    places[:, 1:5] = 1
    inputs = ROW | {"pixel_values": torch.randn(1, 3, 32, 32), "image_embeds_position_mask": places}
    return Kosmos2ForConditionalGeneration(config).eval(), inputs


class Wrapping(PreTrainedModel):
    """A class of somebody's own around a language model."""

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self.language_model = tiny_llama(factor=0.5)
        self.generation_config = GenerationConfig()

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.language_model.generate(input_ids, **options)


WRAPPING: list[Callable[[], tuple[Any, dict[str, torch.Tensor]]]] = [blip_2, kosmos_2, lambda: (Wrapping(), ROW)]


@pytest.mark.parametrize("build", WRAPPING, ids=["blip_2", "kosmos_2", "own class"])
def test_a_language_model_inside(build: Callable[[], tuple[Any, dict[str, torch.Tensor]]], spec: SelfSpec) -> None:
    """Its ``generate`` is called by that of the model around it, to which a ``SelfSpec`` is attached, or its config."""
    torch.manual_seed(0)
    model, inputs = build()
    with attach(model, spec):
        assert_used(model, spec, inputs)
    plain = model.generate(**inputs, max_new_tokens=12)
    model.generation_config.assistant = spec
    assert_used(model, spec, inputs)
    # As a pipeline does, which is no choice of the caller's: what cannot be served is left to plain generate.
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = 12
    assert torch.equal(model.generate(**inputs, generation_config=config), plain)
    with pytest.warns(UserWarning, match=f"in the generation config of this {type(model).__name__} cannot serve"):
        model.generate(**inputs, generation_config=config, num_beams=2)
    assert calls(spec) == 3


class WithPart(LlamaForCausalLM):
    """Like Moshi: a smaller language model inside is asked in each step, and once more behind the last one."""

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.part.generate(super().generate(input_ids, **options), **options)


def test_a_language_model_inside_of_one_that_decodes(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """It is a part of what was attached to, whose own call is the one to serve."""

    def step(model: PreTrainedModel, input_ids: torch.Tensor, **prepared: Any) -> torch.Tensor:
        return model.part.generate(input_ids, max_new_tokens=4)

    model = WithPart(llama.config).eval()
    model.part = tiny_llama()
    with attach(model, spec):
        GenerationMixin.generate(model, **ROW, max_new_tokens=8, custom_generate=step)
        assert calls(spec) == 0
        model.generate(ROW["input_ids"], max_new_tokens=8)
        assert calls(spec) == 1


class OwnLoop(LlamaForCausalLM):
    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return input_ids


def test_a_decode_loop_of_its_own(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """Like MusicGen's."""
    with pytest.warns(UserWarning, match="generate of OwnLoop is a decode loop of its own, .* nothing is drafted"):
        attach(OwnLoop(llama.config), spec)


def test_continuous_batching(fresh_llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """It would swallow the argument; what is attached, or in the model's config, is left out with a warning."""
    words = "generate_batch .* has a decode loop of its own"
    for name in ("assistant", "custom_generate"):
        with pytest.raises(UnsupportedOptionError, match=words):
            fresh_llama.generate_batch([], **{name: spec})
    with pytest.raises(UnsupportedOptionError, match=words):
        fresh_llama.generate_batch([], GenerationConfig(assistant=spec))
    with attach(fresh_llama, spec), pytest.warns(UserWarning, match=f"attached to this .* is not used. {words}"):
        assert fresh_llama.generate_batch([]) == {}
    fresh_llama.generation_config.assistant = spec
    with pytest.warns(UserWarning, match=f"in the generation config .* is not used. {words}"):
        assert fresh_llama.generate_batch([]) == {}
    assert fresh_llama.generate_batch([], assistant=False) == {}
