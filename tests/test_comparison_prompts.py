"""Streams of prompts: suites, users' own files, chats, beginnings, variants."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from comparing import CHAT, DEMO, write_suites
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_selfspec import SettingError
from hf_selfspec.bench.comparison.prompts import Encoder, repeated, stream_of, stream_of_variants
from hf_selfspec.bench.comparison.suites import Source, beginnings, pairs, questions


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_suites(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def sources(files: dict[str, Path]) -> list[Source]:
    told = [Source(str(files[name])) for name in ("spec-bench", "humaneval")]
    return [*told, *(Source(str(files[name]), name) for name in ("gsm8k", "editing"))]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(DEMO)
    found.chat_template = CHAT
    return found


def test_stream_has_as_many_of_each_kind_in_turn(sources: list[Source], tokenizer: PreTrainedTokenizerBase) -> None:
    texts = questions(sources)
    encoder = Encoder(tokenizer, 10_000)
    stream = stream_of(texts, encoder, 2, random.Random(0))
    kinds = ["chat", "translation", "summary", "qa", "math", "rag", "code", "editing", "gsm8k"]
    assert [prompt.kind for prompt in stream] == 2 * kinds
    assert stream == stream_of(texts, encoder, 2, random.Random(0))
    assert [prompt.ids for prompt in repeated(stream)] == 2 * [prompt.ids for prompt in stream]
    edits = [text for text in texts["editing"] if "change Paris to Arden" in text]
    assert len(edits) == 3
    assert "Paris-on-Sea, had walls." in edits[0]
    assert len(stream_of(texts, encoder, None, random.Random(0))) == sum(map(len, texts.values()))


def test_prompts_that_do_not_fit_are_counted(sources: list[Source], tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = Encoder(tokenizer, 64)
    stream = stream_of(questions(sources), encoder, 3, random.Random(0))
    assert {prompt.kind for prompt in stream} >= {"gsm8k", "qa"}
    assert encoder.left_out["code"] == encoder.left_out["editing"] // 2 == 3


def test_raw_prompts_are_beginnings(sources: list[Source], tokenizer: PreTrainedTokenizerBase) -> None:
    texts = beginnings(sources)
    assert "editing" not in texts
    stream = stream_of(texts, Encoder(tokenizer, 10_000, chat=False), 3, random.Random(0))
    assert {len(prompt.ids) for prompt in stream if prompt.kind in ("code", "text")} == {64}
    assert all(tokenizer.decode(prompt.ids).startswith("def add_") for prompt in stream if prompt.kind == "code")


def test_variants_come_after_what_they_vary(sources: list[Source], tokenizer: PreTrainedTokenizerBase) -> None:
    both = pairs(sources)
    stream = stream_of_variants(both, Encoder(tokenizer, 10_000), 3, random.Random(1))
    texts = [tokenizer.decode(prompt.ids).strip() for prompt in stream]
    places = [tuple(texts.index(text.strip()) for text in pair) for all_of in both.values() for pair in all_of]
    assert len(stream) == 2 * len(places) == 24
    assert all(original < variant for original, variant in places)
    assert any(variant - original > 2 for original, variant in places)


def test_own_prompts_are_taken_as_they_are(files: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> None:
    (texts,) = questions([Source(str(files["text"]))]).values()
    encoder = Encoder(tokenizer, 10_000, chat=False)
    stream = stream_of({"text": texts}, encoder, None, random.Random(0))
    assert sorted(tokenizer.decode(prompt.ids).strip() for prompt in stream) == ["def read(path):", "import os"]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_a_column_of_text_is_never_edited(tmp_path: Path, name: str) -> None:
    """Not even one that is as long as the paragraphs of the suite ``editing`` and names someone."""
    given = ["Write a poem.", f"A letter of {'dear ' * 70}Robert, who lives in Rome."]
    lines = given if name.endswith(".txt") else [json.dumps({"text": text}) for text in given]
    path = tmp_path / name
    path.write_text("\n".join(lines))
    assert questions([Source(str(path))]) == beginnings([Source(str(path))]) == {"text": given}
    (edit,) = questions([Source(str(path), "editing")])["editing"]
    assert "change Robert to Arden" in edit


def test_own_questions_with_answers_are_no_suite(files: dict[str, Path]) -> None:
    given = ["What is 0 and 0?", "What is 1 and 1?", "What is 2 and 2?"]
    assert beginnings([Source(str(files["gsm8k"]))]) == {"text": given}


def test_own_prompts_are_whole_beside_beginnings_of_suites(
    files: dict[str, Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    own = "x = 1\n" * 100
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": own}))
    texts = beginnings([Source(str(files["humaneval"])), Source(str(tmp_path / "own.jsonl"))])
    stream = stream_of(texts, Encoder(tokenizer, 10_000, chat=False), 1, random.Random(0))
    assert [prompt.kind for prompt in stream] == ["code", "text"]
    assert len(stream[0].ids) == 64
    assert stream[1].ids == tokenizer(own)["input_ids"]


def test_a_named_column_is_the_prompt(files: dict[str, Path]) -> None:
    source = Source(str(files["gsm8k"]), "text", "answer")
    assert questions([source]) == {"text": ["0", "2", "4"]}
    with pytest.raises(SettingError, match="there is no text in the column 'solution'"):
        questions([Source(str(files["gsm8k"]), None, "solution")])


@pytest.mark.parametrize(
    ("content", "suite", "message"),
    [
        ('{"a": 1}', None, "line 1: there is no text in any of the columns messages, prompt"),
        ('{"question": "a"}', "humaneval", "the first line has no prompt and no entry_point"),
        ("[1]", None, "is not an object with a text"),
        ("", None, "the dataset is empty"),
        ("{", None, "line 1: this is not JSON"),
        ('{"text": "a"}', "spec", "--suite spec: there is no such suite. Give one of spec-bench, humaneval"),
    ],
)
def test_files_that_are_no_prompts(tmp_path: Path, content: str, suite: str | None, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(SettingError, match=message):
        questions([Source(str(path), suite)])
    with pytest.raises(SettingError, match="there is no such file"):
        questions([Source(str(tmp_path / "none.jsonl"))])
