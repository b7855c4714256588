"""Everything that ``generate`` offers, against plain ``generate`` of the same model: token for token, greedy, fp32."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)
from transformers.generation.candidate_generator import CandidateGenerator

from helpers.calls import Recorder, assert_mixed, new_spec
from helpers.models import BATCH, ROW, VOCABULARY, damp, ragged_batch, tiny_gpt2, tiny_llama
from hf_selfspec import ClosestLayers, ConfidenceThreshold, EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree

Inputs = dict[str, torch.Tensor]

EXIT = new_spec()
SPECS = {
    "exit": EXIT,
    "skip": SelfSpec(SkipLayers(), ConfidenceThreshold()),
    "search": SelfSpec(SkipLayers(search=ClosestLayers(context_window=8, budget=1.0), ratio=0.4), FixedLength(4)),
    "tree": SelfSpec(draft=EarlyExit(3), stop=FixedLength(4), tree=TopKTree(((0.5, 3), (1.0, 1)))),
}
PROMPTS = {"one row": ROW, "ragged batch": BATCH}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> SelfSpec:
    return SPECS[request.param]


@pytest.fixture(params=PROMPTS)
def inputs(request: pytest.FixtureRequest) -> Inputs:
    return PROMPTS[request.param]


END = 9  # Token of the first row with which some tests end it; the next rows end later.


def both(model: PreTrainedModel, spec: SelfSpec, inputs: Inputs, **options: Any) -> tuple[Any, Any]:
    """What speculative and plain ``generate`` return; the drafts were partly kept and partly rejected."""
    options = {"max_new_tokens": 24} | options
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, assistant=spec)
    assert_mixed(spec)
    return ours, plain


def new_tokens(model: PreTrainedModel, inputs: Inputs, **options: Any) -> list[list[int]]:
    """What plain ``generate`` adds to each row."""
    ids = model.generate(**inputs, **({"max_new_tokens": 24} | options))
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


# Logits processors ---------------------------------------------------------------------------------------------------


class PrefixShift(LogitsProcessor):
    """Favours a token that follows from the last one and from the length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = (input_ids[:, -1:] * 7 + input_ids.shape[1]) % VOCABULARY
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 0.4))


class RowShift(LogitsProcessor):
    """Favours another token in each row of the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        favoured = torch.tensor([[20], [30], [40]])[: len(scores)]
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 0.2) * (input_ids[:, -1:] % 3))


def every_third(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Allows a third of the vocabulary, another one for each row and last token."""
    return list(range(2 + (batch_id + int(ids[-1])) % 3, VOCABULARY, 3))


# What to pass, given the tokens that generate adds to the first row without it.
PROCESSORS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 2},
    "min_length": lambda text: {"min_length": 16, "eos_token_id": text[4]},
    "min_new_tokens": lambda text: {"min_new_tokens": 12, "eos_token_id": text[4]},
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[2]], text[4:6]]},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[2]], -2.0], [text[4:6], -1.0], [[9], 0.2]]},
    "prefix_allowed_tokens_fn": lambda text: {"prefix_allowed_tokens_fn": every_third},
    "forced_eos_token_id": lambda text: {"forced_eos_token_id": 50},
    "suppress_tokens": lambda text: {"suppress_tokens": text[1:5]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": text[:1]},
    "exponential_decay_length_penalty": lambda text: {
        "exponential_decay_length_penalty": (6, 1.2),
        "eos_token_id": 50,
    },
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "custom": lambda text: {"logits_processor": [PrefixShift()]},
    "custom, by row": lambda text: {"logits_processor": [RowShift()]},
    "several": lambda text: {
        "logits_processor": [PrefixShift()],
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": text[3:5],
        "min_new_tokens": 6,
        "eos_token_id": text[4],
        "prefix_allowed_tokens_fn": every_third,
    },
}


@pytest.mark.every_run("(exit|tree)-ragged batch-.*")
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, name: str) -> None:
    without = new_tokens(llama, inputs)
    ours, plain = both(llama, spec, inputs, **PROCESSORS[name](without[0]))
    assert plain[:, inputs["input_ids"].shape[1] :].tolist() != without
    assert torch.equal(ours, plain)


def test_prefix_function_sees_every_prefix_with_its_batch_id(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    seen: set[tuple[int, ...]] = set()

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        seen.add((batch_id, *ids.tolist()))
        return every_third(batch_id, ids)

    inputs = PROMPTS["ragged batch"]
    plain = llama.generate(**inputs, max_new_tokens=24, prefix_allowed_tokens_fn=allowed)
    needed = seen.copy()
    seen.clear()
    ours = llama.generate(**inputs, max_new_tokens=24, prefix_allowed_tokens_fn=allowed, assistant=spec)
    assert torch.equal(ours, plain)
    assert needed <= seen


def test_prefix_function_that_knows_nothing_past_eos(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs) -> None:
    """Like a trie: twelve tokens, then the end, and a ``KeyError`` for what follows, which nobody may ask for."""
    width, eos = inputs["input_ids"].shape[1], 50

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        said = ids[width:].tolist()
        if eos in said:
            raise KeyError(tuple(said))
        return [token for token in every_third(batch_id, ids) if token != eos] if len(said) < 12 else [eos]

    ours, plain = both(llama, spec, inputs, prefix_allowed_tokens_fn=allowed, eos_token_id=eos)
    assert plain.shape[1] == width + 13
    assert torch.equal(ours, plain)


def test_forced_bos(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    inputs = {"input_ids": torch.tensor([[5], [6], [7]])}
    ours, plain = both(llama, spec, inputs, forced_bos_token_id=50)
    assert plain[:, 1].tolist() == [50, 50, 50]
    assert torch.equal(ours, plain)


# When generation stops -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_new_tokens": 17}, {"max_new_tokens": None, "max_length": 29}], ids=str)
def test_length_limits(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, limit: dict[str, Any]) -> None:
    ours, plain = both(llama, spec, inputs, **limit)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("count", [1, 2])
def test_few_tokens(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, count: int) -> None:
    plain = llama.generate(**inputs, max_new_tokens=count)
    assert torch.equal(llama.generate(**inputs, max_new_tokens=count, assistant=spec), plain)
    assert plain.shape[1] == inputs["input_ids"].shape[1] + count


def test_eos(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs) -> None:
    """One token and a list, which the rows meet at different times: the short rows are padded."""
    rows = new_tokens(llama, inputs)
    ends = [row[END + 3 * index] for index, row in enumerate(rows)]
    for eos in (ends[0], ends):
        ours, plain = both(llama, spec, inputs, eos_token_id=eos, pad_token_id=96)
        assert torch.equal(ours, plain)
    said = plain[:, inputs["input_ids"].shape[1] :].tolist()
    assert len({next(i for i, token in enumerate(row) if token in ends) for row in said}) == len(rows)


class AtLength(StoppingCriteria):
    """Stops each row at a length of its own choice, told by the row's first tokens."""

    def __init__(self, lengths: dict[tuple[int, ...], int]) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([len(row) >= self.lengths[tuple(row[:9])] for row in input_ids.tolist()])


@pytest.mark.parametrize("eos", [None, 50])
def test_custom_criterion_in_the_middle_of_an_accepted_block(
    llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, eos: int | None
) -> None:
    """Without eos, rows that have ended get further tokens until all have; with it, padding."""
    llama.generate(**inputs, max_new_tokens=24, assistant=EXIT)
    assert EXIT.stats is not None
    # Two drafted tokens in a row were accepted in the same round: the first of them is to be the last.
    pairs = [list(itertools.pairwise(row)) for row in EXIT.stats.from_draft]
    middles = [
        [i for i, pair in enumerate(row, start=1) if all(pair) and i > 4][index] for index, row in enumerate(pairs)
    ]
    width = inputs["input_ids"].shape[1]
    rows = inputs["input_ids"][:, :9].tolist()
    criterion = AtLength({tuple(row): width + middle for row, middle in zip(rows, middles, strict=True)})
    ours, plain = both(llama, spec, inputs, stopping_criteria=[criterion], eos_token_id=eos)
    assert plain.shape[1] == width + max(middles)
    assert torch.equal(ours, plain)


class RowEnds(StoppingCriteria):
    """Another last token for each row of the batch."""

    def __init__(self, ends: list[int]) -> None:
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.ends


def test_criterion_that_knows_the_rows(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    inputs = PROMPTS["ragged batch"]
    ends = [row[END + 3 * index] for index, row in enumerate(new_tokens(llama, inputs))]
    ours, plain = both(llama, spec, inputs, stopping_criteria=[RowEnds(ends)], eos_token_id=50)
    assert plain.shape[1] < inputs["input_ids"].shape[1] + 24
    assert torch.equal(ours, plain)


class SureEnough(StoppingCriteria):
    """Stops when the recorded scores are peaked, which needs ``output_scores``."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.stack(list(scores)).amax(-1).sum(0) > 4.0


def test_criterion_that_looks_at_scores(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [SureEnough()]}
    ours, plain = both(llama, spec, PROMPTS["one row"], **options)
    assert 4 < len(plain.scores) < 24
    assert torch.equal(ours.sequences, plain.sequences)


def test_max_time(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs) -> None:
    width = inputs["input_ids"].shape[1]
    ours = llama.generate(**inputs, max_new_tokens=24, max_time=1e-9, assistant=spec)
    assert torch.equal(ours, llama.generate(**inputs, max_new_tokens=24, max_time=1e-9))
    assert ours.shape[1] == width + 1
    later = llama.generate(**inputs, max_new_tokens=400, max_time=0.1, assistant=spec)
    assert width + 1 < later.shape[1] < width + 400
    assert torch.equal(later, llama.generate(**inputs, max_new_tokens=later.shape[1] - width))


@pytest.mark.parametrize("eos", [None, 50])
def test_stop_strings(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, spec: SelfSpec, inputs: Inputs, eos: int | None
) -> None:
    """Strings of three tokens, each row at another time; without eos the ended rows go on until all have ended."""
    rows = new_tokens(llama, inputs)
    strings = [tokenizer.decode(row[6 + 4 * index : 9 + 4 * index]) for index, row in enumerate(rows)]
    ours, plain = both(llama, spec, inputs, stop_strings=strings, tokenizer=tokenizer, eos_token_id=eos)
    assert plain.shape[1] == inputs["input_ids"].shape[1] + 9 + 4 * (len(rows) - 1)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("place", ["argument", "model"])
def test_stop_strings_in_a_config(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strings = tokenizer.decode(new_tokens(llama, PROMPTS["one row"])[0][6:9])
    options: dict[str, Any] = {"tokenizer": tokenizer}
    if place == "argument":
        options["generation_config"] = GenerationConfig(stop_strings=strings, pad_token_id=0)
    else:
        monkeypatch.setattr(llama.generation_config, "stop_strings", strings)
    ours, plain = both(llama, EXIT, PROMPTS["one row"], **options)
    assert plain.shape[1] == PROMPTS["one row"]["input_ids"].shape[1] + 9
    assert torch.equal(ours, plain)


class Types(Recorder):
    """Keeps the types of what a streamer receives."""

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.dtype)


def test_ids_have_the_type_of_plain_generates(llama: LlamaForCausalLM, inputs: Inputs) -> None:
    """64 bits, also after a prompt of 32."""
    inputs = inputs | {"input_ids": inputs["input_ids"].int()}
    streamers = Types(), Types()
    for returned in (False, True):
        found = []
        for assistant, streamer in zip((False, EXIT), streamers, strict=True):
            options = {"return_dict_in_generate": returned, "streamer": streamer, "assistant": assistant}
            output = llama.generate(**inputs, max_new_tokens=6, **options)
            found.append(output.sequences if returned else output)
        plain, ours = found
        assert plain.dtype == ours.dtype == torch.int64
        assert torch.equal(plain, ours)
    assert streamers[0].calls == streamers[1].calls


# Streamers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_eos", [False, True])
def test_streamer_gets_what_plain_generate_puts(
    llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, with_eos: bool
) -> None:
    eos = [row[END + 3 * index] for index, row in enumerate(new_tokens(llama, inputs))] if with_eos else None
    plain, ours = Recorder(), Recorder()
    llama.generate(**inputs, max_new_tokens=24, eos_token_id=eos, streamer=plain)
    llama.generate(**inputs, max_new_tokens=24, eos_token_id=eos, streamer=ours, assistant=spec)
    assert_mixed(spec)
    assert ours.calls == plain.calls


# What generate returns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_eos", [False, True])
def test_scores_and_logits(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, with_eos: bool) -> None:
    """Equal up to each row's end; plain generate goes on computing scores for padding, which mean nothing."""
    rows = new_tokens(llama, inputs, repetition_penalty=1.3)
    ends = [row[END + 3 * index] for index, row in enumerate(rows)] if with_eos else []
    options = {
        "repetition_penalty": 1.3,
        "eos_token_id": ends or None,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    ours, plain = both(llama, spec, inputs, **options)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    steps = len(plain.scores)
    lengths = [next((i for i, token in enumerate(row, start=1) if token in ends), steps) for row in rows]
    transitions = [llama.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (ours, plain)]
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == steps
        mine, theirs = (torch.stack(getattr(output, name), dim=1) for output in (ours, plain))
        for row, length in enumerate(lengths):
            torch.testing.assert_close(mine[row, :length], theirs[row, :length], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(transitions[0][row, :length], transitions[1][row, :length], atol=1e-5, rtol=1e-5)
    assert not torch.equal(ours.scores[3], ours.logits[3])


def test_nothing_is_returned_that_was_not_asked_for(llama: LlamaForCausalLM, spec: SelfSpec) -> None:
    ours, plain = both(llama, spec, PROMPTS["one row"], return_dict_in_generate=True, output_logits=True)
    assert ours.keys() == plain.keys() == {"sequences", "logits", "past_key_values"}


# Chats: past_key_values out and in -----------------------------------------------------------------------------------


def mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(**TINY, sliding_window=8)
    model = MistralForCausalLM(config).eval()
    damp(model, model.model.layers, 3, 0.5)
    return model


def gemma3() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 3
    config = Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16)
    model = Gemma3ForCausalLM(config).eval()
    for layer in model.model.layers[3:]:
        # Gemma normalises what a block adds, so its weight (1 + w) is what damps.
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            torch.nn.init.constant_(norm.weight, -0.7)
    return model


TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CHAT_MODELS = {"llama": lambda: tiny_llama(factor=0.5), "mistral": mistral, "gemma3": gemma3}


@pytest.fixture(scope="module", params=CHAT_MODELS)
def chat_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return CHAT_MODELS[request.param]()


def turn(model: PreTrainedModel, assistant: SelfSpec | None, inputs: Inputs, **options: Any) -> Any:
    options = {"max_new_tokens": 14, "return_dict_in_generate": True} | options
    return model.generate(**inputs, **options, **({} if assistant is None else {"assistant": assistant}))


def reply(inputs: Inputs, output: Any, ends: list[int]) -> Inputs:
    """The next turn's inputs: what was said so far, with padding after ``ends`` masked, and three tokens more."""
    width = inputs["input_ids"].shape[1]
    said = output.sequences[:, width:]
    after_end = torch.isin(said, torch.tensor(ends)).int().cumsum(1) - torch.isin(said, torch.tensor(ends)).int() > 0
    user = torch.arange(3 * len(said)).view(-1, 3) + 20
    mask = torch.cat([inputs["attention_mask"], (~after_end).long(), torch.ones_like(user)], dim=1)
    return {"input_ids": torch.cat([output.sequences, user], dim=1), "attention_mask": mask}


@pytest.mark.every_run("llama-.*")
@pytest.mark.parametrize("with_eos", [False, True], ids=["same length", "eos"])
@pytest.mark.parametrize("who", ["ours, theirs", "theirs, ours", "ours, ours"])
@pytest.mark.parametrize("chat_spec", ["skip", "search", "tree"])
def test_chat_goes_on(chat_model: PreTrainedModel, chat_spec: str, inputs: Inputs, who: str, with_eos: bool) -> None:
    """Two turns on one cache, the second one with the whole text or what is new; expected is that turn from nothing."""
    rows = new_tokens(chat_model, inputs, max_new_tokens=14)
    ends = [row[4 + 3 * index] for index, row in enumerate(rows)] if with_eos else []
    options = {"eos_token_id": ends or None}
    first_spec, second_spec = (SPECS[chat_spec] if name == "ours" else None for name in who.split(", "))
    first = turn(chat_model, first_spec, inputs, **options)
    if first_spec is not None and not with_eos:
        assert_mixed(first_spec)
    cached = first.sequences.shape[1] - 1
    assert first.past_key_values.get_seq_length() == cached
    following = reply(inputs, first, ends)
    expected = turn(chat_model, None, following, **options).sequences
    with_news_only = following | {"input_ids": following["input_ids"][:, cached:]}
    for given in (following, with_news_only):
        cache = copy.deepcopy(first.past_key_values)
        second = turn(chat_model, second_spec, given, past_key_values=cache, **options)
        assert torch.equal(second.sequences, expected[:, -second.sequences.shape[1] :])
        assert cache.get_seq_length() == expected.shape[1] - 1


def test_returned_cache_is_what_plain_generate_leaves(chat_model: PreTrainedModel) -> None:
    """Layer by layer: kind, shape and content, sliding windows included."""
    ours, plain = (turn(chat_model, a, PROMPTS["one row"]).past_key_values for a in (EXIT, None))
    assert type(ours) is type(plain)
    for mine, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize("sized", [False, True], ids=["without config", "with config"])
def test_own_cache_object_is_filled_in_place(
    chat_model: PreTrainedModel, inputs: Inputs, return_dict: bool, sized: bool
) -> None:
    cache = DynamicCache(config=chat_model.config) if sized else DynamicCache()
    output = turn(chat_model, EXIT, inputs, past_key_values=cache, return_dict_in_generate=return_dict)
    assert_mixed(EXIT)
    ids = output.sequences if return_dict else output
    assert cache.get_seq_length() == ids.shape[1] - 1
    if return_dict:
        assert output.past_key_values is cache
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), 14 + 1, dtype=torch.long)], dim=1)
    following = {"input_ids": torch.cat([ids, ids[:, -1:]], dim=1), "attention_mask": mask}
    expected = turn(chat_model, None, following).sequences
    assert torch.equal(turn(chat_model, None, following, past_key_values=cache).sequences, expected)


# Other ways in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, with_ids: bool) -> None:
    """Embeddings in place of ids (the result holds new tokens only) or beside them."""
    embeds = llama.get_input_embeddings()(inputs["input_ids"]).flip(1)
    given = inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
    ours, plain = both(llama, spec, {**given, "inputs_embeds": embeds})
    assert torch.equal(ours, plain)
    assert not torch.equal(ours[:, -24:], llama.generate(**inputs, max_new_tokens=24)[:, -24:])


@pytest.mark.parametrize("size", [1, 5])
def test_prefill_in_chunks(chat_model: PreTrainedModel, inputs: Inputs, size: int) -> None:
    widths: list[int] = []
    hook = chat_model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    ours, plain = both(chat_model, EXIT, inputs, prefill_chunk_size=size)
    hook.remove()
    assert torch.equal(ours, plain)
    assert max(widths) <= max(size, 5)


def test_up_to_the_last_position(spec: SelfSpec, inputs: Inputs) -> None:
    """Learned positions end somewhere, and rows come there at different times."""
    model = tiny_gpt2(positions=40)
    ours, plain = both(model, spec, inputs, max_new_tokens=None, max_length=40)
    assert torch.equal(ours, plain)


def test_sampling_from_one_candidate_is_greedy(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs) -> None:
    """``num_return_sequences`` needs sampling; with ``top_k=1`` plain generate is the judge all the same."""
    ours, plain = both(llama, spec, inputs, do_sample=True, top_k=1, num_return_sequences=3)
    assert len(plain) == 3 * len(inputs["input_ids"])
    assert torch.equal(ours, plain)


def test_seeds(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs) -> None:
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return llama.generate(**inputs, do_sample=True, max_new_tokens=24, num_return_sequences=2, assistant=spec)

    first = sample(0)
    assert torch.equal(first, sample(0))
    assert not torch.equal(first, sample(1))
    assert not torch.equal(first[0], first[1])


@pytest.mark.every_run("llama-.*")
@pytest.mark.parametrize("rows", [[0, 1, 2], [2]], ids=["batch", "one row"])
def test_mask_with_holes(chat_model: PreTrainedModel, spec: SelfSpec, rows: list[int]) -> None:
    """A mask may have zeros anywhere but in the last column."""
    inputs = ragged_batch((12, 12, 12))
    inputs["attention_mask"][1, [0, 3, 4]] = 0
    inputs["attention_mask"][2, 7:10] = 0
    inputs = {name: value[rows] for name, value in inputs.items()}
    ours, plain = both(chat_model, spec, inputs)
    assert torch.equal(ours, plain)


# A user's own parts --------------------------------------------------------------------------------------------------


class LastSeen(CandidateGenerator):
    """Proposes what followed the last token's previous occurrence."""

    def __init__(self) -> None:
        self.matches: list[int] = []
        self.seen = torch.empty(1, 0)

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        self.seen = input_ids
        earlier = (input_ids[0, :-1] == input_ids[0, -1]).nonzero()
        if not len(earlier):
            return input_ids, None
        start = int(earlier[-1]) + 1
        return torch.cat([input_ids, input_ids[:, start : start + 4]], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        before = self.seen.shape[1]
        assert input_ids.shape[1] == before + num_matches + 1
        assert torch.equal(input_ids[:, :before], self.seen)
        self.matches.append(num_matches)


@pytest.mark.parametrize("padding", [0, 3])
def test_own_candidate_generator(llama: LlamaForCausalLM, inputs: Inputs, padding: int) -> None:
    inputs = {name: torch.nn.functional.pad(value, (padding, 0)) for name, value in inputs.items()}
    draft = LastSeen()
    spec = SelfSpec(draft=draft)
    ours, plain = both(llama, spec, inputs, max_new_tokens=60)
    assert torch.equal(ours, plain)
    assert spec.stats is not None
    if len(plain) == 1:
        assert len(draft.matches) == spec.stats.rounds
        assert sum(draft.matches) == spec.stats.accepted


def test_own_stop_function(llama: LlamaForCausalLM, inputs: Inputs) -> None:
    """Ends a draft after an even token, whose row, logits and hidden state it is shown."""
    b = len(inputs["input_ids"])
    drafted: list[bool] = []

    def stop(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (b, VOCABULARY)
        assert hidden_states.shape == (b, llama.config.hidden_size)
        assert torch.equal(logits.argmax(-1), input_ids[:, -1]) or b > 1
        drafted.append(bool(input_ids[0, -1] % 2))
        return input_ids[:, -1] % 2 == 0

    spec = SelfSpec(draft=EarlyExit(3), stop=stop, max_draft=6)
    ours, plain = both(llama, spec, inputs, max_new_tokens=48)
    assert torch.equal(ours, plain)
    assert spec.stats is not None
    if b == 1:
        ends = drafted.count(False)
        assert spec.stats.drafted == spec.stats.draft_steps == len(drafted)
        assert 0 < ends <= spec.stats.rounds


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "eos_token_id": 50}], ids=str)
def test_early_exit_serves_transformers_own_loop(
    llama: LlamaForCausalLM, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An independent check of the draft: only the candidate generator is ours."""
    matches: list[int] = []
    lengths: list[int] = []

    def candidate_generator(logits_processor: Any, **kwargs: Any) -> CandidateGenerator:
        generator = EXIT.candidate_generator(llama, logits_processor)
        get_candidates = generator.get_candidates

        def counted(input_ids: torch.Tensor, **kwargs: Any) -> Any:
            candidates, scores = get_candidates(input_ids, **kwargs)
            lengths.append(candidates.shape[1] - input_ids.shape[1])
            return candidates, scores

        generator.get_candidates = counted
        generator.update_candidate_strategy = lambda ids, scores, count: matches.append(int(count))
        return generator

    monkeypatch.setattr(llama, "_get_candidate_generator", candidate_generator)
    plain = llama.generate(**PROMPTS["one row"], max_new_tokens=30, **options)
    theirs = llama.generate(**PROMPTS["one row"], max_new_tokens=30, assistant_model=llama, **options)
    assert torch.equal(theirs, plain)
    assert 0 < sum(matches) < sum(lengths)
