"""Which ``SelfSpec`` serves a call: that of a model around the one that decodes, and ways that none reaches."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

import hf_selfspec
from helpers.calls import assert_used, calls
from helpers.models import ROW, tiny_llama
from hf_selfspec import SelfSpec, UnsupportedOptionError, attach, detach

pytestmark = pytest.mark.usefixtures("no_warnings_yet")


class Wrapping(PreTrainedModel):
    """Calls the ``generate`` of a language model inside, as BLIP-2 and Kosmos-2 do."""

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig())
        self.language_model = tiny_llama(factor=0.5)
        self.generation_config = GenerationConfig()

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.language_model.generate(input_ids, **options)


def test_a_language_model_inside(spec: SelfSpec) -> None:
    """Its ``generate`` is called by that of the model around it, to which a ``SelfSpec`` is attached, or its config."""
    model, inputs = Wrapping(), ROW
    with attach(model, spec):
        assert_used(model, spec, inputs)
    attach(model, spec)
    detach(model)
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
    with pytest.warns(UserWarning, match="generate of OwnLoop has a decode loop of its own, .* nothing is drafted"):
        attach(OwnLoop(llama.config), spec)


def kept_in_an_attribute(model: Any) -> Any:
    model.usual = model.generate
    return MethodType(lambda self, *args, **options: self.usual(*args, **options), model)


# What is set as a model's own ``generate``, and whether it may not reach ours.
REPLACED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "as Unsloth does": (kept_in_an_attribute, True),
    "a partial": (lambda model: functools.partial(model.generate, do_sample=False), True),
    "looked up": (lambda model: lambda *args, **options: type(model).generate(model, *args, **options), False),
    "a loop": (lambda model: lambda input_ids, **options: input_ids, True),
}


@pytest.mark.parametrize("form", REPLACED)
def test_a_generate_that_is_set_on_the_model(fresh_llama: LlamaForCausalLM, spec: SelfSpec, form: str) -> None:
    """Where it may not reach what is attached, ``attach`` says so."""
    make, is_told = REPLACED[form]
    hf_selfspec.uninstall()
    fresh_llama.generate = make(fresh_llama)
    hf_selfspec.install()
    words = r"generate of Llama.* reaches it only if hf_selfspec was imported before .* nothing is drafted"
    with pytest.warns(UserWarning, match=words) if is_told else nullcontext():
        attach(fresh_llama, spec)
    fresh_llama.generate(ROW["input_ids"], max_new_tokens=8)
    assert (spec.stats is None) is is_told


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
