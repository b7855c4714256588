"""Grammars that can go back: masks for drafts, forced text for free, and everything as plain ``generate`` leaves it."""

import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedTokenizerFast

import hf_selfspec
from helpers.automata import Automaton, Expecting, Own
from helpers.calls import Counting
from helpers.machine import Machine
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.processes import library
from helpers.sampling import SPECS as SAMPLED
from helpers.sampling import VOCABULARY as FEW
from helpers.sampling import check_exact, exact_joint, sample
from helpers.sampling import llama as few_tokens
from helpers.watched import Proposing, watched
from hf_selfspec import ConfidenceThreshold, Draft, FixedLength, GenerationStats, SelfSpec, Text, TopKTree
from hf_selfspec.drafts import DraftSource, EarlyExit, SkipLayers
from hf_selfspec.drafts.grammar import XGrammar
from hf_selfspec.drafts.grammar.rows import GrammarMask, with_grammars
from hf_selfspec.errors import SettingTypeError, UnsupportedOptionError

MODEL = tiny_llama(4, seed=3, factor=0.5)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "is_old": {"type": "boolean"}},
    "required": ["name", "is_old"],
    "additionalProperties": False,
}
ROW, BATCH = ragged_batch((12,), seed=11), ragged_batch((4, 9, 6), seed=11)
TABLE = [list(range(2, VOCABULARY, 2)), list(range(3, VOCABULARY, 3)), [7], list(range(2, 30))]
REGEX = r"(ab|ba)c[0-9]{2,5}(: end|, more)"
# Behind tokens of one character come a few longer ones, so that forced text can be split in several ways.
LONGER = ("name", "na", '":', "is", "_old", "old", "true", "fal", "false", "ab", "end", "more", "mo")
SPECS: dict[str, Callable[[], SelfSpec]] = {
    "default": SelfSpec,
    "exit": lambda: SelfSpec(EarlyExit(2), FixedLength(4)),
    "exit, tree": lambda: SelfSpec(EarlyExit(2), FixedLength(4), TopKTree(((0.5, 3), (1.0, 2)))),
    "skips": lambda: SelfSpec(SkipLayers(), ConfidenceThreshold(0.1)),
}


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):  # outlines and llguidance compile their masks, which takes long
        yield


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte level, one printable character per token and a few longer ones, as many as the model has."""
    characters = [chr(33 + index) for index in range(94) if chr(33 + index) not in "!#$%&'*;<=>?@^"]
    tokens = ["<pad>", "<s>", "</s>", *characters, "Ġ", *LONGER]
    assert len(tokens) == VOCABULARY
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


TOKENIZER = byte_tokenizer()
# How outlines makes processors with its backends: their modules and names, and further settings for a schema.
BACKENDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "xgrammar in outlines": ("xgrammar", "XGrammarBackend", ()),
    "outlines-core": ("outlines_core", "OutlinesCoreBackend", ("",)),
    "llguidance": ("llguidance", "LLGuidanceBackend", ()),
}
LIBRARIES = ("xgrammar", *BACKENDS)


def processor_of(name: str, schema: str | None, regex: str | None = None) -> Any:
    if name == "xgrammar":
        xgrammar = library("xgrammar")
        compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=VOCABULARY))
        if schema is None:
            return xgrammar.contrib.hf.LogitsProcessor(compiler.compile_regex(regex))
        return xgrammar.contrib.hf.LogitsProcessor(compiler.compile_json_schema(schema, any_whitespace=False))
    (module, backend_name, settings), outlines = BACKENDS[name], library("outlines")
    if module != "outlines_core":
        library(module)
    backends = importlib.import_module(f"outlines.backends.{module}")
    backend = getattr(backends, backend_name)(outlines.from_transformers(MODEL, TOKENIZER))
    if schema is None:
        return backend.get_regex_logits_processor(regex)
    if module == "llguidance":
        strict = {"whitespace_flexible": False}
        grammar = library(module).LLMatcher.grammar_from_json_schema(schema, overrides=strict)
        return backends.LLGuidanceLogitsProcessor(grammar, backend.llg_tokenizer, "torch")
    return backend.get_json_schema_logits_processor(schema, *settings)


GRAMMARS = {"json": (json.dumps(SCHEMA), None), "regex": (None, REGEX)}
ENDING = {"eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 48}
libraries_warn = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method`:DeprecationWarning",  # of torch.compile
    "ignore:Error in LLMatcher:UserWarning",  # of padding behind a row's end, in plain generate alone
)


def texts(spec: SelfSpec | None, inputs: Any, *processors: Any, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": 24, "do_sample": False} | options
    return MODEL.generate(**inputs, **options, logits_processor=list(processors), assistant=spec).tolist()


@pytest.mark.every_run("xgrammar-json")
@libraries_warn
@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_ids_are_plain_generates_for_many_prompts(library: str, kind: str) -> None:
    """Prompts alone and in ragged batches, with each of the drafts in turn."""
    checked = 0
    for seed, (make, lengths) in enumerate(zip(SPECS.values(), [(12,), (4, 9, 6)] * 2, strict=True)):
        inputs, spec = ragged_batch(lengths, seed=seed), make()
        plain, ours = (texts(each, inputs, processor_of(library, *GRAMMARS[kind]), **ENDING) for each in (None, spec))
        assert ours == plain
        assert spec.stats.together_for == "", "rows have to go on at their own pace"
        assert spec.stats.accepted > 0
        for text in TOKENIZER.batch_decode([row[max(lengths) :] for row in ours]):
            if "</s>" in text:  # it has come to its end
                whole, checked = text.split("</s>")[0], checked + 1
                assert re.fullmatch(REGEX, whole) if kind == "regex" else {*json.loads(whole)} == {"name", "is_old"}
    assert checked >= 4


@pytest.mark.parametrize("option", ["prompt_lookup_num_tokens", "assistant_early_exit"])
def test_transformers_own_drafts_bring_a_grammar_out_of_step(option: str) -> None:
    """They call its processor for tokens that are then rejected; the README says so."""
    with pytest.raises(AssertionError):
        texts(None, ragged_batch((12,), seed=0), processor_of("xgrammar", None, REGEX), **ENDING, **{option: 3})


@pytest.mark.every_run("xgrammar")
@libraries_warn
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_processor_goes_on_where_plain_generate_leaves_it(library: str) -> None:
    """From call to call, and where no end of text ends a row (of which llguidance's processor warns)."""
    inputs, found = ragged_batch((12,), seed=3), []
    for spec in (None, SPECS["default"](), SPECS["exit"]()):
        processor, ids = processor_of(library, *GRAMMARS["json"]), inputs["input_ids"]
        for _ in range(5):
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            ids = torch.tensor(texts(spec, given, processor, **ENDING | {"max_new_tokens": 7}))
        found.append(ids.tolist())
        if library != "llguidance":
            found[-1] += texts(spec, inputs, processor_of(library, None, "ab{1,4}"), max_new_tokens=16)
    assert found[0] == found[1] == found[2]
    assert '"is_old":' in TOKENIZER.decode(found[0][0])


@pytest.mark.every_run("(xgrammar|outlines-core|llguidance)-.*")
@libraries_warn
@pytest.mark.parametrize("regex", ["(ab|ba){40}", "ab{1,4}"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_masks_do_not_depend_on_the_way(library: str, regex: str) -> None:
    """Outlines-core's guides take back 32 tokens at most; xgrammar's matchers have no masks behind their end."""
    a, b, end = TOKENIZER.convert_tokens_to_ids(["a", "b", "</s>"])
    longest = (a, b) * 18 if "40" in regex else (a, b, end)
    lines = [longest[:count] for count in (1, 2, 4, 36) if count <= len(longest)] + [longest]

    def begun() -> Any:
        (processor,) = with_grammars([processor_of(library, None, regex)])
        processor.begin(ROW["input_ids"], VOCABULARY)
        return processor.rows[0]

    def mask_of(row: Any, line: tuple[int, ...]) -> list[bool]:
        row.go_to(line)
        return row.fresh_mask().tolist()

    expected = []
    for line in lines:
        fresh = begun()
        expected.append([mask_of(fresh, line[:count]) for count in range(len(line) + 1)][-1])
    walker = begun()
    for places in itertools.product(range(len(lines)), repeat=2):
        assert [mask_of(walker, lines[place]) for place in places] == [expected[place] for place in places]
    with pytest.raises(UnsupportedOptionError, match=r"does not allow token 50, which was generated"):
        begun().mask([], (50,))


def test_forced_text_may_end_within_a_character() -> None:
    """What both characters begin with is no text of its own."""
    xgrammar = library("xgrammar")
    info = xgrammar.TokenizerInfo([b"\xc3", b"\xa9", b"\xa8", b"</s>"], stop_token_ids=[3])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_regex("(é|è)"))
    bitmask = xgrammar.allocate_token_bitmask(1, 4)
    expected = XGrammar(matcher, bitmask, 0, list(info.decoded_vocab)).expected()
    assert expected in (0, None)  # since xgrammar 0.2.9 such text ends before the character


def compared(spec: SelfSpec, inputs: Any, make: Callable[[], list[Any]], **options: Any) -> GenerationStats:
    """The same tokens as plain ``generate``'s, and the same states of processors after them."""
    found = []
    for assistant in (None, spec):
        processors = make()
        ids = texts(assistant, inputs, *processors, **options)
        own = [each for each in processors if isinstance(each, Own)]
        seen = [each.seen for each in processors if isinstance(each, Counting)]
        found.append((ids, [row.states for each in own for row in each.rows], seen))
    assert found[0] == found[1]
    assert [each.calls for each in own] == [1]
    assert spec.stats.accepted > 0
    return spec.stats


@pytest.mark.every_run("(exit, tree-at once|default)-.*-drawn|exit, tree-one by one-row-greedy")
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["row", "batch"])
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_grammar_of_ones_own(spec: str, at_once: bool, inputs: Any, options: Any, machine: Machine) -> None:
    """On a CPU and as on a GPU, where each node would be one wait."""
    table = [[6, 9, 4], [9, 5, 6], [7], [5, 7, 8, 10]]
    if at_once:
        machine.nodes_are_scored_at_once()
    with patch.object(GrammarMask, "of_row", autospec=True, side_effect=GrammarMask.of_row) as asked:
        assert compared(SPECS[spec](), inputs, lambda: [Own(TABLE)], **options).together_for == ""
        for make in (lambda: [Own(table)], lambda: [Own(table, Expecting)]):
            compared(SPECS[spec](), inputs, make, eos_token_id=10, pad_token_id=0, **options)
    assert not (asked.called and at_once and spec == "default")


class DeadEnd(LogitsProcessor):
    is_stateless = True

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.isin(input_ids[:, -1:], self.tokens), -torch.inf)


@pytest.mark.every_run("greedy")
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
def test_a_draft_ends_if_nothing_may_follow(options: dict[str, Any]) -> None:
    """Behind tokens that only a draft takes another processor forbids all that the grammar allows."""
    drafted: set[int] = set()
    exit_draft = watched(EarlyExit(1), lambda text, draft: drafted.update(draft.tokens.flatten().tolist()))
    spec, plain = SelfSpec(exit_draft, FixedLength(6)), texts(None, BATCH, Own(TABLE), DeadEnd([]), **options)
    assert texts(spec, BATCH, Own(TABLE), DeadEnd([]), **options) == plain
    dead = sorted(drafted - {token for row in plain for token in row})
    assert len(dead) > 3
    assert texts(spec, BATCH, Own(TABLE), DeadEnd(dead), **options) == plain
    assert spec.stats.accepted > 0


def test_a_grammar_that_was_drafted_beyond_the_end_is_taken_back() -> None:
    stop = {"stop_strings": TOKENIZER.decode([7]), "tokenizer": TOKENIZER}
    for spec in (SPECS["exit"](), SelfSpec()):
        compared(spec, ROW, lambda: [Own([[5], [7], [8], [9]])], **stop)


def test_beside_another_memory_rows_advance_together() -> None:
    assert compared(SPECS["exit, tree"](), BATCH, lambda: [Own(TABLE), Counting()]).together_for == "Counting"


class Over(Automaton):
    """Knows nothing of what follows token 10, which ends a row."""

    def mask(self, vocabulary: int) -> torch.Tensor:
        assert self.states[-1] != 1
        return super().mask(vocabulary)

    def advance(self, token: int) -> None:
        super().advance(token)
        self.states[-1] = int(token == 10)


def test_nothing_is_asked_behind_an_end_or_a_forbidden_token() -> None:
    """Nor of rows that have ended, nor behind nodes that do not count."""
    table = [[4, 6, 10]]
    grammar = GrammarMask(Own(table, Over), lambda ids: [Over(table) for _ in ids])
    text = Text.of(torch.tensor([[1], [1]]), [0, 0], 8)
    grammar.begin(text.ids[:, :1], 12)
    tokens = [[4, 10, 6, 5, 4], [10] * 5]
    draft = Draft(torch.tensor(tokens), [3, 2], [[0, 1, 2, 0, 4]] * 2, listed=tokens)
    found = grammar.of_nodes(text, draft, [True, False], frozenset({10}))
    assert found[0].sum(-1).tolist() == [3, 3, 12, 12, 12, 12]
    assert found[1].all()


def test_forced_tokens_need_no_forward() -> None:
    """A single allowed token is certain: not one of them is rejected, and the part that drafts is not asked."""
    for spec in (SPECS["exit"](), SPECS["skips"](), SelfSpec.lookup(), SelfSpec(phrase((9, 9)))):
        texts(spec, ROW, Own([[5], [6], [7], [8]]))
        assert spec.stats.draft_steps == 0
        assert spec.stats.accepted == spec.stats.drafted > 12
    texts(exit_spec := SPECS["exit"](), ROW, Own(TABLE))
    assert 0 < exit_spec.stats.draft_steps < exit_spec.stats.drafted


class Turns(Automaton):
    """Forces a token in each state in turn, and allows nearly all in the others."""

    def advance(self, token: int) -> None:
        self.states.append((self.states[-1] + 1) % len(self.table))


def test_a_token_that_is_forced_in_one_row_leaves_the_others_their_drafts() -> None:
    def make() -> list[Any]:
        states = itertools.cycle(range(4))  # each row begins at the next one
        return [Own([list(range(2, VOCABULARY))] * 3 + [[9]], lambda table: Turns(table, [next(states)]))]

    stats = compared(SelfSpec(EarlyExit(3), FixedLength(4)), ragged_batch((4, 9, 6, 3), seed=3), make)
    assert stats.draft_steps > stats.verify_passes


def test_forced_tokens_are_as_many_as_pay() -> None:
    """By the costs of a CPU 31 in a round."""
    for spec in (SelfSpec.swift(), SelfSpec(phrase((9,)))):
        texts(spec, ROW, Own([[5], [6], [7], [8]]), max_new_tokens=60)
        assert max(size for size, _ in spec.stats.round_sizes) == 31


def phrase(tokens: tuple[int, ...], parents: tuple[int, ...] | None = None) -> DraftSource:
    """Drafts these tokens in each round."""

    def propose(text: Text, max_new: list[int]) -> Draft:
        size = min(len(tokens), max(max_new))
        drafted = torch.tensor([tokens[:size]] * text.batch_size, dtype=torch.long)
        if parents is None:
            return Draft(drafted, [min(size, count) for count in max_new])
        return Draft(drafted, [min(size, 2)] * text.batch_size, [list(parents[:size])] * text.batch_size)

    return Proposing(propose)


@pytest.mark.machine("nodes_are_scored_at_once")
@pytest.mark.parametrize("parents", [None, (0, 0, 2, 1)], ids=["line", "tree"])
def test_grammars_are_not_asked_behind_what_they_forbid(parents: tuple[int, ...] | None) -> None:
    """Whatever drafts: tokens 9 and 3 are never allowed."""
    spec = SelfSpec(phrase((4, 9, 6, 3), parents))
    stats = compared(spec, BATCH, lambda: [Own([[4, 6, 8], [4, 8]])], max_new_tokens=12)
    assert stats.accepted < stats.drafted


FEW_TABLE = [[0, 1, 2, 4], [1, 3, 4], [2], list(range(FEW))]


def by_text(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The same as :class:`Own` with this table, as a function of the text."""
    found = torch.full_like(scores, -torch.inf)
    for row, tokens in enumerate(input_ids[:, 1:].tolist()):
        state = reduce(lambda state, token: (3 * state + token) % len(FEW_TABLE), tokens, 0)
        found[row, FEW_TABLE[state]] = scores[row, FEW_TABLE[state]]
    return found


def dice(text: Text, max_new: list[int]) -> Draft:
    """Draws tokens that know of no grammar."""
    size = min(3, max(max_new))
    q = torch.full((text.batch_size, size, FEW), 0.1 / FEW)
    q[..., [1, 3]] += 0.45
    tokens = q.flatten(0, 1).multinomial(1).view(text.batch_size, size)
    return Draft(tokens, [min(size, count) for count in max_new], q=q)


@pytest.mark.every_run("early exit-Automaton")
@pytest.mark.parametrize("kind", [Automaton, Expecting])
@pytest.mark.parametrize("spec", [*SAMPLED, "dice"])
def test_drawn_tokens_are_exact(spec: str, kind: type[Automaton]) -> None:
    drafts = SAMPLED | {"dice": SelfSpec(Proposing(dice))}
    sampled = sample(drafts[spec], rows=500, logits_processor=[Own(FEW_TABLE, kind)])
    check_exact(sampled, exact_joint(few_tokens(), [by_text]))


class Numbers(Automaton):
    def mask(self, vocabulary: int) -> torch.Tensor:
        return torch.ones(vocabulary)


METHODS = r"for each of the 1 rows, with the methods mask\(vocabulary\), advance"


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        (lambda processor, ids: [object() for _ in ids], METHODS),
        (lambda processor, ids: [], METHODS),
        (lambda processor, ids: 1, METHODS),
        (lambda processor, ids: [Numbers(TABLE)], r"mask\(97\).*registered for Wrong must return a BoolTensor \[97\]"),
        ([], r"register_grammar\(kind, adapter\) takes a class of logits processors .* and \[\]"),
    ],
)
def test_wrong_adapters_are_refused(adapter: Any, words: str) -> None:
    kind = type("Wrong", (Own,), {})

    def use() -> None:
        hf_selfspec.register_grammar(kind, adapter)
        texts(SelfSpec(), ROW, kind(TABLE))

    with pytest.raises(SettingTypeError, match=words):
        use()


@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [
        ("xgrammar", "XGrammarLogitsProcessor", "_matchers"),
        ("outlines_core", "OutlinesCoreLogitsProcessor", "_guides"),
        ("llguidance", "LLGuidanceLogitsProcessor", "ll_matchers"),
    ],
)
def test_an_unknown_version_of_outlines_is_refused(module: str, kind: str, name: str) -> None:
    unknown = type(kind, (Counting,), {"__module__": f"outlines.backends.{module}"})
    (mask,) = with_grammars([unknown()])
    with pytest.raises(UnsupportedOptionError, match=f"of this version of outlines has no `{name}`"):
        mask.begin(ROW["input_ids"], VOCABULARY)


def test_masks_are_as_wide_as_logits() -> None:
    """A model may know more tokens than it can generate."""
    (mask,) = with_grammars([Own(TABLE)])
    mask.begin(ROW["input_ids"], VOCABULARY + 3)
    mask.fit(VOCABULARY)
    assert mask.of_row(0, torch.ones(12, dtype=torch.long), torch.zeros(1, VOCABULARY)).shape == (1, VOCABULARY)
