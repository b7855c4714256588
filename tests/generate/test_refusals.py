"""What is refused is refused by name, before any forward: what was given, what is allowed, what to do."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.generation.candidate_generator import CandidateGenerator

import hf_selfspec
from helpers.calls import PAST
from helpers.models import BATCH, VOCABULARY, ragged_batch, tiny_gpt2, tiny_llama, tiny_rwkv, tiny_t5
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    NumericalError,
    SelfSpec,
    SelfSpecError,
    SettingError,
    SettingTypeError,
    SkipLayers,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_selfspec.model.module_tools import clock_of, is_tensor_parallel

ROW = ragged_batch((7,))


def refused(
    model: PreTrainedModel,
    error: type[SelfSpecError],
    words: tuple[str, ...],
    inputs: dict[str, torch.Tensor] = ROW,
    assistant: Any = None,
    **options: Any,
) -> None:
    """Asserts that ``generate`` fails before any module of the model has run, with words in the message."""
    ran: list[torch.nn.Module] = []
    options = {"max_new_tokens": 4, "assistant": SelfSpec() if assistant is None else assistant} | options
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.append(module))
    with handle, pytest.raises(error) as caught:
        model.generate(**inputs, **options)
    assert not ran
    for word in words:
        assert word in str(caught.value)


# Name, value, and words of the message beside the name and the value: what to do.
OPTIONS: list[tuple[str, Any, str]] = [
    ("num_beams", 2, "use num_beams=1"),
    ("num_beam_groups", 2, "leave it out"),
    ("penalty_alpha", 0.6, "leave it out"),
    ("constraints", ["x"], "use prefix_allowed_tokens_fn"),
    ("force_words_ids", [[5]], "use prefix_allowed_tokens_fn"),
    ("dola_layers", "high", "leave it out"),
    ("prompt_lookup_num_tokens", 3, "choose one of the two"),
    ("assistant_early_exit", 2, "SelfSpec(draft=EarlyExit(layer))"),
    ("cache_implementation", "quantized", "leave it out"),
    ("cache_implementation", "offloaded", "leave it out"),
    ("token_healing", True, "leave it out"),
    ("output_attentions", True, "leave it out"),
    ("output_hidden_states", True, "leave it out"),
]
OPTION_IDS = [f"{name}={value!r:.12}" for name, value, _ in OPTIONS]


@pytest.mark.parametrize(("name", "value", "advice"), OPTIONS, ids=OPTION_IDS)
def test_option(llama: LlamaForCausalLM, name: str, value: Any, advice: str) -> None:
    refused(llama, UnsupportedOptionError, (f"{name}={value!r}", advice), **{name: value})


@pytest.mark.parametrize("place", ["passed", "own"])
def test_option_of_a_config(fresh_llama: LlamaForCausalLM, place: str) -> None:
    config = GenerationConfig() if place == "passed" else fresh_llama.generation_config
    config.num_beams = 2
    refused(fresh_llama, UnsupportedOptionError, ("num_beams=2",), generation_config=config)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"use_cache": False}, UnsupportedOptionError, ("use_cache=False", "leave it out")),
        ({"generation_config": GenerationConfig(use_cache=False)}, UnsupportedOptionError, ("use_cache=False",)),
        ({"assistant_model": tiny_llama(1)}, UnsupportedOptionError, ("assistant_model", "give one of the two")),
        ({"custom_generate": SelfSpec()}, UnsupportedOptionError, ("custom_generate", "give one")),
        ({"stop_strings": "x"}, UnsupportedOptionError, ("stop_strings='x'", "tokenizer=tokenizer")),
        ({"prefill_chunk_size": 0}, SettingError, ("generate(prefill_chunk_size)", "at least 1", "got 0")),
        ({"cu_seq_lens_q": torch.arange(3)}, UnsupportedOptionError, ("`cu_seq_lens_q`", "without `assistant`")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_argument(llama: LlamaForCausalLM, options: Any, error: Any, words: Any) -> None:
    refused(llama, error, words, **options)


@pytest.mark.parametrize("installed", [True, False])
def test_custom_generate_refuses_too(llama: LlamaForCausalLM, installed: bool) -> None:
    """Also where ``generate`` is not wrapped, so that options are first seen when they have been prepared."""
    if not installed:
        hf_selfspec.uninstall()
    with pytest.raises(UnsupportedOptionError, match="prompt_lookup_num_tokens=3"):
        llama.generate(**ROW, max_new_tokens=4, custom_generate=SelfSpec(), prompt_lookup_num_tokens=3)
    hf_selfspec.install()


class KeepingMore(DynamicCache):
    """As MiniMax's own."""


@pytest.mark.parametrize("cache_class", ["StaticCache", "offloaded DynamicCache", "KeepingMore"])
def test_cache(llama: LlamaForCausalLM, cache_class: str) -> None:
    cache = StaticCache(llama.config, 64) if cache_class == "StaticCache" else DynamicCache(config=llama.config)
    cache = KeepingMore() if cache_class == "KeepingMore" else cache
    cache.offloading = cache_class.startswith("offloaded")  # one that is made so makes streams of a GPU
    words = (f"a KV cache of type {cache_class}", "pass a DynamicCache")
    refused(llama, UnsupportedOptionError, words, **{PAST: cache})


@pytest.mark.parametrize("part", [lambda cache: cache, lambda cache: cache.layers[1]])
def test_cache_with_methods_of_others(llama: LlamaForCausalLM, part: Callable[[DynamicCache], Any]) -> None:
    cache = DynamicCache(config=llama.config)
    changed = part(cache)
    changed.update = functools.partial(changed.update)
    refused(llama, UnsupportedOptionError, ("has methods of others (update)", "as it is"), **{PAST: cache})


def test_usual_position_ids_are_fine(llama: LlamaForCausalLM) -> None:
    positions = torch.arange(7)[None]
    plain = llama.generate(**ROW, max_new_tokens=8)
    assert torch.equal(llama.generate(**ROW, max_new_tokens=8, position_ids=positions, assistant=SelfSpec()), plain)


def masked(row: int, *columns: int | None) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(BATCH["input_ids"])
    mask[row, slice(*columns)] = 0
    return {"input_ids": BATCH["input_ids"], "attention_mask": mask}


@pytest.mark.parametrize(
    ("inputs", "spec", "error", "words"),
    [
        ({"input_ids": torch.zeros(1, 0).long()}, SelfSpec(), SettingError, ("the prompt is empty", "one token")),
        ({"inputs_embeds": torch.zeros(1, 0, 64)}, SelfSpec(), SettingError, ("the prompt is empty", "one token")),
        (masked(1, None), SelfSpec(), SettingError, ("the prompt of row 1 is empty", "at least one token")),
        (
            BATCH | {"position_ids": torch.arange(9)[None] + 3},
            SelfSpec(),
            UnsupportedOptionError,
            ("position_ids", "Leave them out"),
        ),
    ],
)
def test_prompt(llama: LlamaForCausalLM, inputs: Any, spec: SelfSpec, error: Any, words: Any) -> None:
    refused(llama, error, words, inputs, assistant=spec)


def test_nothing_new_beside_the_cache(llama: LlamaForCausalLM) -> None:
    """A cache that already holds all of the prompt leaves nothing to go on from."""
    output = llama.generate(**ROW, max_new_tokens=4, return_dict_in_generate=True)
    inputs = {"input_ids": output.sequences[:, :-1]}
    words = (
        "the prompt is empty: 10 columns of input for a text of 10 tokens",
        "10 are in the cache",
        "Pass the whole text with at least one token",
    )
    refused(llama, SettingError, words, inputs, **{PAST: output.past_key_values})


def test_prompt_beyond_the_learned_positions() -> None:
    words = ("the prompt has 33 tokens", "32 positions", "Shorten the prompt")
    refused(tiny_gpt2(), SettingError, words, ragged_batch((33,)))


@pytest.mark.parametrize(("inputs", "bad"), [(ROW, torch.nan), (BATCH, torch.inf)], ids=["one row", "batch"])
def test_bad_logits(fresh_llama: LlamaForCausalLM, inputs: dict[str, torch.Tensor], bad: float) -> None:
    fresh_llama.lm_head.weight.data[5] = bad
    with pytest.raises(NumericalError, match=r"LlamaForCausalLM returned NaN or infinite logits\. Check the weights"):
        fresh_llama.generate(**inputs, max_new_tokens=8, assistant=SelfSpec())
    options = {"max_new_tokens": 8, "remove_invalid_values": True}
    ids = fresh_llama.generate(**inputs, **options, assistant=SelfSpec())
    assert torch.equal(ids, fresh_llama.generate(**inputs, **options))


class BreaksCall:
    """A hook after which a module gets NaN in the call with this number, counted from :meth:`begin` on."""

    def __init__(self, module: torch.nn.Module, number: int) -> None:
        self.left, self.number = 0, number
        self.remove = module.register_forward_pre_hook(self).remove

    def begin(self) -> None:
        self.left = self.number

    def __call__(self, _: Any, args: Any) -> Any:
        self.left -= 1
        return (args[0] * float("nan"),) if self.left == 0 else args


@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "ragged batch"])
def test_bad_logits_later_on(inputs: dict[str, torch.Tensor]) -> None:
    """In a verification it is an error; in a draft, which may overflow, only the end of the draft."""
    model, spec = tiny_llama(factor=0.5), SelfSpec(draft=EarlyExit(3), stop=FixedLength(4))
    plain = model.generate(**inputs, max_new_tokens=8)
    verification = BreaksCall(model.model.layers[5].mlp, 2)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, assistant=spec), plain)  # which checks the hook
    verification.begin()
    with pytest.raises(NumericalError, match="NaN"):
        model.generate(**inputs, max_new_tokens=8, assistant=spec)
    verification.remove()
    draft = BreaksCall(model.lm_head, 3)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, assistant=spec), plain)
    draft.begin()
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, assistant=spec), plain)
    draft.remove()
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, assistant=spec), plain)


def without_a_list() -> PreTrainedModel:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32)).eval()
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)
    return model


def looped() -> PreTrainedModel:
    """With a field of Inkling 2's config."""
    model = tiny_llama()
    model.config.loop_num_passes = 2
    return model


def twice(part: str) -> PreTrainedModel:
    """With layer 2, or its attention, in the place of layer 3 as well."""
    model = tiny_llama()
    owner = model.model.layers if part.isdigit() else model.model.layers[3]
    setattr(owner, part, model.model.layers[2] if part.isdigit() else model.model.layers[2].self_attn)
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (tiny_t5, ("T5ForConditionalGeneration is an encoder-decoder", "needs a decoder-only model")),
        (tiny_rwkv, ("RwkvForCausalLM is stateful", "(rwkv)", "rolled back", "without `assistant`")),
        (looped, ("LlamaForCausalLM runs layers several times", "loop_num_passes=2", "without `assistant`")),
        (lambda: twice("3"), ("runs one layer, or attention block, several times", "without `assistant`")),
        (lambda: twice("self_attn"), ("runs one layer, or attention block, several times", "without `assistant`")),
        (without_a_list, ("GPT2LMHeadModel", "0 module lists", "register_architecture(")),
    ],
)
def test_model(build: Callable[[], PreTrainedModel], words: tuple[str, ...]) -> None:
    refused(build(), UnsupportedModelError, words)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SelfSpec(EarlyExit(6)), ("EarlyExit(layer=6)", "6 layers", "between 1 and 5")),
        (SelfSpec.layerskip(6), ("(layer=6) is not possible: ", "has 6 layers")),
        (SelfSpec(SkipLayers(attention=[5])), ("SkipLayers(attention) names layer 5", "1 to 4 can be skipped")),
        (SelfSpec(SkipLayers(mlp=[2, 77])), ("SkipLayers(mlp) names layer 77", "1 to 4 can be skipped")),
        (SelfSpec(SkipLayers(attention=[], mlp=[])), ("skips nothing", "Name at least one block")),
    ],
    ids=lambda value: f"{value!r:.60}",
)
def test_block_that_does_not_exist(llama: LlamaForCausalLM, spec: SelfSpec, words: Any) -> None:
    refused(llama, SettingError, words, assistant=spec)


def test_models_with_too_few_layers() -> None:
    refused(tiny_llama(1), SettingError, ("LlamaForCausalLM has one layer",), assistant=SelfSpec.layerskip())
    options = {"assistant": SelfSpec.swift(), "max_new_tokens": 64}
    refused(tiny_llama(3), SettingError, ("at least 4 layers, but LlamaForCausalLM has",), **options)


@pytest.mark.parametrize("assistant", ["something", 3, EarlyExit(2), SelfSpec], ids=repr)
def test_assistant_of_another_type(llama: LlamaForCausalLM, assistant: Any) -> None:
    refused(llama, SettingTypeError, ("takes a SelfSpec", repr(assistant), "assistant_model"), assistant=assistant)


class Told(CandidateGenerator):
    """Drafts what it was told, with logits of the shape that it was told, behind a text without its first tokens."""

    def __init__(self, token: int, shape: tuple[int, ...] | None, forgets: int = 0) -> None:
        self.token, self.shape, self.forgets = token, shape, forgets

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        drafted = torch.cat([input_ids[:, self.forgets :], torch.full((1, 2), self.token)], dim=1)
        return drafted, None if self.shape is None else torch.zeros(self.shape)


@pytest.mark.parametrize(
    ("candidates", "words"),
    [
        (Told(VOCABULARY, None), rf"token ids from {VOCABULARY} to {VOCABULARY}.*0 to {VOCABULARY - 1}"),
        (Told(5, (1, 1, VOCABULARY)), r"logits of shape \[1, 1, 97\] for 2 drafted tokens. Return \[1, 2, 97\]"),
        (Told(5, (1, 2, 3)), r"logits of shape \[1, 2, 3\]"),
        (Told(5, None, 3), r"Told\.get_candidates must return the given ids \[1, 8\] followed by"),
    ],
)
def test_wrong_candidates(llama: LlamaForCausalLM, candidates: Told, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        llama.generate(**ROW, max_new_tokens=8, do_sample=True, assistant=SelfSpec(draft=candidates))


def test_a_model_that_does_not_tell_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are several, and transformers has renamed what tells them."""
    llama = tiny_llama()
    assert not is_tensor_parallel(llama)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not is_tensor_parallel(llama)
    llama._tp_size = 2
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM are spread .* \(_device_mesh\)"):
        clock_of(llama, lambda: 0)
    del llama._tp_size
    for base in type(llama).__mro__:
        if "_tp_size" in vars(base):
            monkeypatch.delattr(base, "_tp_size")
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no _tp_size, so that it cannot be told"):
        is_tensor_parallel(llama)


def test_an_encoder_is_no_decoder() -> None:
    """Its tokens see later ones, so drafts would change what they follow; with ``is_decoder`` it is served."""
    for is_decoder in (False, True):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, is_decoder=is_decoder, **sizes)).eval()
        if is_decoder:
            expected = model.generate(**ROW, max_new_tokens=6, do_sample=False)
            assert torch.equal(
                model.generate(**ROW, max_new_tokens=6, do_sample=False, assistant=SelfSpec.lookup()), expected
            )
        else:
            with pytest.raises(UnsupportedModelError, match=r"is an encoder: .*is_decoder=True"):
                model.generate(**ROW, max_new_tokens=6, assistant=SelfSpec.lookup())
