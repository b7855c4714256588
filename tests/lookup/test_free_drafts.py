"""Free drafts, alone and around a layer draft, against plain ``generate``: token for token, greedy, float32."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedModel, TextIteratorStreamer, TextStreamer

from helpers.architectures import ARCHITECTURES, EVERY_RUN, build
from helpers.fitted import adapter_of, heads_of
from helpers.models import VOCABULARY, character_tokenizer, tiny_gpt2, tiny_llama
from hf_selfspec import (
    Cascade,
    DynamicExit,
    EarlyExit,
    EarlyExitAdapter,
    FixedLength,
    Lookup,
    SelfSpec,
    SkipLayers,
    TopKTree,
)
from hf_selfspec.batch import Draft, Text
from hf_selfspec.control.arms import ArmStats
from hf_selfspec.draft.controlled import ControlledDrafter
from hf_selfspec.draft.partial import PartialDraft
from hf_selfspec.lookup.likeliest import likeliest, tops_of
from hf_selfspec.model.anatomy import Anatomy

pytestmark = pytest.mark.usefixtures("verification_is_free")

Inputs = dict[str, torch.Tensor]

SPECS: dict[str, Callable[[], SelfSpec]] = {
    "lookup": SelfSpec.lookup,
    "exit": lambda: SelfSpec(Cascade([Lookup(), EarlyExit(3)]), FixedLength(3)),
    "default": SelfSpec,
}


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """All that is drafted."""
    seen: list[Draft] = []

    def watch(kind: type[ControlledDrafter]) -> None:
        original = kind.propose

        def watched(self: Any, text: Text, max_new: list[int]) -> Draft:
            seen.append(original(self, text, max_new))
            return seen[-1]

        monkeypatch.setattr(kind, "propose", watched)

    watch(ControlledDrafter)
    return seen


def repetitive(lengths: tuple[int, ...] = (14,), seed: int = 3) -> Inputs:
    """Left-padded prompts, each a few tokens over and over."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        piece = torch.randint(3, VOCABULARY, (4 + row,), generator=generator)
        ids[row, width - length :] = piece.repeat(length)[:length]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


ROW, BATCH = repetitive(), repetitive((14, 9, 11))
INPUTS = {"one row": ROW, "ragged batch": BATCH}


# Architectures -------------------------------------------------------------------------------------------------------


# What each model generates; the first row of the batch is the one row again, and is found in the store.
CALLS = {"lookup": ("one row", "ragged batch"), "exit": ("ragged batch",), "default": ("one row",)}


@pytest.mark.every_run(EVERY_RUN)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_identity(name: str, drafts: list[Draft]) -> None:
    model = build(name)
    expected = {shape: model.generate(**inputs, max_new_tokens=18) for shape, inputs in INPUTS.items()}
    for kind, shapes in CALLS.items():
        spec = SPECS[kind]()
        for shape in shapes:
            drafts.clear()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*cannot take")
                ids = model.generate(**INPUTS[shape], max_new_tokens=18, assistant=spec)
            assert torch.equal(ids, expected[shape]), f"{kind}, {shape}"
        if len(INPUTS[shape]["input_ids"]) > 1:  # what one call learns of may be too little
            assert 0 < spec.stats.accepted < sum(draft.tokens.numel() for draft in drafts), kind
            assert any(map(_branches, drafts)) == Anatomy.of(model).tree, kind


def _branches(draft: Draft) -> bool:
    """Whether a node of a row has several children."""
    return any(max(Counter(p for p in row if p >= 0).values(), default=0) > 1 for row in draft.parents or [])


# Everything that generate offers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(factor=0.5)


@pytest.fixture(params=["lookup", "exit"])
def spec(request: pytest.FixtureRequest) -> SelfSpec:
    return SPECS[request.param]()


@pytest.fixture(params=INPUTS)
def inputs(request: pytest.FixtureRequest) -> Inputs:
    return INPUTS[request.param]


def both(model: PreTrainedModel, spec: SelfSpec, inputs: Inputs, **options: Any) -> tuple[Any, Any]:
    """What speculative and plain ``generate`` return. The text is generated a second time, found in the store."""
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
    plain = model.generate(**inputs, **options)
    model.generate(**inputs, **options, assistant=spec)
    ours = model.generate(**inputs, **options, assistant=spec)
    assert spec.stats is not None
    assert spec.stats.accepted > 0
    return ours, plain


def new_tokens(model: PreTrainedModel, inputs: Inputs, **options: Any) -> list[list[int]]:
    ids = model.generate(**inputs, **({"max_new_tokens": 20} | options))
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_tokens(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, count: int) -> None:
    for limit in ({"max_new_tokens": count}, {"max_length": inputs["input_ids"].shape[1] + count}):
        plain = llama.generate(**inputs, **limit)
        for _ in range(2):
            assert torch.equal(llama.generate(**inputs, **limit, assistant=spec), plain)
            assert spec.stats.tokens == count * len(plain)
    assert (spec.stats.accepted > 0) == (count > 2)


def every_third(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Allows a third of the vocabulary, another one for each row and last token."""
    return list(range(2 + (batch_id + int(ids[-1])) % 3, VOCABULARY, 3))


# What to pass, given the tokens that generate adds to each row without it.
OPTIONS: dict[str, Callable[[list[list[int]]], dict[str, Any]]] = {
    "nothing": lambda rows: {},
    "long": lambda rows: {"max_new_tokens": 50},
    "length of the text": lambda rows: {"max_new_tokens": None, "max_length": 31},
    "eos": lambda rows: {"eos_token_id": [row[9 + 3 * index] for index, row in enumerate(rows)], "pad_token_id": 96},
    "eos of all": lambda rows: {"eos_token_id": rows[0][12]},
    "repetition penalty": lambda rows: {"repetition_penalty": 1.1},
    "no repeated n-gram": lambda rows: {"no_repeat_ngram_size": 5},
    "least length": lambda rows: {"min_new_tokens": 16, "eos_token_id": rows[0][5]},
    "forced eos": lambda rows: {"forced_eos_token_id": 50, "eos_token_id": 50},
    "prefix function": lambda rows: {"prefix_allowed_tokens_fn": every_third},
    "suppressed": lambda rows: {"suppress_tokens": rows[0][3:5]},
    "several": lambda rows: {
        "repetition_penalty": 1.1,
        "suppress_tokens": rows[0][3:5],
        "min_new_tokens": 6,
        "eos_token_id": rows[0][4],
    },
    "one candidate": lambda rows: {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "chunks": lambda rows: {"prefill_chunk_size": 5},
    "stateful": lambda rows: {"logits_processor": [Counting()]},
    "stateful, eos": lambda rows: {"logits_processor": [Counting()], "eos_token_id": rows[0][12]},
}


class Counting(LogitsProcessor):
    """Favours a token that follows from how long the text is, which it counts itself."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        self.width = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] <= self.width:
            self.seen = []  # another call
        assert not self.seen or input_ids.shape[1] == self.width + 1, "not called once for each token"
        self.width = input_ids.shape[1]
        self.seen.append(input_ids.tolist())
        favoured = torch.full((len(scores), 1), 2 + 7 * (len(self.seen) // 4) % (VOCABULARY - 2))
        return scores.scatter_add(1, favoured, torch.full(favoured.shape, 0.8))


@pytest.mark.every_run("exit-ragged batch-.*")
@pytest.mark.parametrize("name", OPTIONS)
def test_options(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, name: str) -> None:
    ours, plain = both(llama, spec, inputs, **OPTIONS[name](new_tokens(llama, inputs)))
    assert torch.equal(ours, plain)
    if name != "stateful":
        assert not spec.stats.together_for or len(plain) > 1


@pytest.mark.parametrize("name", ["nothing", "eos", "several", "stateful"])
def test_the_default(llama: LlamaForCausalLM, inputs: Inputs, name: str) -> None:
    ours, plain = both(llama, SelfSpec(), inputs, **OPTIONS[name](new_tokens(llama, inputs)))
    assert torch.equal(ours, plain)


def test_eos_in_the_middle_of_a_draft(llama: LlamaForCausalLM, drafts: list[Draft]) -> None:
    """Free drafts go on behind it, as other texts did."""
    spec = SelfSpec.lookup()
    said = new_tokens(llama, ROW, max_new_tokens=40)[0]
    llama.generate(**ROW, max_new_tokens=40, assistant=spec)
    end = next(place for place in range(12, 40) if said[place] not in said[:place])
    drafts.clear()
    options = {"max_new_tokens": 40, "eos_token_id": said[end]}
    assert torch.equal(llama.generate(**ROW, **options, assistant=spec), llama.generate(**ROW, **options))
    assert spec.stats.tokens == end + 1
    behind = [draft for draft in drafts if said[end] in draft.tokens[0, :-1].tolist()]
    assert any(draft.children(0, draft.tokens[0].tolist().index(said[end]) + 1) for draft in behind)


def test_stop_strings_and_streams(llama: LlamaForCausalLM, spec: SelfSpec, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = character_tokenizer()
    width = ROW["input_ids"].shape[1]
    said = tokenizer.decode(llama.generate(**ROW, max_new_tokens=30)[0, width:])
    stop = next(said[place : place + 3] for place in range(10, 24) if said.index(said[place : place + 3]) == place)
    ours, plain = both(llama, spec, ROW, max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(ours, plain)
    assert plain.shape[1] < width + 30
    llama.generate(**ROW, max_new_tokens=30, assistant=spec, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == said + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=llama.generate, kwargs=ROW | {"max_new_tokens": 30, "streamer": streamer, "assistant": spec}
    )
    thread.start()
    assert "".join(streamer) == said
    thread.join()


@pytest.mark.parametrize("eos", [False, True], ids=["same length", "eos"])
def test_scores_and_logits(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, eos: bool) -> None:
    rows = new_tokens(llama, inputs)
    ends = [row[9 + 3 * index] for index, row in enumerate(rows)] if eos else []
    flags = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, plain = both(llama, spec, inputs, repetition_penalty=1.1, eos_token_id=ends or None, **flags)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    said, steps = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist(), len(plain.scores)
    lengths = [next((i for i, token in enumerate(row, start=1) if token in ends), steps) for row in said]
    for name in ("scores", "logits"):
        mine, theirs = (torch.stack(getattr(output, name), dim=1) for output in (ours, plain))
        for row, length in enumerate(lengths):
            torch.testing.assert_close(mine[row, :length], theirs[row, :length], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("who", ["ours, theirs", "theirs, ours", "ours, ours"])
def test_chats_go_on(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, who: str) -> None:
    """Two turns on one cache, the second with the whole text or what is new."""
    first_spec, second_spec = ({} if name == "theirs" else {"assistant": spec} for name in who.split(", "))
    options = {"max_new_tokens": 14, "return_dict_in_generate": True}
    first = llama.generate(**inputs, **options, **first_spec)
    user = inputs["input_ids"][:, -3:]
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(user), 14 + 3, dtype=torch.long)], dim=1)
    whole = {"input_ids": torch.cat([first.sequences, user], dim=1), "attention_mask": mask}
    expected = llama.generate(**whole, **options).sequences
    cached = first.past_key_values.get_seq_length()
    for given in (whole, whole | {"input_ids": whole["input_ids"][:, cached:]}):
        cache = copy.deepcopy(first.past_key_values)
        second = llama.generate(**given, **options, past_key_values=cache, **second_spec)
        assert torch.equal(second.sequences, expected[:, -second.sequences.shape[1] :])
        assert cache.get_seq_length() == expected.shape[1] - 1
    if second_spec:
        assert spec.stats.accepted > 0


@pytest.mark.parametrize("with_ids", [False, True])
def test_embedded_prompts(llama: LlamaForCausalLM, spec: SelfSpec, inputs: Inputs, with_ids: bool) -> None:
    embeds = llama.get_input_embeddings()(inputs["input_ids"])
    given = inputs if with_ids else {"attention_mask": inputs["attention_mask"]}
    ours, plain = both(llama, spec, {**given, "inputs_embeds": embeds})
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("placeholder", [VOCABULARY, -100])
def test_ids_of_embedded_prompts_may_be_anything(llama: LlamaForCausalLM, spec: SelfSpec, placeholder: int) -> None:
    """A placeholder for which the model has no embedding is not drafted where the text before it occurs again."""
    embeds = llama.get_input_embeddings()(ROW["input_ids"])
    first = new_tokens(llama, ROW, max_new_tokens=1)[0]
    ids = ROW["input_ids"].clone()
    ids[0, :4] = torch.tensor([*ids[0, -2:], *first, placeholder])
    ours, plain = both(llama, spec, {"input_ids": ids, "inputs_embeds": embeds})
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2]], ids=["batch", "one row"])
def test_masks_with_holes(llama: LlamaForCausalLM, spec: SelfSpec, rows: list[int]) -> None:
    inputs = repetitive((14, 14, 14))
    inputs["attention_mask"][1, [0, 3, 4]] = 0
    inputs["attention_mask"][2, 7:10] = 0
    ours, plain = both(llama, spec, {name: value[rows] for name, value in inputs.items()})
    assert torch.equal(ours, plain)


def test_up_to_the_last_position(spec: SelfSpec, inputs: Inputs) -> None:
    """Trees behind the text would be beyond the last position; rows come there at different times."""
    model = tiny_gpt2(positions=36)
    ours, plain = both(model, spec, inputs, max_new_tokens=None, max_length=36)
    assert torch.equal(ours, plain)
    text = plain[:, inputs["input_ids"].shape[1] :]
    ends = text[:, -2].unique().tolist()
    ours, plain = both(model, spec, inputs, max_new_tokens=60, eos_token_id=ends)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon-alibi", "gpt_neo"])
@pytest.mark.filterwarnings("ignore:.*cannot take")
def test_models_without_tree_masks_draft_lines(name: str, spec: SelfSpec, drafts: list[Draft]) -> None:
    model = build(name)
    for shape, inputs in INPUTS.items():
        ours, plain = both(model, spec, inputs, eos_token_id=new_tokens(model, inputs)[-1][9])
        assert torch.equal(ours, plain), shape
    assert drafts
    assert not any(draft.is_tree for draft in drafts)


def test_trees_are_no_larger_than_allowed(llama: LlamaForCausalLM, drafts: list[Draft]) -> None:
    """Around a layer draft too, whose own tokens always count."""
    layers = SelfSpec(Cascade([Lookup(max_nodes=5), EarlyExit(3)]), FixedLength(2))
    for spec, most in ((SelfSpec(Lookup(max_nodes=5)), 5), (layers, 5), (replace(layers, stop=FixedLength(7)), 7)):
        drafts.clear()
        ours, plain = both(llama, spec, ROW)
        assert torch.equal(ours, plain)
        assert max(draft.size for draft in drafts) == most
    drafts.clear()
    both(llama, SelfSpec(Lookup(), max_draft=2), ROW)
    assert max(max(draft.lengths) for draft in drafts) == 2


# Around other drafts -------------------------------------------------------------------------------------------------

DEEP = tiny_llama(layers=8, factor=0.5)
OTHERS: dict[str, Callable[[], SelfSpec]] = {
    "exit": lambda: SelfSpec(EarlyExit(3), FixedLength(2)),
    "exit, tree": lambda: SelfSpec(EarlyExit(3), FixedLength(3), TopKTree(((1.0, 2),))),
    "skipped layers": lambda: SelfSpec(SkipLayers((2, 3), (4,)), FixedLength(3)),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(adapter_of(DEEP)), FixedLength(3)),
    "heads": lambda: SelfSpec(DynamicExit(heads_of(DEEP, 0.6)), FixedLength(3)),
}


@pytest.mark.every_run("one row-.*")
@pytest.mark.parametrize("name", OTHERS)
def test_other_drafts_go_on_after_free_rounds(
    name: str, inputs: Inputs, drafts: list[Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second round is free. What the other source drafts after them is what it would draft alone there."""
    alone = OTHERS[name]()
    turns = iter(range(1 << 30))
    speedups = (math.inf, 1.0)
    monkeypatch.setattr(ArmStats, "speedup", lambda self, promised: speedups[next(turns) % 2])
    seen: dict[str, dict[tuple[int, int], int]] = {"alone": {}, "cascade": {}}
    kinds = {kind for kind in (PartialDraft, *PartialDraft.__subclasses__()) if "propose" in vars(kind)}
    now = "alone"

    def watch(kind: type[PartialDraft]) -> None:
        original = kind.propose

        def watched(self: Any, text: Text, max_new: list[int]) -> Draft:
            draft = original(self, text, max_new)
            for row, length in enumerate(draft.lengths):
                if length:
                    seen[now][row, text.lengths[row]] = int(draft.tokens[row, 0])
            return draft

        monkeypatch.setattr(kind, "propose", watched)

    for kind in kinds:
        watch(kind)
    options = {"max_new_tokens": 40, "do_sample": False}
    plain = DEEP.generate(**inputs, **options)
    single = replace(alone, stop=FixedLength(1), tree=None)
    assert torch.equal(DEEP.generate(**inputs, **options, assistant=single), plain)
    now = "cascade"
    spec = replace(alone, draft=Cascade([Lookup(stored_tokens=0), alone.draft]))
    for _ in range(2):
        assert torch.equal(DEEP.generate(**inputs, **options, assistant=spec), plain)
    assert len(seen["cascade"]) < sum(count > 0 for draft in drafts for count in draft.lengths)
    common = seen["alone"].keys() & seen["cascade"].keys()
    assert len(common) > 3
    assert all(seen["alone"][place] == seen["cascade"][place] for place in common)


def test_a_second_adapter_is_left_out(inputs: Inputs, tmp_path: Path) -> None:
    """Only one can see the prompt."""
    for seed, name in enumerate(("one", "two")):
        adapter_of(DEEP, seed=seed).save_pretrained(tmp_path / name)
    first, second = (EarlyExitAdapter(str(tmp_path / name)) for name in ("one", "two"))
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0), first, second]), FixedLength(3))
    plain = DEEP.generate(**inputs, max_new_tokens=30, do_sample=False)
    with pytest.warns(UserWarning, match="is left out of the drafts.*only one draft source can"):
        assert torch.equal(DEEP.generate(**inputs, max_new_tokens=30, do_sample=False, assistant=spec), plain)


# What the logits of a round favour ----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [5, 97, 4096])
@pytest.mark.parametrize("nodes", [1, 4, 11])
def test_the_most_likely_tokens_and_their_probabilities(vocabulary: int, nodes: int) -> None:
    logits = torch.randn(2, nodes, vocabulary, generator=torch.Generator().manual_seed(0))
    shares, tokens = logits.softmax(-1).topk(min(8, vocabulary), dim=-1)
    for row, of_row in enumerate(tops_of(likeliest(logits))):
        for node, (found, probabilities) in enumerate(of_row):
            count = len(found)
            assert list(found) == tokens[row, node, :count].tolist()
            torch.testing.assert_close(torch.tensor(probabilities), shares[row, node, :count])


def test_logits_that_overflow_favour_nothing() -> None:
    """float16 can make infinities of which no probabilities come; other nodes keep theirs."""
    logits = torch.zeros(1, 6, 97)
    logits[0, 1] = torch.nan
    logits[0, 2, 5] = torch.inf
    logits[0, 3, 7] = 50.0
    found = tops_of(likeliest(logits))[0]
    for broken in (1, 2):
        assert list(found[broken][1]) == [0.0] * len(found[broken][1])
    assert (found[3][0][0], found[3][1][0]) == (7, pytest.approx(1.0))
    assert found[0][1][0] == pytest.approx(1 / 97)
