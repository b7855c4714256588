"""Readers of prompt suites and of the user's own prompts; see ``SUITES``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import SettingError
from ...prompt_files import read_rows
from .prompts import Beginning, Given

# Categories of Spec-Bench; those of MT-bench are chats.
_SPEC_BENCH = {
    "translation": "translation",
    "summarization": "summary",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
# Lengths, in characters, of paragraphs that are edited.
_PARAGRAPH = range(300, 900)
# Traces of a tokenizer in WikiText, and their replacements.
_TRACES = ((re.compile(r" @(\W)@ "), r"\1"), (re.compile(r" <unk>"), ""), (re.compile(r" ([,.;:)]|'s)"), r"\1"))
# The name that replaces another one.
_NEW_NAME = "Arden"
_SUMMARY_QUESTION = "Summarize: "
_OTHER_QUESTION = "Name the people and places in the following text, and what happened: "
_RAG_QUESTION = "Who or what is the text above about?"
# The key of the user's own prompt in an item.
_OWN = "prompt"

Item = Mapping[str, Any]
Kinds = dict[str, list[Given]]
KindsOfPairs = dict[str, list[tuple[str, str]]]


@dataclass(frozen=True)
class Suite:
    """How the items of a file become prompts.

    Attributes:
        columns: the columns of every item; empty for the user's own prompts.
        questions: returns chats by kind.
        beginnings: returns texts by kind that a model without a chat template continues; the user's own as a whole.
        pairs: returns chats and variants of them by kind, ``None`` if the suite has no variants.
        is_told_by_columns: whether a file with these columns belongs to the suite; false if a user's own prompts may
            have the same columns.
    """

    columns: tuple[str, ...]
    questions: Callable[[Sequence[Item]], Kinds]
    beginnings: Callable[[Sequence[Item]], Kinds]
    pairs: Callable[[Sequence[Item]], KindsOfPairs] | None = None
    is_told_by_columns: bool = True


@dataclass(frozen=True)
class Source:
    """A file, or dataset of the Hub, and the suite that reads it.

    Attributes:
        data: path or name.
        suite: name in ``SUITES``, ``None`` to choose by the columns.
        field: column of the prompt, for the suite ``text`` only.
    """

    data: str
    suite: str | None = None
    field: str | None = None

    def __post_init__(self) -> None:
        if self.suite is not None and self.suite not in SUITES:
            raise SettingError(f"--suite {self.suite}: there is no such suite. Give one of {', '.join(SUITES)}.")
        if self.field is not None and self.suite not in (None, "text"):
            raise SettingError(f"--field {self.field} has no effect with --suite {self.suite}. Leave it out.")

    @cached_property
    def content(self) -> tuple[Suite, list[Item]]:
        """The suite and the items, read once.

        Raises:
            SettingError: the file cannot be read, is empty, or does not have the columns of the suite.
        """
        rows = read_rows(self.data, self.field)
        name = self.suite or _suite_of(self, rows[0].columns)
        suite, first = SUITES[name], rows[0].columns
        missing = [column for column in suite.columns if column not in first]
        if missing:
            raise SettingError(
                f"--data {self.data} --suite {name}: the first line has no {' and no '.join(missing)}, but "
                f"{', '.join(sorted(first))}. Give the suite's own file, or leave --suite out."
            )
        if not suite.columns:
            return suite, [{_OWN: row.prompt(self.field)} for row in rows]
        return suite, [row.columns for row in rows]


def check(sources: Sequence[Source]) -> None:
    """Reads all files, so that errors in them are reported before a model is loaded.

    Raises:
        SettingError: a file cannot be read, is empty, or does not have the columns of its suite.
    """
    for source in sources:
        assert source.content


def questions(sources: Sequence[Source]) -> Kinds:
    """All chats by kind; ``editing`` has as many edits of code as of text."""
    return _merged([suite.questions(items) for suite, items in (source.content for source in sources)])


def beginnings(sources: Sequence[Source]) -> Kinds:
    """All texts by kind that a model without a chat template continues."""
    return _merged([suite.beginnings(items) for suite, items in (source.content for source in sources)])


def pairs(sources: Sequence[Source]) -> KindsOfPairs:
    """Chats and variants of them by kind: another question about the same text, another name in the same code."""
    found: KindsOfPairs = {}
    for suite, items in (source.content for source in sources):
        if suite.pairs is not None:
            for kind, both in suite.pairs(items).items():
                found.setdefault(kind, []).extend(both)
    return found


def _merged(parts: Sequence[Kinds]) -> Kinds:
    """The kinds of all parts in order; a kind of several parts has equally many texts of each."""
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: _as_many_of_each([part[kind] for part in parts if part.get(kind)]) for kind in kinds}


def _as_many_of_each(lists: Sequence[list[Given]]) -> list[Given]:
    count = min(map(len, lists), default=0)
    return [text for texts in lists for text in texts[:: len(texts) // count][:count]]


def _suite_of(source: Source, first: Item) -> str:
    if source.field is None:
        for name, suite in SUITES.items():
            if suite.is_told_by_columns and all(column in first for column in suite.columns):
                return name
    return "text"


def _own(items: Sequence[Item]) -> Kinds:
    return {"text": [item[_OWN] for item in items]}


def _paragraphs(items: Sequence[Item]) -> Kinds:
    return {"text": [Beginning(line) for line in _long_lines(items)]}


def _long_lines(items: Sequence[Item]) -> Iterator[str]:
    for line in (item["text"] for item in items):
        if len(line) in _PARAGRAPH and "=" not in line:
            yield _cleaned(line)


def _text_edits(items: Sequence[Item]) -> Kinds:
    found: list[Given] = []
    for text in _long_lines(items):
        names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", text)).most_common(1)
        if names:
            found.append(f"Repeat the following text word for word, but change {names[0][0]} to {_NEW_NAME}.\n\n{text}")
    return {"editing": found}


def _spec_bench(items: Sequence[Item]) -> Kinds:
    found: Kinds = {}
    for item in items:
        found.setdefault(_SPEC_BENCH.get(item["category"], "chat"), []).append(item["turns"][0])
    return found


def _spec_bench_beginnings(items: Sequence[Item]) -> Kinds:
    found: Kinds = {}
    for kind, asked in _spec_bench(items).items():
        found[kind] = [Beginning(str(question)) for question in asked]
    return found


def _spec_bench_pairs(items: Sequence[Item]) -> KindsOfPairs:
    found: KindsOfPairs = {}
    for item in items:
        question = item["turns"][0]
        if item["category"] == "summarization":
            variant = _OTHER_QUESTION + question.removeprefix(_SUMMARY_QUESTION)
            found.setdefault("summary", []).append((question, variant))
        elif item["category"] == "rag" and "\n" in question:
            variant = f"{question.rpartition(chr(10))[0]}\n{_RAG_QUESTION}"
            found.setdefault("rag", []).append((question, variant))
    return found


def _task(code: str) -> str:
    return f"Complete the following Python function.\n\n```python\n{code}```"


def _renaming(code: str, name: str, new: str) -> str:
    return f"Repeat the following code, but rename the function {name} to {new}.\n\n```python\n{code}```"


def _solved(item: Item) -> str:
    return f"{item['prompt']}{item['canonical_solution']}"


def _humaneval(items: Sequence[Item]) -> Kinds:
    edits: list[Given] = [_renaming(_solved(item), item["entry_point"], f"my_{item['entry_point']}") for item in items]
    return {"code": [_task(item["prompt"]) for item in items], "editing": edits}


def _humaneval_pairs(items: Sequence[Item]) -> KindsOfPairs:
    found: KindsOfPairs = {"code": [], "editing": []}
    for item in items:
        name, original = item["entry_point"], _task(item["prompt"])
        found["code"].append((original, original.replace(name, f"find_{name}")))
        edits = _renaming(_solved(item), name, f"my_{name}"), _renaming(_solved(item), name, f"new_{name}")
        found["editing"].append(edits)
    return found


def _cleaned(line: str) -> str:
    for trace, written in _TRACES:
        line = trace.sub(written, line)
    return line.strip()


SUITES = {
    # Spec-Bench's question.jsonl, with the first turns as prompts: six kinds.
    "spec-bench": Suite(("category", "turns"), _spec_bench, _spec_bench_beginnings, _spec_bench_pairs),
    # HumanEval.jsonl: code, and editing of code.
    "humaneval": Suite(
        ("prompt", "entry_point", "canonical_solution"),
        _humaneval,
        lambda items: {"code": [Beginning(item["prompt"]) for item in items]},
        _humaneval_pairs,
    ),
    "gsm8k": Suite(
        ("question", "answer"),
        lambda items: {"gsm8k": [item["question"] for item in items]},
        lambda items: {"gsm8k": [Beginning(item["question"]) for item in items]},
        is_told_by_columns=False,
    ),
    # Plain text, a paragraph a line, e.g. WikiText: editing of text.
    "editing": Suite(("text",), _text_edits, _paragraphs, is_told_by_columns=False),
    # The user's own prompts, as they are.
    "text": Suite((), _own, _own, is_told_by_columns=False),
}
