"""``attach``: calls that cannot be given an argument, against plain generate of the same model."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

import hf_selfspec
from helpers.calls import PLAIN, Recorder, assert_not_used, assert_used, calls, new_spec
from helpers.models import BATCH, ROW, tiny_llama, tiny_rwkv, tiny_t5
from helpers.processes import peft_calls_old_name
from hf_selfspec import SelfSpec, UnsupportedOptionError, attach, detach

pytestmark = [peft_calls_old_name, pytest.mark.usefixtures("no_warnings_yet")]


@pytest.mark.parametrize(
    "where", ["model.layers.1", "hf_selfspec.generate.decoder.prefill", "hf_selfspec.generate.call.cache_for"]
)
def test_a_default_never_breaks_a_call(
    fresh_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, spec: SelfSpec, where: str
) -> None:
    """Whatever is raised before the first token: plain ``generate`` serves the call and a warning says why."""
    expected = fresh_llama.generate(**ROW, max_new_tokens=8)
    place = (fresh_llama.get_submodule(where), "forward") if where.startswith("model.") else (where,)

    def fail(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(*place, fail)
    with attach(fresh_llama, spec), pytest.warns(UserWarning, match="cannot serve .*no room"):
        assert torch.equal(fresh_llama.generate(**ROW, max_new_tokens=8), expected)
    assert "no room" in spec.stats.left_to_generate
    monkeypatch.setattr(*place, fail)
    with pytest.raises(torch.OutOfMemoryError):
        fresh_llama.generate(**ROW, max_new_tokens=8, assistant=spec)


def test_until_detached_or_the_end_of_a_block(fresh_llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """The end of a block, and an error in it, restore what was attached before; a block can be entered again."""
    inner, names = new_spec(), set(vars(fresh_llama))
    attachment = attach(fresh_llama, spec)
    assert_used(fresh_llama, spec, ROW)
    with attachment as attached:
        assert attached is spec
        with attach(fresh_llama, inner):
            assert_used(fresh_llama, inner)
        with pytest.raises(ZeroDivisionError), attach(fresh_llama, inner):
            raise ZeroDivisionError
        assert_used(fresh_llama, spec)
    assert_not_used(fresh_llama, spec)
    with attachment:
        attach(fresh_llama, inner)
        assert_used(fresh_llama, inner)
        for _ in range(2):
            detach(fresh_llama)
            assert_not_used(fresh_llama, inner)
    assert set(vars(fresh_llama)) == names


def test_it_belongs_to_the_object(spec: SelfSpec) -> None:
    """In all threads; copies and pickles have nothing attached, and the model is not kept alive."""
    model = tiny_llama()
    attach(model, spec)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_not_used(twin, spec)
    thread = threading.Thread(target=model.generate, kwargs=ROW | {"max_new_tokens": 8})
    thread.start()
    thread.join()
    assert calls(spec) == 1
    alive = weakref.ref(model)
    del model, thread
    gc.collect()
    assert alive() is None


def test_wrappers(fresh_llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """Before and after they are there."""
    attach(fresh_llama, spec)
    assert_used(torch.compile(fresh_llama, backend="eager"), spec)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(fresh_llama, config).eval()
    assert_used(wrapped, spec)
    detach(wrapped)
    assert_not_used(fresh_llama, spec)
    attach(wrapped, spec)
    assert_used(fresh_llama, spec)
    assert_used(wrapped, spec)
    assert_used(wrapped.merge_and_unload(), spec)


@pytest.mark.parametrize("where", ["attached", "config"])
def test_another_way_of_decoding_wins(fresh_llama: LlamaForCausalLM, spec: SelfSpec, where: str) -> None:
    """Also inside: a model that exits early, or a second model, drafts with calls of its own generate."""

    def own_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> str:
        return "own loop"

    config, small = GenerationConfig(max_new_tokens=8), tiny_llama(layers=2)
    plain = fresh_llama.generate(**ROW, max_new_tokens=8)
    for model in (fresh_llama, small):
        attach(model, spec) if where == "attached" else setattr(model.generation_config, "assistant", spec)
    assert fresh_llama.generate(**ROW, generation_config=config, custom_generate=own_loop) == "own loop"
    assert fresh_llama.generate(ROW["input_ids"], config, *[None] * 8, own_loop) == "own loop"
    for option in (
        {"max_new_tokens": 8, "prompt_lookup_num_tokens": 3},
        {"max_new_tokens": 8, "assistant_early_exit": 3},
        {"max_new_tokens": 8, "assistant_model": small},
        {"generation_config": GenerationConfig(max_new_tokens=8, prompt_lookup_num_tokens=3)},
        {"generation_config": GenerationConfig(max_new_tokens=8, assistant=spec), "assistant_model": small},
    ):
        assert torch.equal(fresh_llama.generate(**ROW, **option), plain)
    assert calls(spec) == 0


def masked(row: int) -> dict[str, torch.Tensor]:
    """A prompt of nothing but padding."""
    mask = BATCH["attention_mask"].clone()
    mask[row] = 0
    return BATCH | {"attention_mask": mask}


OWN_POSITIONS = {**ROW, "position_ids": torch.arange(12)[None] + 3}


def eager() -> PreTrainedModel:
    model = tiny_llama(factor=0.5)
    model.set_attn_implementation("eager")
    return model


# What a SelfSpec cannot serve: the model, what is passed, and words of the warning.
NOT_SERVED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (eager, ROW | {"num_beams": 2}, "num_beams"),
    (eager, ROW | {"output_attentions": True}, "output_attentions"),
    (tiny_t5, ROW, "is an encoder-decoder"),
    (tiny_rwkv, ROW, "is stateful"),
    (eager, masked(1), "the prompt of row 1 is empty"),
]


@pytest.mark.parametrize(("make", "given", "words"), NOT_SERVED, ids=[words for *_, words in NOT_SERVED])
def test_what_cannot_be_served(make: Callable[[], Any], given: dict[str, Any], words: str) -> None:
    """Is what plain gives, with one warning in two calls."""
    model, spec, options = make(), new_spec(), {"max_new_tokens": 6, "return_dict_in_generate": True}
    plain = model.generate(**given, **options, **PLAIN)
    with attach(model, spec):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(model.generate(**given, **options).sequences, plain.sequences)
            if words.startswith("the prompt"):  # another number is no reason for another warning
                model.generate(**masked(2), max_new_tokens=2)
        assert calls(spec) == 0
        assert words.partition(" of row")[0] in spec.stats.left_to_generate
        (told,) = [warning for warning in caught if "SelfSpec" in str(warning.message)]
        assert f"attached to this {type(model).__name__} cannot serve a call, so plain" in str(told.message)
        assert words in str(told.message)
        assert told.filename == __file__, "not the line of the caller"


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_what_only_the_prepared_call_shows(fresh_llama: LlamaForCausalLM, spec: SelfSpec, sampled: bool) -> None:
    """Transformers' loop goes on with what is prepared: same random numbers, and the streamer gets the prompt once."""
    streamed = []
    attach(fresh_llama, spec)
    for options, told in ((PLAIN, nullcontext()), ({}, pytest.warns(UserWarning, match="position_ids"))):
        torch.manual_seed(3)
        recorder = Recorder()
        with told:
            fresh_llama.generate(**OWN_POSITIONS, do_sample=sampled, max_new_tokens=9, streamer=recorder, **options)
        streamed.append(recorder.calls)
    assert streamed[0] == streamed[1]


def test_statistics_are_those_of_the_last_call(fresh_llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    """Also where plain generate has served it, whether that was known before the prompt was prepared or after; another
    reason is another warning."""
    with attach(fresh_llama, spec):
        for given in (ROW | {"num_beams": 2}, OWN_POSITIONS):
            fresh_llama.generate(**ROW, max_new_tokens=8)
            assert (spec.stats.left_to_generate, spec.stats.tokens) == ("", 8)
            with pytest.warns(UserWarning, match="plain generate serves it"):
                fresh_llama.generate(**given, max_new_tokens=4)
            assert (spec.stats.tokens, spec.stats.drafted) == (0, 0)
            assert spec.stats.total_seconds > 0
            assert str(spec.stats).startswith("left to plain generate, since this SelfSpec cannot serve it (")


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
    model = Wrapping()
    attach(model, spec)
    assert_used(model, spec, ROW)
    detach(model)
    assert_not_used(model, spec)
    model.generation_config.assistant = spec
    assert_used(model, spec, ROW)
    # As a pipeline does, which is no choice of the caller's: what cannot be served is left to plain generate.
    config = copy.deepcopy(model.generation_config)
    assert_used(model, spec, ROW, generation_config=config)
    with pytest.warns(UserWarning, match="in the generation config of this Wrapping cannot serve"):
        model.generate(**ROW, generation_config=config, num_beams=2, max_new_tokens=4)
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
    """Like MusicGen."""

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return input_ids


def as_unsloth_does(model: Any) -> Any:
    model.usual = model.generate
    return MethodType(lambda self, *args, **options: self.usual(*args, **options), model)


# What is set as a model's own ``generate``, and the warning where it may not reach ours.
MAYBE = "generate of Llama.* reaches it only if hf_selfspec was imported before .* nothing is drafted"
REPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "as Unsloth does": (as_unsloth_does, MAYBE),
    "looked up": (lambda model: lambda *args, **options: type(model).generate(model, *args, **options), ""),
    "a loop": (lambda model: lambda input_ids, **options: input_ids, MAYBE),
}


@pytest.mark.parametrize("form", REPLACED)
def test_a_generate_of_a_models_own(fresh_llama: LlamaForCausalLM, spec: SelfSpec, form: str) -> None:
    """Where it may not reach what is attached, ``attach`` says so."""
    make, words = REPLACED[form]
    hf_selfspec.uninstall()
    fresh_llama.generate = make(fresh_llama)
    hf_selfspec.install()
    with pytest.warns(UserWarning, match=words) if words else nullcontext():
        attach(fresh_llama, spec)
    fresh_llama.generate(ROW["input_ids"], max_new_tokens=8)
    assert (spec.stats is None) is bool(words)
    with pytest.warns(UserWarning, match="generate of OwnLoop has a decode loop of its own, .* nothing is drafted"):
        attach(OwnLoop(fresh_llama.config), spec)


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
