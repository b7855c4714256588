"""What is refused is refused by name, before any forward: what was given, what is allowed, what to do."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
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
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

import hf_selfspec
from helpers.calls import PAST
from helpers.models import BATCH, VOCABULARY, ragged_batch, tiny_gpt2, tiny_llama, tiny_rwkv, tiny_t5
from helpers.processes import peft_calls_old_name
from hf_selfspec import (
    DraftSource,
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
    attach,
)

pytestmark = peft_calls_old_name

ROW = ragged_batch((7,))
Words = tuple[str, ...]

# Name, value, and words of the message beside the name and the value: what to do.
OPTIONS: list[tuple[str, Any, str]] = [
    ("num_beams", 2, "use num_beams=1"),
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


KeepingMore = type("KeepingMore", (DynamicCache,), {})  # as MiniMax's own


def masked(row: int, *columns: int | None) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(BATCH["input_ids"])
    mask[row, slice(*columns)] = 0
    return {"input_ids": BATCH["input_ids"], "attention_mask": mask}


def without_a_list() -> PreTrainedModel:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32)).eval()
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)
    return model


def twice(part: str) -> PreTrainedModel:
    """With layer 2, or its attention, in the place of layer 3 as well."""
    model = tiny_llama()
    owner = model.model.layers if part.isdigit() else model.model.layers[3]
    setattr(owner, part, model.model.layers[2] if part.isdigit() else model.model.layers[2].self_attn)
    return model


def adapted(config: peft.PeftConfig) -> Any:
    return peft.get_peft_model(tiny_llama(), config).eval()


def encoder(is_decoder: bool = False) -> BertLMHeadModel:
    """Its tokens see later ones, so drafts would change what they follow."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, is_decoder=is_decoder, **sizes)).eval()


def with_rope(kind: str, **parameters: Any) -> LlamaForCausalLM:
    """Whose rotary frequencies change behind 32 tokens."""
    config = tiny_llama().config
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config.rope_parameters |= parameters
    return LlamaForCausalLM(config).eval()


def with_config(name: str, value: Any, of: str = "config") -> LlamaForCausalLM:
    model = tiny_llama()
    setattr(getattr(model, of), name, value)
    return model


def cache_of(part: Callable[[DynamicCache], Any] | None = None, is_offloaded: bool = False) -> dict[str, Any]:
    """One whose part has a method of others, or that is offloaded (one that is made so makes streams of a GPU)."""
    cache = DynamicCache(config=tiny_llama().config)
    cache.offloading = is_offloaded
    if part is not None:
        changed = part(cache)
        changed.update = functools.partial(changed.update)
    return {PAST: cache}


def of(draft: Any, stop: Any = None) -> dict[str, Any]:
    return {"assistant": SelfSpec(draft, stop)}


PROMPT = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
ALORA = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
LONGROPE = functools.partial(with_rope, "longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, factor=16.0)
LONG, SEVERAL = {"max_new_tokens": 26}, ("runs one layer, or attention block, several times", "without `assistant`")
OPTION, MODEL = UnsupportedOptionError, UnsupportedModelError
INVOKED, STATIC = {"input_ids": torch.tensor([[3, 4, 5, 6, 7, 8]])}, StaticCache(tiny_llama().config, 64)
SWIFT = {"assistant": SelfSpec.swift(), "max_new_tokens": 64}
EMPTY, TAKES = ("the prompt is empty", "one token"), ("takes a SelfSpec", "assistant_model")
# What makes the model, what is given beside the usual prompt, the error and words of its message.
CALLS: dict[str, tuple[Callable[[], Any] | None, Any, type[SelfSpecError], Words]] = {
    **{
        f"{name}={value!r:.12}": (None, {name: value}, OPTION, (f"{name}={value!r}", advice))
        for name, value, advice in OPTIONS
    },
    "beams of the model's": (lambda: with_config("num_beams", 2, "generation_config"), {}, OPTION, ("num_beams=2",)),
    "no cache": (None, {"use_cache": False}, OPTION, ("use_cache=False", "leave it out")),
    "no cache in a config": (None, {"generation_config": GenerationConfig(use_cache=False)}, OPTION, ("use_cache",)),
    "a second model": (None, {"assistant_model": tiny_llama(1)}, OPTION, ("assistant_model", "give one of the two")),
    "custom_generate": (None, {"custom_generate": SelfSpec()}, OPTION, ("custom_generate", "give one")),
    "stop strings": (None, {"stop_strings": "x"}, OPTION, ("stop_strings='x'", "tokenizer=tokenizer")),
    "chunks": (None, {"prefill_chunk_size": 0}, SettingError, ("(prefill_chunk_size)", "at least 1", "got 0")),
    "packed": (None, {"cu_seq_lens_q": torch.arange(3)}, OPTION, ("`cu_seq_lens_q`", "without `assistant`")),
    "static cache": (None, {PAST: STATIC}, OPTION, ("a KV cache of type StaticCache", "pass a DynamicCache")),
    "offloaded cache": (None, cache_of(is_offloaded=True), OPTION, ("type offloaded DynamicCache", "pass a Dyn")),
    "own cache": (None, {PAST: KeepingMore()}, OPTION, ("a KV cache of type KeepingMore", "pass a DynamicCache")),
    "method of a cache": (None, cache_of(lambda cache: cache), OPTION, ("methods of others (update)", "as it is")),
    "method of a layer": (None, cache_of(lambda cache: cache.layers[1]), OPTION, ("methods of others (update)",)),
    "no tokens": (None, {"input_ids": torch.zeros(1, 0).long()}, SettingError, EMPTY),
    "no embeddings": (None, {"inputs_embeds": torch.zeros(1, 0, 64)}, SettingError, EMPTY),
    "no tokens in a row": (None, masked(1, None), SettingError, ("the prompt of row 1 is empty", "at least one")),
    "positions": (None, BATCH | {"position_ids": torch.arange(9)[None] + 3}, OPTION, ("position_ids", "Leave them")),
    "too long": (tiny_gpt2, ragged_batch((33,)), SettingError, ("33 tokens", "32 positions", "Shorten the prompt")),
    "encoder-decoder": (tiny_t5, {}, MODEL, ("T5ForConditionalGeneration is an encoder-decoder", "decoder-only")),
    "encoder": (encoder, {}, MODEL, ("is an encoder: ", "is_decoder=True")),
    "states": (tiny_rwkv, {}, MODEL, ("RwkvForCausalLM is stateful", "(rwkv)", "rolled back", "without `assistant`")),
    "Inkling 2": (lambda: with_config("loop_num_passes", 2), {}, MODEL, ("several times", "loop_num_passes=2")),
    "a layer twice": (lambda: twice("3"), {}, MODEL, SEVERAL),
    "a block twice": (lambda: twice("self_attn"), {}, MODEL, SEVERAL),
    "no list": (without_a_list, {}, MODEL, ("GPT2LMHeadModel", "0 module lists", "register_architecture(")),
    "dynamic rope": (lambda: with_rope("dynamic", factor=2.0), LONG, MODEL, ("frequencies (dynamic) beyond 32", "33")),
    "longrope": (LONGROPE, LONG, MODEL, ("frequencies (longrope) beyond 32 tokens", "33")),
    "attention": (lambda: with_config("_attn_implementation", "mine"), {}, OPTION, ("implementation 'mine'", "sdpa")),
    "virtual tokens": (lambda: adapted(PROMPT), {}, OPTION, ("virtual tokens", "LoRA")),
    "activated LoRA": (lambda: adapted(ALORA), INVOKED, OPTION, ("aLoRA", "all tokens")),
    "exit": (None, of(EarlyExit(6)), SettingError, ("EarlyExit(layer=6)", "6 layers", "between 1 and 5")),
    "last attention": (None, of(SkipLayers([5])), SettingError, ("names layer 5", "1 to 4 can be skipped")),
    "no such MLP": (None, of(SkipLayers(mlp=[2, 77])), SettingError, ("SkipLayers(mlp) names layer 77", "1 to 4")),
    "nothing": (None, of(SkipLayers([], [])), SettingError, ("skips nothing", "Name at least one block")),
    "one layer": (lambda: tiny_llama(1), {"assistant": SelfSpec.layerskip()}, SettingError, ("has one layer",)),
    "few layers": (lambda: tiny_llama(3), SWIFT, SettingError, ("at least 4",)),
    **{
        f"{other!r:.20}": (None, {"assistant": other}, SettingTypeError, (*TAKES, repr(other)))
        for other in ("something", 3, SelfSpec)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused(llama: LlamaForCausalLM, name: str) -> None:
    """Before any module of the model has run."""
    make, given, error, words = CALLS[name]
    inputs = {} if {"input_ids", "inputs_embeds"} & given.keys() else ROW
    options, model = {"max_new_tokens": 4, "assistant": SelfSpec()} | given, llama if make is None else make()
    ran: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.append(module))
    with handle, pytest.raises(error) as caught:
        model.generate(**inputs, **options)
    assert not ran
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_is_beside_a_refusal_is_served(llama: LlamaForCausalLM) -> None:
    """Usual positions, a decoder of an encoder's class, short texts, and long prompts with the long frequencies."""
    long = {"input_ids": torch.randint(2, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(3))}
    for model, inputs in (
        (llama, ROW | {"position_ids": torch.arange(7)[None]}),
        (encoder(is_decoder=True), ROW),
        (with_rope("dynamic", factor=2.0), ROW),
        (LONGROPE(), long),
        (with_rope("default"), long),
    ):
        plain, ours = (
            model.generate(**inputs, max_new_tokens=8, assistant=each) for each in (False, SelfSpec.lookup())
        )
        assert torch.equal(ours, plain)


def test_nothing_new_beside_the_cache(llama: LlamaForCausalLM) -> None:
    """Of a call whose text lacks the last token, so that nothing is left to go on from."""
    begun = llama.generate(**ROW, max_new_tokens=4, return_dict_in_generate=True)
    given = {"input_ids": begun.sequences[:, :-1], PAST: begun.past_key_values}
    with pytest.raises(SettingError, match=r"the prompt is empty: 10 columns of input for a text of 10 .* whole text"):
        llama.generate(**given, max_new_tokens=4, assistant=SelfSpec())


@pytest.mark.parametrize("installed", [True, False])
def test_custom_generate_refuses_too(llama: LlamaForCausalLM, installed: bool) -> None:
    """Also where ``generate`` is not wrapped, so that options are first seen when they have been prepared."""
    if not installed:
        hf_selfspec.uninstall()
    with pytest.raises(UnsupportedOptionError, match="prompt_lookup_num_tokens=3"):
        llama.generate(**ROW, max_new_tokens=4, custom_generate=SelfSpec(), prompt_lookup_num_tokens=3)
    hf_selfspec.install()


@pytest.mark.parametrize(("inputs", "bad"), [(ROW, torch.nan), (BATCH, torch.inf)], ids=["one row", "batch"])
def test_bad_logits(fresh_llama: LlamaForCausalLM, inputs: dict[str, torch.Tensor], bad: float) -> None:
    """They are no error where a ``SelfSpec`` is attached, so that nobody asked for one."""
    fresh_llama.lm_head.weight.data[5] = bad
    plain = fresh_llama.generate(**inputs, max_new_tokens=8)
    with attach(fresh_llama, SelfSpec(EarlyExit(3), FixedLength(2))):
        assert torch.equal(fresh_llama.generate(**inputs, max_new_tokens=8), plain)
    with pytest.raises(NumericalError, match=r"LlamaForCausalLM returned NaN or infinite logits\. Check the weights"):
        fresh_llama.generate(**inputs, max_new_tokens=8, assistant=SelfSpec())
    options = {"max_new_tokens": 8, "remove_invalid_values": True}
    ids = fresh_llama.generate(**inputs, **options, assistant=SelfSpec())
    assert torch.equal(ids, fresh_llama.generate(**inputs, **options))


@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "ragged batch"])
@pytest.mark.parametrize(("part", "call"), [("model.layers.5.mlp", 2), ("lm_head", 3)], ids=["verification", "draft"])
def test_bad_logits_later_on(inputs: dict[str, torch.Tensor], part: str, call: int) -> None:
    """In a verification it is an error; in a draft, which may overflow, only the end of the draft."""
    model, spec, left = tiny_llama(factor=0.5), SelfSpec(draft=EarlyExit(3), stop=FixedLength(4)), [0]
    plain = model.generate(**inputs, max_new_tokens=8)

    def breaks(_: Any, args: Any) -> Any:
        left[0] -= 1
        return (args[0] * float("nan"),) if left[0] == 0 else args

    model.get_submodule(part).register_forward_pre_hook(breaks)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, assistant=spec), plain)  # which checks the hook
    left[0] = call
    if part == "lm_head":
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, assistant=spec), plain)
        assert left[0] < 0
    else:
        with pytest.raises(NumericalError, match="NaN"):
            model.generate(**inputs, max_new_tokens=8, assistant=spec)


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
        (Told(VOCABULARY, None), rf"\[{VOCABULARY}, {VOCABULARY}\], and None"),
        (Told(5, (1, 1, VOCABULARY)), r"\[5, 5\], and \[1, 1, 97\]"),
        (Told(5, (1, 2, 3)), r"and \[1, 2, 3\]"),
        (Told(5, None, 3), r"got ids \[1, 7\]"),
    ],
)
def test_wrong_candidates(llama: LlamaForCausalLM, candidates: Told, words: str) -> None:
    always = (
        r"Told\.get_candidates must return the given ids \[1, 8\] followed by drafted tokens, from 0 to 96, and None .*"
    )
    with pytest.raises(SettingError, match=always + words):
        llama.generate(**ROW, max_new_tokens=8, do_sample=True, assistant=SelfSpec(draft=candidates))


@dataclass(frozen=True)
class Listed(DraftSource):
    fixed_because = "Listed drafts what is in its list"


GENERATOR = PromptLookupCandidateGenerator(max_length=9)
NAMES = {name: getattr(hf_selfspec, name) for name in hf_selfspec.__all__} | globals()
# What no setting can be, with what the message has to name: the setting, what is allowed and what was given.
VALUES: dict[str, Words] = {
    "EarlyExit(0)": ("EarlyExit(layer)", "at least 1", "got 0"),
    "SkipLayers(attention=[0])": ("SkipLayers(attention=[0])", "layer 0 is never skipped"),
    "SkipLayers(ratio=0.4)": ("search=OnTheFlySearch",),
    "SelfSpec.swift(ratio=1.0)": ("SkipLayers(ratio) must lie between 0 and 1",),
    "OfflineSearch(seed=-1)": ("OfflineSearch(seed) must be at least 0, got -1",),
    "OnTheFlySearch(budget=0.0)": ("OnTheFlySearch(budget) must",),
    "ConfidenceThreshold(1)": ("ConfidenceThreshold(threshold)", "excluded", "got 1"),
    "ConfidenceThreshold(float('nan'))": ("between 0 and 1 (both excluded), got nan",),
    "FixedLength(0)": ("FixedLength(num_tokens) must be at least 1, got 0",),
    "AdaptiveThreshold(target=-0.1)": ("AdaptiveThreshold(target) must lie",),
    "TopKTree(((0.8, 2), (0.5, 3), (1.0, 1)))": ("rise from above 0 to 1", "got ((0.8, 2)"),
    "TopKTree([(1.0, 3)])": ("must be a tuple of (confidence, k) pairs",),
    "TopKTree(((1.0, 0),))": ("k must be at least 1, got 0",),
    "Lookup(-1)": ("Lookup(stored_tokens) must be at least 0, got -1",),
    "SelfSpec.lookup(1 << 30)": ("Lookup(stored_tokens) must be at most 1048576",),
    "Lookup(max_nodes=32)": ("Lookup(max_nodes) must be at most 31",),
    "SelfSpec(max_draft=0)": ("SelfSpec(max_draft)", "at least 1", "got 0"),
    "SelfSpec.layerskip(6, 2, FixedLength(2))": ("give one of the two",),
    "Cascade([Listed()])": ("Cascade(sources)",),
    "Cascade([Lookup(), EarlyExit(3), EarlyExit(3)])": ("one Lookup and different others",),
    "Cascade([Lookup(), Cascade([Lookup()])])": ("Cascade(sources)",),
    "SelfSpec.layerskip(max_draft=1025)": ("layerskip(max_draft) must be at most 1024",),
    "SelfSpec(Listed(), FixedLength(3))": ("SelfSpec(stop=", "no effect here: Listed drafts w"),
    "SelfSpec(GENERATOR, tree=TopKTree())": ("tree=", "Generator drafts as many tokens as it"),
    **{f"SelfSpec(task={task!r})": ("(task) names a",) for task in ("", "../a", "a" * 51, 3)},
}
TYPES: dict[str, Words] = {
    "SelfSpec.swift(search=32)": ("OnTheFlySearch() or None, got 32",),
    "SelfSpec.adaspeed(probe=0.5)": ("ProductThreshold(confidence) must be a function",),
    "AdaptiveThreshold(FixedLength(3))": ("AdaptiveThreshold(rule) must be",),
    "TopKTree(((1.0, True),))": ("k must be a whole number of at least 1, got ",),
    "SelfSpec(draft='exit')": ("SelfSpec(draft)", "EarlyExit(layer)", "'exit'"),
    "SelfSpec(stop=FixedLength)": ("SelfSpec(stop) must be FixedLength(n), Confidence",),
    "SelfSpec(tree=3)": ("SelfSpec(tree)", "TopKTree or None", "3"),
    "Cascade([Lookup(), GENERATOR])": ("Cascade(sources)",),
    "Cascade(None)": ("Cascade(sources)",),
    "SelfSpec(graphs='x')": ("SelfSpec(graphs) must be True or False, got 'x'",),
    "SelfSpec(exact=1)": ("SelfSpec(exact) must be True or False, got 1",),
    "attach(tiny_llama(1), SelfSpec)": ("attach(model, spec) takes a SelfSpec, ", "<class"),
    "attach(torch.nn.Linear(1, 1), SelfSpec())": ("attach takes a causal LM", "got Linear"),
    "detach(torch.nn.Linear(1, 1))": ("detach takes a causal LM", "got Linear"),
    "SelfSpec.kangaroo(5)": ("must be Adapter or the path of a saved one",),
}


@pytest.mark.parametrize("setting", VALUES | TYPES)
def test_a_setting_that_is_refused(setting: str) -> None:
    with pytest.raises(SettingError if setting in VALUES else SettingTypeError) as caught:
        eval(setting, NAMES)
    assert all(word in str(caught.value) for word in (VALUES | TYPES)[setting]), caught.value
