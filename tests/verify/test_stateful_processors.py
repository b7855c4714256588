"""Logits processors and stopping criteria that keep a state are called exactly as plain ``generate`` calls them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process as lp
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_selfspec
from helpers.fitted import adapter_of, heads_of
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.processes import library
from helpers.sampling import check_exact, exact_joint, llama, sample
from hf_selfspec import (
    ClosestLayers,
    ConfidenceThreshold,
    DynamicExit,
    EarlyExit,
    EarlyExitAdapter,
    EarlyExitOnly,
    FixedLength,
    OnTheFlySearch,
    SelfSpec,
    SettingError,
    SettingTypeError,
    SkipLayers,
    TopKTree,
    UnsupportedOptionError,
)
from hf_selfspec.verify import stateless
from hf_selfspec.verify.stateless import is_stateless

MODEL = tiny_llama(factor=0.5)
DEEP = tiny_llama(layers=8, factor=0.5)
END = 50

SPECS: dict[str, tuple[LlamaForCausalLM, Callable[[], SelfSpec]]] = {
    "exit": (MODEL, lambda: SelfSpec(draft=EarlyExit(3), stop=FixedLength(4))),
    "exit, tree": (
        MODEL,
        lambda: SelfSpec(draft=EarlyExit(3), stop=FixedLength(4), tree=TopKTree(((0.5, 3), (1.0, 2)))),
    ),
    "probe": (MODEL, lambda: SelfSpec.layerskip()),
    "skips": (MODEL, lambda: SelfSpec(SkipLayers(), ConfidenceThreshold(0.1))),
    "skips, tree": (MODEL, lambda: SelfSpec(SkipLayers(), FixedLength(3), TopKTree(((1.0, 3),)))),
    "closest layers": (
        MODEL,
        lambda: SelfSpec(SkipLayers(search=ClosestLayers(context_window=8, budget=1.0), ratio=0.4), FixedLength(4)),
    ),
    "swift": (MODEL, lambda: SelfSpec.swift(search=OnTheFlySearch(context_window=8, budget=1.0), stop=FixedLength(4))),
    "default": (MODEL, SelfSpec),
    "adapter": (MODEL, lambda: SelfSpec(EarlyExitAdapter(adapter_of(MODEL)), FixedLength(4))),
    "heads": (DEEP, lambda: SelfSpec(DynamicExit(heads_of(DEEP, 0.6)), FixedLength(4))),
    "candidates": (MODEL, lambda: SelfSpec(PromptLookupCandidateGenerator(num_output_tokens=4, max_length=200))),
    "exit alone": (MODEL, lambda: SelfSpec.early_exit_only(3)),
}


@pytest.fixture(params=SPECS)
def pair(request: pytest.FixtureRequest) -> tuple[LlamaForCausalLM, SelfSpec]:
    model, make = SPECS[request.param]
    return model, make()


class Counting(LogitsProcessor):
    """Favours a token that follows from how often it was called; keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        favoured = 2 + (5 * len(self.seen) + torch.arange(len(scores))) % (VOCABULARY - 2)
        return scores.scatter_add(1, favoured[:, None], torch.full((len(scores), 1), 0.5))


class Matcher(LogitsProcessor):
    """Allows what an automaton allows, which moves with each token and cannot go back."""

    def __init__(self) -> None:
        self.length, self.states = 0, torch.zeros(0, dtype=torch.long)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.length:
            self.states = torch.zeros(len(scores), dtype=torch.long)
        elif input_ids.shape[1] != self.length + 1:
            raise RuntimeError(f"called at {input_ids.shape[1]} tokens after {self.length}")
        else:
            self.states = (3 * self.states + input_ids[:, -1]) % 4
        self.length = input_ids.shape[1]
        allowed = (torch.arange(scores.shape[1]) + self.states[:, None]) % 2 == 0
        return scores.masked_fill(~allowed, -torch.inf)


class AfterCalls(StoppingCriteria):
    """Ends each row after a number of calls of its own, whatever the text is."""

    def __init__(self, calls: list[int]) -> None:
        self.calls, self.seen = torch.tensor(calls), []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.tolist(), None if scores is None else len(scores)))
        return len(self.seen) >= self.calls[: len(input_ids)]


def texts(model: LlamaForCausalLM, spec: SelfSpec | None, inputs: Any, make: Any, **options: Any) -> Any:
    """Ids with a new processor, and the processor."""
    processor = make()
    options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [processor]} | options
    return model.generate(**inputs, **options, assistant=spec), processor


def plain_of(model: LlamaForCausalLM, spec: SelfSpec, *args: Any, **options: Any) -> Any:
    """Plain ``generate``'s, with the layers that the text is to come from."""
    layers = model.model.layers
    if isinstance(spec.draft, EarlyExitOnly):
        model.model.layers = layers[: spec.draft.layer]
        model.config.num_hidden_layers = spec.draft.layer
    try:
        return texts(model, None, *args, **options)
    finally:
        model.model.layers, model.config.num_hidden_layers = layers, len(layers)


@pytest.mark.parametrize("lengths", [(12,), (4, 9, 6)], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("make", [Counting, Matcher])
def test_ids_and_calls_are_plain_generates(
    pair: tuple[LlamaForCausalLM, SelfSpec], make: Any, lengths: tuple[int, ...]
) -> None:
    model, spec = pair
    inputs = ragged_batch(lengths, seed=11)
    plain, expected = plain_of(model, spec, inputs, make)
    ours, called = texts(model, spec, inputs, make)
    assert torch.equal(ours, plain)
    assert called.__dict__.keys() == expected.__dict__.keys()
    if make is Counting:
        assert called.seen == expected.seen
        assert len(called.seen) == 20


def test_drafts_are_accepted_beside_such_a_processor() -> None:
    model, make = SPECS["exit"]
    spec = make()
    for inputs in (ragged_batch((12,), seed=11), ragged_batch((4, 9, 6))):
        texts(model, spec, inputs, Counting)
        assert 0 < spec.stats.acceptance_rate < 1


@pytest.mark.parametrize("lengths", [(12,), (4, 9, 6)], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("eos", [None, END])
def test_rows_that_end_at_different_times(eos: int | None, lengths: tuple[int, ...]) -> None:
    """Padded behind their end with an end-of-text token, and going on without one."""
    model, make = SPECS["exit, tree"]
    inputs = ragged_batch(lengths, seed=11)
    calls = [7, 12, 4][: len(lengths)]
    found = []
    for spec in (None, make()):
        criterion = AfterCalls(calls)
        options = {"stopping_criteria": [criterion], "eos_token_id": eos, "pad_token_id": 96}
        options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        output, processor = texts(model, spec, inputs, Counting, **options)
        found.append((output, processor.seen, criterion.seen))
    (plain, *expected), (ours, *called) = found
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.sequences.shape[1] == inputs["input_ids"].shape[1] + max(calls)
    assert called == expected
    assert len(ours.scores) == len(plain.scores)
    for row, count in enumerate(calls):
        for kind in ("scores", "logits"):
            ours_of_row, plain_of_row = (torch.stack(getattr(o, kind))[:count, row] for o in (ours, plain))
            torch.testing.assert_close(ours_of_row, plain_of_row, atol=1e-5, rtol=1e-4)


def test_a_criterion_ends_in_the_middle_of_accepted_tokens() -> None:
    model, spec = tiny_llama(factor=0.01), SelfSpec(draft=EarlyExit(3), stop=FixedLength(4))
    for count in range(2, 11):
        found = []
        for assistant in (None, spec):
            criterion = AfterCalls([count])
            ids, processor = texts(model, assistant, ragged_batch((12,)), Counting, stopping_criteria=[criterion])
            found.append((ids.tolist(), processor.seen, criterion.seen))
        assert found[0] == found[1]
        assert len(found[0][1]) == count
    spec_alone = SelfSpec(draft=EarlyExit(3), stop=FixedLength(4))
    model.generate(**ragged_batch((12,)), max_new_tokens=20, stopping_criteria=[AfterCalls([99])], assistant=spec_alone)
    assert spec_alone.stats.acceptance_rate > 0.9, "ends have to fall into accepted blocks"
    for count in range(2, 11):
        criterion = AfterCalls([count])
        options = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [criterion]}
        ids = model.generate(**ragged_batch((12,)), **options, assistant=spec_alone)
        assert (ids.shape[1], len(criterion.seen)) == (12 + count, count)


@pytest.mark.parametrize("lengths", [(12,), (4, 9, 6)], ids=["one row", "ragged batch"])
def test_end_of_text_ends_a_row_for_such_a_processor(lengths: tuple[int, ...]) -> None:
    model, make = SPECS["exit"]
    inputs = ragged_batch(lengths)
    free, _ = texts(model, None, inputs, Counting)
    eos = free[:, inputs["input_ids"].shape[1] :][torch.arange(len(lengths)), torch.tensor([5, 9, 12])[: len(lengths)]]
    options = {"eos_token_id": eos.tolist(), "pad_token_id": 96}
    plain, expected = texts(model, None, inputs, Counting, **options)
    ours, called = texts(model, make(), inputs, Counting, **options)
    assert (plain == 96).any() or len(lengths) == 1
    assert torch.equal(ours, plain)
    assert called.seen == expected.seen


def test_a_prefix_function_is_called_for_each_emitted_token_alone() -> None:
    model, make = SPECS["exit"]
    for inputs in (ragged_batch((12,), seed=11), ragged_batch((4, 9, 6))):
        found = []
        for spec in (None, make()):
            calls: list[tuple[int, list[int]]] = []

            def allowed(row: int, ids: torch.Tensor, calls: list[Any] = calls) -> list[int]:
                calls.append((row, ids.tolist()))
                return list(range(2 + (row + len(calls)) % 3, VOCABULARY, 3))

            options = {"max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed}
            found.append((model.generate(**inputs, **options, assistant=spec).tolist(), calls))
        assert found[0] == found[1]


# What is known to keep no state ---------------------------------------------------------------------------------------


class Declared(Counting):
    is_stateless = True


class Registered(lp.TemperatureLogitsWarper):
    pass


def test_what_is_stateless() -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [row]

    def of(function: Any) -> lp.PrefixConstrainedLogitsProcessor:
        return lp.PrefixConstrainedLogitsProcessor(function, num_beams=1)

    assert is_stateless(lp.TemperatureLogitsWarper(0.5))
    assert is_stateless(Declared())
    assert not is_stateless(Counting())
    assert not is_stateless(lambda ids, scores: scores)
    assert not is_stateless(lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, MODEL))
    assert not is_stateless(of(allowed))
    allowed.is_stateless = True
    assert is_stateless(of(allowed))
    assert not is_stateless(Registered(0.5))
    hf_selfspec.register_stateless(Registered)
    assert is_stateless(Registered(0.5))
    with pytest.raises(SettingTypeError, match=r"takes a class.*is_stateless"):
        hf_selfspec.register_stateless(Registered(0.5))


def test_a_declared_processor_is_called_for_drafts() -> None:
    model, make = SPECS["exit"]
    _, processor = texts(model, make(), ragged_batch((12,), seed=11), Declared)
    assert len(processor.seen) > 20


def test_recorded_scores_are_not_gathered_again_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A criterion gets the recorded scores themselves, as in plain ``generate``, not a copy of all of them."""
    seen: list[tuple[int, ...]] = []

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(tuple(id(step) for step in scores))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    model, make = SPECS["exit"]
    options = {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [criterion]}
    output = model.generate(**ragged_batch(), max_new_tokens=20, do_sample=False, **options, assistant=make())
    assert [len(steps) for steps in seen] == list(range(1, 21))
    assert all(after[:-1] == before for before, after in pairwise(seen))
    assert tuple(id(step) for step in output.scores) == seen[-1]


def test_statistics_name_what_rows_advance_together_for() -> None:
    model, make = SPECS["exit"]
    for lengths, words in (((12,), ""), ((4, 9, 6), "Counting, AfterCalls")):
        spec = make()
        texts(model, spec, ragged_batch(lengths), Counting, stopping_criteria=[AfterCalls([30, 30, 30])])
        assert spec.stats.together_for == words
        assert ("since Counting, AfterCalls may keep a state" in str(spec.stats)) == bool(words)


def test_only_what_is_known_is_stateless() -> None:
    """All that generate makes for a decoder-only model, but for two; a class that is new to us is not trusted."""
    known = {kind.__name__ for kind in stateless._registered}
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    made = set(re.findall(r"\b(\w+(?:LogitsProcessor|LogitsWarper|LengthPenalty|LogitNormalization))\(", source))
    others = {
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",  # as its function is
    }
    assert {"TopPLogitsWarper", "MinLengthLogitsProcessor"} <= made
    assert made - known == others & made
    assert not is_stateless(lp.DiaEOSDelayPatternLogitsProcessor([1, 2], 1, 16))


# Transformers' own with a state ---------------------------------------------------------------------------------------

STATEFUL_OPTIONS = {
    "guidance": {"guidance_scale": 1.5},
    "guidance, negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6, 7]])},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "SynthID": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3])},
}


@pytest.mark.parametrize("name", STATEFUL_OPTIONS)
@pytest.mark.parametrize("lengths", [(12,), (4, 9, 6)], ids=["one row", "ragged batch"])
def test_guidance_and_watermarks(name: str, lengths: tuple[int, ...]) -> None:
    model, make = SPECS["exit"]
    options = dict(STATEFUL_OPTIONS[name])
    if "negative_prompt_ids" in options:
        options["negative_prompt_ids"] = options["negative_prompt_ids"].repeat(len(lengths), 1)
    inputs, spec = ragged_batch(lengths, seed=11), make()
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False, **options)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False, **options, assistant=spec), plain)
    assert spec.stats.accepted > 0
    assert not torch.equal(plain, model.generate(**inputs, max_new_tokens=20, do_sample=False))


# Drawn tokens ---------------------------------------------------------------------------------------------------------


class Tightening(LogitsProcessor):
    """A temperature that falls with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores * (1.0, 0.5, 1.5, 0.8)[self.calls - 1]


class TighteningByLength(LogitsProcessor):
    """The same, told by the length of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * (1.0, 0.5, 1.5, 0.8)[input_ids.shape[1] - 1]


@pytest.mark.every_run("exit")
@pytest.mark.parametrize(
    "spec",
    [
        SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
        SelfSpec(draft=SkipLayers((1, 2), (2,)), stop=ConfidenceThreshold(0.45)),
        SelfSpec(draft=EarlyExit(1), stop=FixedLength(3), tree=TopKTree(((0.6, 3), (1.0, 2)))),
    ],
    ids=["exit", "skips", "tree"],
)
def test_drawn_tokens_are_exact(spec: SelfSpec) -> None:
    model = llama()
    sequences, accepted, drafted = [], 0, 0
    for seed in range(400):
        sampled, _ = sample(spec, rows=1, calls=1, seed=seed, logits_processor=[Tightening()])
        sequences.append(sampled)
        accepted, drafted = accepted + spec.stats.accepted, drafted + spec.stats.drafted
    joint = exact_joint(model, [TighteningByLength()])
    check_exact((torch.cat(sequences), accepted / drafted), joint)


def test_drawn_tokens_of_a_batch_are_exact() -> None:
    model, spec = llama(), SelfSpec(draft=EarlyExit(2), stop=FixedLength(3))
    samples = [sample(spec, rows=4, seed=seed, logits_processor=[Tightening()]) for seed in range(100)]
    rate = sum(accepted for _, accepted in samples) / len(samples)
    check_exact((torch.cat([sequences for sequences, _ in samples]), rate), exact_joint(model, [TighteningByLength()]))


def test_lossy_heads_are_refused() -> None:
    spec = SelfSpec.early_exit_only(heads=heads_of(DEEP, 0.6))
    with pytest.raises(UnsupportedOptionError, match=r"Counting.*without the whole model.*lossless"):
        texts(DEEP, spec, ragged_batch((12,)), Counting)
    with pytest.raises(UnsupportedOptionError, match=r"AfterCalls.*without the whole model"):
        DEEP.generate(**ragged_batch((12,)), max_new_tokens=8, stopping_criteria=[AfterCalls([9])], assistant=spec)
    right = {name: value.flip(1) for name, value in ragged_batch((4, 9)).items()}
    with pytest.raises(SettingError, match="padded on the right"):
        DEEP.generate(**right, max_new_tokens=8, assistant=spec)


# Grammars of other libraries ------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per token, byte level, as many as the model has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "<s>", "</s>", *(chr(33 + index) for index in range(VOCABULARY - 4)), "Ġ"]
    core = Tokenizer(models.BPE({character: token for token, character in enumerate(characters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def xgrammar_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    xgrammar = library("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCABULARY)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return xgrammar.contrib.hf.LogitsProcessor(grammar)


def outlines_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    outlines = library("outlines")
    backend = outlines.backends.outlines_core.OutlinesCoreBackend(outlines.from_transformers(MODEL, tokenizer))
    return backend.get_json_schema_logits_processor(json.dumps(SCHEMA))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of torch.compile in outlines
@pytest.mark.parametrize("make", [xgrammar_processor, outlines_processor])
@pytest.mark.parametrize("spec", ["exit", "exit, tree", "skips"])
@pytest.mark.parametrize("lengths", [(12,), (4, 9, 6)], ids=["one row", "ragged batch"])
def test_grammars(make: Any, spec: str, lengths: tuple[int, ...], tokenizer: PreTrainedTokenizerFast) -> None:
    model, of_spec = SPECS[spec]
    inputs = ragged_batch(lengths, seed=11)
    options = {"max_new_tokens": 60, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    with torch.compiler.set_stance("force_eager"):  # outlines compiles its mask, which takes long
        plain, _ = texts(model, None, inputs, lambda: make(tokenizer), **options)
        ours, _ = texts(model, of_spec(), inputs, lambda: make(tokenizer), **options)
    assert torch.equal(ours, plain)
    written = tokenizer.batch_decode(plain[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(text.startswith('{"name":') for text in (line.replace(" ", "") for line in written))
