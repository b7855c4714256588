"""A ``SelfSpec`` in a generation config: of the call, of the model, saved and loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, pipeline

from helpers.calls import calls, new_spec
from helpers.models import BATCH, ROW, character_tokenizer
from hf_selfspec import EarlyExit, SelfSpec, attach
from hf_selfspec.errors import SettingTypeError, UnsupportedOptionError, issued

pytestmark = pytest.mark.usefixtures("no_warnings_yet")

NAMES = ("assistant", "custom_generate")


@pytest.mark.parametrize(
    ("configured", "passed", "arguments"),
    [
        ({"num_beams": 2}, None, {"num_beams": 1}),
        ({"num_beams": 2}, {"num_beams": 1}, {}),
        ({}, {"num_beams": 3}, {"num_beams": 1}),
        ({"cache_implementation": "hybrid"}, {}, {}),
        ({"stop_strings": "x"}, {}, {"stop_strings": None}),
        ({"use_cache": False}, {}, {}),
    ],
    ids=str,
)
def test_options_are_those_of_generate(
    fresh_llama: LlamaForCausalLM, spec: SelfSpec, configured: Any, passed: Any, arguments: Any
) -> None:
    """The checks before a call see what ``generate`` merges, so that none of these is refused."""
    plain = fresh_llama.generate(**ROW, max_new_tokens=8)
    fresh_llama.generation_config.update(**configured)
    config = None if passed is None else GenerationConfig(**passed)
    ids = fresh_llama.generate(**ROW, max_new_tokens=8, generation_config=config, **arguments, assistant=spec)
    assert torch.equal(ids, plain)
    assert calls(spec) == 1


@pytest.mark.parametrize("name", NAMES)
def test_precedence(fresh_llama: LlamaForCausalLM, name: str) -> None:
    """Argument, passed config, the model's config, attached."""
    argument, passed, of_model, attached = specs = [new_spec() for _ in range(4)]
    plain, own = fresh_llama.generate(**BATCH, max_new_tokens=6), fresh_llama.generation_config
    attach(fresh_llama, attached)

    def used(config: GenerationConfig | None = None, **options: Any) -> list[int]:
        before = [calls(spec) for spec in specs]
        given = {"max_new_tokens": 6} if config is None else {"generation_config": config}
        assert torch.equal(fresh_llama.generate(**BATCH, **given, **options), plain)
        return [calls(spec) - old for spec, old in zip(specs, before, strict=True)]

    config = GenerationConfig(max_new_tokens=6, **{name: passed})
    assert used() == [0, 0, 0, 1]
    setattr(own, name, of_model)
    assert used() == used(GenerationConfig(max_new_tokens=6)) == [0, 0, 1, 0]
    assert used(config) == [0, 1, 0, 0]
    assert used(config, assistant=argument) == [1, 0, 0, 0]
    assert used(config, assistant=False) == [0, 0, 0, 0]
    assert used(GenerationConfig(assistant=False, max_new_tokens=6)) == [0, 0, 0, 0]
    fresh_llama.generate(BATCH["input_ids"], config)
    assert calls(passed) == 2
    assert (getattr(config, name), getattr(own, name)) == (passed, of_model)
    setattr(own, name, None)
    own.assistant = False
    assert used() == [0, 0, 0, 0]
    assert used(config) == [0, 1, 0, 0]


def test_what_a_passed_config_cannot_have_is_refused(fresh_llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    for name in ("num_beams", "prompt_lookup_num_tokens"):
        with pytest.raises(UnsupportedOptionError, match=f"{name}=2"):
            fresh_llama.generate(
                **ROW, generation_config=GenerationConfig(assistant=spec, max_new_tokens=4, **{name: 2})
            )
    with pytest.raises(SettingTypeError, match=r"GenerationConfig\(assistant=...\) takes a SelfSpec, .* got EarlyExit"):
        fresh_llama.generate(**ROW, generation_config=GenerationConfig(assistant=EarlyExit(3), max_new_tokens=4))


def test_what_the_models_config_cannot_serve_is_plain(fresh_llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """Also in a copy of it that is passed, as by pipelines and servers, whose caller did not ask for a ``SelfSpec``."""
    plain = fresh_llama.generate(**ROW, max_new_tokens=4, num_beams=2)
    fresh_llama.generation_config.assistant = spec
    config = copy.deepcopy(fresh_llama.generation_config)
    config.max_new_tokens = 4
    fresh_llama.generate(**ROW, generation_config=config)
    assert calls(spec) == 1
    config.num_beams = 2
    words = r"in the generation config of this LlamaForCausalLM cannot .*num_beams=2"
    for options in ({"max_new_tokens": 4, "num_beams": 2}, {"generation_config": config}):
        issued.clear()
        with pytest.warns(UserWarning, match=words):
            assert torch.equal(fresh_llama.generate(**ROW, **options), plain)
    pipe = pipeline("text-generation", model=fresh_llama, tokenizer=character_tokenizer())
    pipe("def f(x):", max_new_tokens=8, do_sample=False)
    assert calls(spec) == 2
    pipe("def f(x):", max_new_tokens=8, do_sample=False, num_beams=2)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_models_do_not_hold_it(fresh_llama: LlamaForCausalLM, tmp_path: Path, name: str) -> None:
    spec = SelfSpec(EarlyExit(3), stop=lambda ids, logits, states: ids[:, -1] % 2 == 0)
    setattr(fresh_llama.generation_config, name, spec)
    fresh_llama.generation_config.validate(strict=True)
    fresh_llama.save_pretrained(tmp_path)
    assert "EarlyExit" not in (tmp_path / "generation_config.json").read_text() + repr(fresh_llama.generation_config)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.generate(**ROW, max_new_tokens=4), fresh_llama.generate(**ROW, max_new_tokens=4))
    assert calls(spec) == 1


@pytest.mark.parametrize("value", ["someone", {"hf_selfspec": {"max_draft": 4}}], ids=str)
def test_what_files_hold_is_left_out_with_a_warning(fresh_llama: LlamaForCausalLM, value: Any) -> None:
    """In a model's config, and in a copy that a pipeline passes; as files of version 0.1 hold it, too."""
    plain = fresh_llama.generate(**ROW, max_new_tokens=4)
    fresh_llama.generation_config.assistant = value
    for passed in (None, copy.deepcopy(fresh_llama.generation_config)):
        issued.clear()
        with pytest.warns(UserWarning, match="generation config is left out: .* takes a SelfSpec, .* got"):
            ids = fresh_llama.generate(**ROW, max_new_tokens=4, generation_config=passed)
        assert torch.equal(ids, plain)


def test_copies_and_dicts(spec: SelfSpec) -> None:
    config = GenerationConfig(assistant=spec, max_new_tokens=8)
    for twin in (copy.copy(config), copy.deepcopy(config), GenerationConfig(**config.to_dict())):
        assert twin.assistant == spec
        assert twin == config
    assert config.to_diff_dict()["assistant"] == spec
