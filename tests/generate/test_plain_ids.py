"""Greedy ids are plain generate's in float32: all kinds of drafts, on all kinds of models, in all kinds of calls."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.stopping_criteria import MaxLengthCriteria

from helpers.architectures import ARCHITECTURES, EVERY_RUN, STATEFUL, build
from helpers.calls import PAST, Counting, Recorder, random_skip_set
from helpers.fitted import adapter_of, heads_of, mtp_of, probe_of
from helpers.models import BATCH, ROW, VOCABULARY, character_tokenizer, tiny_gpt2, tiny_llama
from helpers.sources import Alternating, Recalled
from hf_selfspec import OnTheFlySearch, Quantized, ReducedHead, SelfSpec, TopKTree
from hf_selfspec.drafts import MTP, Cascade, DynamicExit, EarlyExit, EarlyExitAdapter, Lookup, SkipLayers
from hf_selfspec.drafts.stop import ConfidenceThreshold, FixedLength

# Free drafts are worth their verification, as on a device that memory bounds.
pytestmark = pytest.mark.machine("verification_is_free", "packed_float32_is_fast")

Inputs = dict[str, torch.Tensor]
_WIDE = TopKTree(((0.9999, 3), (1.0, 1)))


def reduced(model: PreTrainedModel) -> ReducedHead:
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return ReducedHead.of(range(0, vocabulary, 2), vocabulary)


# What drafts, for a model.
SPECS: dict[str, Callable[[PreTrainedModel], SelfSpec]] = {
    "exit": lambda model: SelfSpec(EarlyExit(2), FixedLength(3)),
    "tree": lambda model: SelfSpec(EarlyExit(2), FixedLength(3), _WIDE),
    "skip": lambda model: SelfSpec(random_skip_set(model.config.model_type, model), FixedLength(3)),
    "search": lambda model: SelfSpec(SkipLayers(search=OnTheFlySearch(8, budget=1.0), ratio=0.4), FixedLength(4)),
    "swift": lambda model: SelfSpec.swift(0.4, OnTheFlySearch(8, budget=1.0), tree=TopKTree()),
    "layerskip": lambda model: SelfSpec.layerskip(),
    "lookup": lambda model: SelfSpec.lookup(),
    "default": lambda model: SelfSpec(),
    "cascade": lambda model: SelfSpec(Cascade([Lookup(), EarlyExit(2)]), ConfidenceThreshold(0.1)),
    "adapter": lambda model: SelfSpec(EarlyExitAdapter(adapter_of(model, exit_layer=1)), FixedLength(4)),
    "adapter tree": lambda model: SelfSpec(EarlyExitAdapter(adapter_of(model, exit_layer=1)), FixedLength(4), _WIDE),
    "quantized": lambda model: SelfSpec(Quantized(), FixedLength(3)),
    "quantized tree": lambda model: SelfSpec(Quantized(), FixedLength(3), _WIDE),
    "heads": lambda model: SelfSpec(DynamicExit(heads_of(model, 0.6, (1, 2))), FixedLength(6)),
    "heads tree": lambda model: SelfSpec(DynamicExit(heads_of(model, 0.6, (1, 2))), FixedLength(6), _WIDE),
    "mtp": lambda model: SelfSpec(MTP(mtp_of(model)), FixedLength(4)),
    "mtp tree": lambda model: SelfSpec(MTP(mtp_of(model, 2)), ConfidenceThreshold(0.1), _WIDE),
    "mtp cascade": lambda model: SelfSpec(Cascade([Lookup(), MTP(mtp_of(model))]), FixedLength(3)),
    "probe": lambda model: SelfSpec.adaspeed(probe=probe_of(model)),
    "adaptive": lambda model: SelfSpec.adaspeed(2),
    "reduced head": lambda model: SelfSpec(EarlyExit(2, reduced(model)), FixedLength(3), TopKTree()),
    "candidates": lambda model: SelfSpec(PromptLookupCandidateGenerator(num_output_tokens=4, max_length=99)),
    "own source": lambda model: SelfSpec(Cascade([Lookup(max_nodes=2), Recalled()]), Alternating(3)),
    "own rule": lambda model: SelfSpec(EarlyExit(2), Alternating(2), max_draft=6),
}


def ids(model: PreTrainedModel, assistant: SelfSpec | None, inputs: Inputs = BATCH, **options: Any) -> Any:
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(**inputs, **options, assistant=assistant)


@cache
def said(model: PreTrainedModel) -> list[list[int]]:
    """What plain generate adds to each row of the batch."""
    return ids(model, None)[:, BATCH["input_ids"].shape[1] :].tolist()


class PrefixShift(LogitsProcessor):
    """Favours a token that follows from the last one, the length and the row; writes into the scores."""

    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(scores))[:, None]
        favoured = (input_ids[:, -1:] * 7 + input_ids.shape[1] + 3 * rows) % VOCABULARY
        return scores.scatter_add_(1, favoured, torch.full(favoured.shape, 0.4))


class RowEnds(StoppingCriteria):
    """Another last token for each row of the batch."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.ends = torch.tensor([row[5 + 3 * place] for place, row in enumerate(rows)])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.ends


def every_third(batch_id: int, input_ids: torch.Tensor) -> list[int]:
    """Allows a third of the vocabulary, another one for each row and last token."""
    return list(range(2 + (batch_id + int(input_ids[-1])) % 3, VOCABULARY, 3))


def ends(model: PreTrainedModel) -> dict[str, Any]:
    """Tokens which the rows meet at different times."""
    return {"eos_token_id": [row[5 + 3 * place] for place, row in enumerate(said(model))], "pad_token_id": 96}


# Options of a call for the batch; tokens are those of the first row without them.
OPTIONS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "nothing": lambda text: {},
    "one token": lambda text: {"max_new_tokens": 1},
    "two tokens": lambda text: {"max_new_tokens": 2},
    "length of the text": lambda text: {"max_new_tokens": None, "max_length": 22},
    "several lengths": lambda text: {"stopping_criteria": [MaxLengthCriteria(24), MaxLengthCriteria(22)]},
    "repetition penalty": lambda text: {"repetition_penalty": 1.3},
    "no repeated n-gram": lambda text: {"no_repeat_ngram_size": 2},
    "least length": lambda text: {"min_length": 16, "eos_token_id": text[4]},
    "least new tokens": lambda text: {"min_new_tokens": 12, "eos_token_id": text[4]},
    "bad words": lambda text: {"bad_words_ids": [[text[2]], text[4:6]]},
    "sequence bias": lambda text: {"sequence_bias": [[[text[2]], -2.0], [text[4:6], -1.0], [[9], 0.2]]},
    "prefix function": lambda text: {"prefix_allowed_tokens_fn": every_third},
    "forced eos": lambda text: {"forced_eos_token_id": 50, "eos_token_id": 50},
    "suppressed": lambda text: {"suppress_tokens": text[1:5]},
    "suppressed at first": lambda text: {"begin_suppress_tokens": text[:1]},
    "length penalty": lambda text: {"exponential_decay_length_penalty": (6, 1.2), "eos_token_id": 50},
    "prompt penalty": lambda text: {"encoder_repetition_penalty": 1.5},
    "no n-gram of the prompt": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "own processor": lambda text: {"logits_processor": [PrefixShift(), RepetitionPenaltyLogitsProcessor(1.3, 9)]},
    "counting processor": lambda text: {"logits_processor": [Counting()]},
    "several processors": lambda text: {
        "logits_processor": [PrefixShift(), Counting()],
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": text[3:5],
        "min_new_tokens": 6,
        "eos_token_id": text[4],
        "prefix_allowed_tokens_fn": every_third,
    },
    "guidance": lambda text: {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6, 7]] * 3)},
    "watermark": lambda text: {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "SynthID": lambda text: {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3])},
    "one candidate": lambda text: {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "chunks": lambda text: {"prefill_chunk_size": 5},
}


def with_options(name: str, model: PreTrainedModel, assistant: SelfSpec | None) -> Any:
    return ids(model, assistant, **OPTIONS[name](said(model)[0]))


def rows_end(model: PreTrainedModel, assistant: SelfSpec | None) -> Any:
    """Without an end-of-text token, rows that have ended get further tokens until all have; with it, padding."""
    criterion = [RowEnds(said(model))]
    ended = ids(model, assistant, **ends(model)), ids(model, assistant, stopping_criteria=criterion, eos_token_id=50)
    return *ended, ids(model, assistant, stopping_criteria=criterion)


def stop_strings(model: PreTrainedModel, assistant: SelfSpec | None) -> Any:
    tokenizer = character_tokenizer()
    strings = [tokenizer.decode(row[3 + 3 * place : 6 + 3 * place]) for place, row in enumerate(said(model))]
    return ids(model, assistant, stop_strings=strings, tokenizer=tokenizer)


def streamed(model: PreTrainedModel, assistant: SelfSpec | None) -> Any:
    recorders = Recorder(), Recorder()
    ids(model, assistant, streamer=recorders[0])
    ids(model, assistant, streamer=recorders[1], **ends(model))
    return [recorder.calls for recorder in recorders]


def embedded(model: PreTrainedModel, assistant: SelfSpec | None) -> Any:
    """Embeddings in place of ids, then beside them; with what looks back at the text, which is empty then."""
    embeds = model.get_input_embeddings()(BATCH["input_ids"]).flip(1)
    inputs = {"attention_mask": BATCH["attention_mask"], "inputs_embeds": embeds}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Passing `repetition_penalty`")  # which leaves the prompt as it is
        penalized = ids(model, assistant, inputs, repetition_penalty=1.3)
    return ids(model, assistant, inputs), penalized, ids(model, assistant, BATCH | inputs)


def chat(model: PreTrainedModel, first: SelfSpec | None, second: SelfSpec | None, rows_end: bool = False) -> Any:
    """Two turns on one cache, the second with the whole text or what is new; padding behind an end is masked."""
    options = ends(model) if rows_end else {}
    begun = ids(model, first, max_new_tokens=14, return_dict_in_generate=True, **options)
    added, user = begun.sequences[:, BATCH["input_ids"].shape[1] :], torch.arange(9).view(3, 3) + 20
    is_end = torch.isin(added, torch.tensor(options.get("eos_token_id", [])))
    mask = torch.cat([BATCH["attention_mask"], (is_end.cumsum(1) - is_end.long() == 0).long(), user > 0], dim=1)
    whole = {"input_ids": torch.cat([begun.sequences, user], dim=1), "attention_mask": mask}
    width = whole["input_ids"].shape[1]
    expected = ids(model, None, whole, **options)[:, width:]
    caches = begun.past_key_values, copy.deepcopy(begun.past_key_values)
    news = whole | {"input_ids": whole["input_ids"][:, caches[0].get_seq_length() :]}
    for inputs, past in zip((whole, news), caches, strict=True):
        sequences = ids(model, second, inputs, **{PAST: past}, **options)
        assert torch.equal(sequences[:, inputs["input_ids"].shape[1] :], expected)
    return expected


def pipelines(model: PreTrainedModel, assistant: SelfSpec | None) -> Any:
    """A batch with padding, a stream that stops, and an assistant of the constructor."""
    tokenizer, recorder, texts = character_tokenizer(), Recorder(), ["def f(x):", "for i in", "import os as o"]
    options = {"max_new_tokens": 16, "do_sample": False}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    outputs = pipe(texts, batch_size=3, assistant=assistant, **options)
    stop = pipe(texts[0], **options)[0]["generated_text"][len(texts[0]) + 9]
    stopped = pipe(texts[0], streamer=recorder, stop_sequence=stop, assistant=assistant, **options)
    with_assistant = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant=assistant, **options)
    return outputs, stopped, recorder.calls, with_assistant(texts)


SHORT = {"input_ids": torch.tensor([[5], [6], [7]])}
CALLS: dict[str, Callable[[PreTrainedModel, SelfSpec | None], Any]] = {
    "one row": lambda model, assistant: ids(model, assistant, ROW),
    **{name: partial(with_options, name) for name in OPTIONS},
    "rows end": rows_end,
    "stop strings": stop_strings,
    "streamed": streamed,
    "embedded": embedded,
    "labels": lambda model, assistant: ids(model, assistant, BATCH | {"labels": BATCH["input_ids"]}),
    "forced bos": lambda model, assistant: ids(model, assistant, SHORT, forced_bos_token_id=50),
    "chat": lambda model, assistant: chat(model, assistant, assistant),
    "chat, rows end": lambda model, assistant: chat(model, assistant, assistant, rows_end=True),
    "chat, then plain": lambda model, assistant: chat(model, assistant, None),
    "plain, then chat": lambda model, assistant: chat(model, None, assistant),
    "pipelines": pipelines,
}


def as_lists(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.tolist()
    return [as_lists(part) for part in output] if isinstance(output, (list, tuple)) else output


def check(model: PreTrainedModel, spec: SelfSpec, call: str) -> None:
    """The second time, with what was learned of the first."""
    expected = as_lists(CALLS[call](model, None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what some models cannot do, and searches on short texts, is said once
        for _ in range(2):
            assert as_lists(CALLS[call](model, spec)) == expected


def one_of(count: int, *names: Iterable[str]) -> list[Any]:
    """All combinations, of which each run has every ``count``-th and the others are slow."""
    return [
        pytest.param(*(name for _, name in pairs), marks=pytest.mark.slow if sum(i for i, _ in pairs) % count else ())
        for pairs in itertools.product(*(list(enumerate(of)) for of in names))
    ]


@cache
def model_of(name: str) -> PreTrainedModel:
    model = tiny_llama(factor=0.5) if name == "llama" else build(name)
    model.generation_config.eos_token_id = None
    return model


# Calls that are too short, or too much led by a processor, for drafts to be right, or whose last turn is plain's.
FEW = ("one token", "two tokens", "forced eos", "counting processor", "no repeated n-gram", "chat, rows end")
# Drafts that are rarely right, with weights that were drawn, or that may find that none pays.
RARE = ("adapter", "adapter tree", "heads", "heads tree", "layerskip", "mtp", "mtp tree", "mtp cascade")


@pytest.mark.parametrize(("method", "call"), one_of(len(CALLS), SPECS, CALLS))
def test_every_draft_in_every_call(method: str, call: str) -> None:
    model = model_of("llama")
    spec = SPECS[method](model)
    check(model, spec, call)
    assert spec.stats.accepted or call in FEW or method in RARE


# Types of models that differ in what a call touches; each call has another kind of draft on each.
MODELS = (
    "mistral", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "falcon", "bloom", "opt", "qwen3_next", "bamba",
)  # fmt: skip


@pytest.mark.parametrize(("name", "call"), one_of(len(CALLS), MODELS, CALLS))
def test_every_call_of_every_model(name: str, call: str) -> None:
    if (name, call) == ("bamba", "embedded"):
        pytest.skip("plain generate refuses its embeddings, too")
    if name in ("qwen3_next", "bamba") and call == "chat, rows end":
        pytest.skip("recurrent states have taken in padding, so plain generate's second turn is not that of the text")
    model, methods = model_of(name), [method for method in SPECS if is_possible(name, method)]
    check(model, SPECS[methods[(8 * MODELS.index(name) + list(CALLS).index(call)) % len(methods)]](model), call)


def check_architecture(name: str, methods: Iterable[str]) -> None:
    """One row and a batch; layer drafts are partly kept and partly rejected, so that both sides are tested."""
    model = build(name)
    model.generation_config.eos_token_id = None
    inputs = {name: value[1:2] for name, value in BATCH.items()}, BATCH
    expected = [ids(model, None, prompt, max_new_tokens=24) for prompt in inputs]
    for method in methods:
        spec = SPECS[method](model)
        for prompt, plain in zip(inputs, expected, strict=True):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*cannot take")
                output = ids(model, spec, prompt, max_new_tokens=24)
            assert torch.equal(output, plain), f"{method}, {len(plain)} rows"
            if method in ALWAYS[:3] and not spec.stats.left_to_generate:  # as batches of rows that go together are
                assert 0.0 < spec.stats.acceptance_rate < 1.0, f"{method}, {len(plain)} rows test one side only"


# Of layers and of texts; the others need something that is fitted, or search.
ALWAYS = ("exit", "skip", "tree", "lookup", "default")
OTHERS = [method for method in SPECS if method not in ALWAYS]
# Refused by name; probes on gemma3n, adapters on opt-350m and on several residual streams are neither
# served nor refused in time.
_HEADS = {"heads", "heads tree"}
_STREAMS = {"layerskip", "adapter", "adapter tree", "probe"} | _HEADS
REFUSED = {
    "gemma3n_text": {"adapter", "adapter tree", "probe"} | _HEADS,
    "gemma4_text": _HEADS,
    "glm_moe_dsa": _HEADS,
    "gpt_bigcode": {"layerskip"},
    "hy_v4": _STREAMS,
    "inkling2_text": {"layerskip"} | _HEADS,
    "opt-350m": {"adapter", "adapter tree"} | _HEADS,
    "qwen4_exp_text": _STREAMS,
}
# Most weights of these are in experts, or have widths that kernels do not take.
NOT_PACKED = {
    "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "falcon_mamba", "glm4_moe", "glm_moe_dsa",
    "gpt_oss", "granitemoe", "granitemoehybrid", "hy_v4", "inkling2_text", "inkling_text", "jamba", "kimi_linear",
    "lfm2_moe", "llama4_text", "mamba", "mamba2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text",
}  # fmt: skip
# Of whose layers no MTP head can be made: none has attention alone, or what it is depends on the others.
WITHOUT_MTP = (
    "bamba", "falcon_h1", "falcon_mamba", "gemma3n_text", "gemma4_text", "gpt_neo", "inkling2_text", "inkling_text",
    "jamba", "lfm2_moe", "llama4_text", "mamba", "mamba2", "modernbert-decoder", "olmo_hybrid", "opt-350m", "zamba",
    "zamba2",
)  # fmt: skip


def is_possible(name: str, method: str) -> bool:
    """Whether the parts that draft can be made for the model; else that is refused."""
    return not ((method.startswith("mtp") and name in WITHOUT_MTP) or ("quantized" in method and name in NOT_PACKED))


def can(name: str, method: str) -> bool:
    no_tree = name in STATEFUL and method in ("tree", "quantized tree", "heads tree")
    return is_possible(name, method) and method not in REFUSED.get(name, ()) and not no_tree


@pytest.mark.every_run(EVERY_RUN)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str) -> None:
    """Two methods on each; over those of each run every usual method has its turns."""
    place = list(ARCHITECTURES).index(name)
    methods = ALWAYS[place % len(ALWAYS)], OTHERS[place % len(OTHERS)]
    check_architecture(name, [method if can(name, method) else "exit" for method in methods])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_draft_on_every_architecture(name: str) -> None:
    check_architecture(name, [method for method in SPECS if can(name, method)])


@pytest.mark.parametrize("method", one_of(9, SPECS))
def test_up_to_the_last_position(method: str) -> None:
    """Learned positions end somewhere, rows come there at different times, and padding does not count."""
    model = tiny_gpt2(positions=40)
    spec, inputs = SPECS[method](model), {name: pad(values, (40, 0)) for name, values in BATCH.items()}
    options = {"max_new_tokens": None, "max_length": 80}
    assert torch.equal(*(ids(model, assistant, inputs, **options) for assistant in (spec, None)))
