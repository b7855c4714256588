"""Prompts of several kinds, as one stream, for ``measure_speed.py``: made from files that the user has."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch
from measure_demo_model import held_out_texts
from transformers import PreTrainedTokenizerBase

# Categories of Spec-Bench; those of MT-bench are chats.
SPEC_BENCH = {
    "translation": "translation",
    "summarization": "summary",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
# Characters of a paragraph that is edited or asked about.
PARAGRAPH = range(300, 900)
# Traces of a tokenizer in the text file, and what is written in their place.
TRACES = ((re.compile(r" @(\W)@ "), r"\1"), (re.compile(r" <unk>"), ""), (re.compile(r" ([,.;:)]|'s)"), r"\1"))
# What is put in the place of a name.
NEW_NAME = "Arden"
SUMMARY_QUESTION = "Summarize: "
OTHER_QUESTION = "Name the people and places in the following text, and what happened: "
RAG_QUESTION = "Who or what is the text above about?"

Texts = dict[str, list[str]]
Pairs = dict[str, list[tuple[str, str]]]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a stream.

    Attributes:
        kind: what is asked for.
        ids: its tokens.
    """

    kind: str
    ids: list[int]


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated together.

    Attributes:
        kind: of the prompt, or of the batch.
        ids, mask: ``[b, s]``, padded on the left.
    """

    kind: str
    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, prompts: list[Prompt], pad: int, device: str) -> "Batch":
        width = max(len(prompt.ids) for prompt in prompts)
        ids = [[pad] * (width - len(prompt.ids)) + prompt.ids for prompt in prompts]
        mask = [[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts]
        kind = prompts[0].kind if len(prompts) == 1 else f"batch of {len(prompts)}"
        return cls(kind, torch.tensor(ids, device=device), torch.tensor(mask, device=device))


@dataclass(frozen=True)
class Sources:
    """Files of prompts, ``None`` for those that the user does not have.

    Attributes:
        spec_bench: Spec-Bench's ``question.jsonl``.
        humaneval: ``HumanEval.jsonl``.
        gsm8k: JSON lines with a ``question`` each.
        text: plain text, a paragraph a line.
    """

    spec_bench: Path | None
    humaneval: Path | None
    gsm8k: Path | None
    text: Path | None

    def questions(self) -> Texts:
        """All chats, by kind."""
        found: Texts = {}
        for item in _lines(self.spec_bench):
            found.setdefault(SPEC_BENCH.get(item["category"], "chat"), []).append(item["turns"][0])
        for item in _lines(self.humaneval):
            task = f"Complete the following Python function.\n\n```python\n{item['prompt']}```"
            found.setdefault("code", []).append(task)
        for item in _lines(self.gsm8k):
            found.setdefault("gsm8k", []).append(item["question"])
        if edits := _as_many_of_each(list(self._code_edits()), list(self._text_edits())):
            found["editing"] = edits
        return found

    def beginnings(self) -> Texts:
        """Texts for a model without a chat template to go on with, by kind."""
        found = {"code": [item["prompt"] for item in _lines(self.humaneval)]}
        found["gsm8k"] = [item["question"] for item in _lines(self.gsm8k)]
        found["text"] = self._paragraphs()
        found["library"] = held_out_texts()
        return {kind: texts for kind, texts in found.items() if texts}

    def pairs(self) -> Pairs:
        """Chats and variants of them, by kind: another question about the same text, another name in the same code."""
        found: Pairs = {}
        for item in _lines(self.spec_bench):
            question = item["turns"][0]
            if item["category"] == "summarization":
                variant = OTHER_QUESTION + question.removeprefix(SUMMARY_QUESTION)
                found.setdefault("summary", []).append((question, variant))
            elif item["category"] == "rag" and "\n" in question:
                variant = f"{question.rpartition(chr(10))[0]}\n{RAG_QUESTION}"
                found.setdefault("rag", []).append((question, variant))
        for item in _lines(self.humaneval):
            name, task = item["entry_point"], f"```python\n{item['prompt']}```"
            original = f"Complete the following Python function.\n\n{task}"
            found.setdefault("code", []).append((original, original.replace(name, f"find_{name}")))
            solved = f"{item['prompt']}{item['canonical_solution']}"
            edits = _renaming(solved, name, f"my_{name}"), _renaming(solved, name, f"new_{name}")
            found.setdefault("editing", []).append(edits)
        return found

    def _code_edits(self) -> Iterator[str]:
        for item in _lines(self.humaneval):
            name = item["entry_point"]
            yield _renaming(f"{item['prompt']}{item['canonical_solution']}", name, f"my_{name}")

    def _text_edits(self) -> Iterator[str]:
        for text in self._paragraphs():
            names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", text)).most_common(1)
            if names:
                yield f"Repeat the following text word for word, but change {names[0][0]} to {NEW_NAME}.\n\n{text}"

    def _paragraphs(self) -> list[str]:
        lines = [] if self.text is None else self.text.read_text().splitlines()
        return [_cleaned(line) for line in lines if len(line) in PARAGRAPH and "=" not in line]


def padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that pads batches."""
    return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)


def _renaming(code: str, name: str, new: str) -> str:
    return f"Repeat the following code, but rename the function {name} to {new}.\n\n```python\n{code}```"


def _cleaned(line: str) -> str:
    for trace, written in TRACES:
        line = trace.sub(written, line)
    return line.strip()


def _as_many_of_each(some: list[str], others: list[str]) -> list[str]:
    count = min(map(len, filter(None, (some, others))), default=0)
    return [text for texts in (some, others) if texts for text in texts[:: len(texts) // count][:count]]


def _lines(path: Path | None) -> list[dict]:
    return [] if path is None else [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


@dataclass
class Encoder:
    """Makes tokens of texts.

    Attributes:
        tokenizer: the model's.
        longest: most tokens of a prompt.
        beginning: tokens of which a raw prompt is made, ``None`` where prompts are chats.
        left_out: by kind the number of texts that are too long, or too short for a raw prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    longest: int
    beginning: int | None
    left_out: Counter[str] = field(default_factory=Counter)

    def prompt(self, kind: str, text: str) -> Prompt | None:
        """The prompt, ``None`` if it does not fit."""
        ids = self._ids(text)
        fits = len(ids) <= self.longest and (self.beginning is None or len(ids) == self.beginning)
        self.left_out[kind] += not fits
        return Prompt(kind, ids) if fits else None

    def _ids(self, text: str) -> list[int]:
        if self.beginning is not None:
            return self.tokenizer(text)["input_ids"][: self.beginning]
        chat = [{"role": "user", "content": text}]
        written = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(written, add_special_tokens=False)["input_ids"]


def stream_of(texts: Texts, encoder: Encoder, count: int, rng: random.Random) -> list[Prompt]:
    """``count`` prompts of each kind, kinds in turn."""
    chosen = []
    for kind, all_of_kind in texts.items():
        prompts = (encoder.prompt(kind, text) for text in rng.sample(all_of_kind, len(all_of_kind)))
        chosen.append(_first(count, prompts))
    return [prompt for together in zip_longest(*chosen) for prompt in together if prompt is not None]


def stream_of_variants(pairs: Pairs, encoder: Encoder, count: int, rng: random.Random) -> list[Prompt]:
    """``count`` prompts of each kind, kinds in turn, and a variant of each some prompts later."""
    chosen = []
    for kind, all_of_kind in pairs.items():
        both = (
            (encoder.prompt(kind, original), encoder.prompt(f"{kind}, variant", variant))
            for original, variant in rng.sample(all_of_kind, len(all_of_kind))
        )
        chosen.append(_first(count, (pair if None not in pair else None for pair in both)))
    originals = [pair for together in zip_longest(*chosen) for pair in together if pair is not None]
    stream: list[Prompt] = []
    waiting: list[Prompt] = []
    for index, (original, variant) in enumerate(originals):
        stream.append(original)
        waiting.append(variant)
        if index >= len(originals) // 4:
            stream.append(waiting.pop(rng.randrange(len(waiting))))
    return stream + rng.sample(waiting, len(waiting))


def repeated(stream: list[Prompt]) -> list[Prompt]:
    """The stream, and all of it again."""
    return stream + [Prompt(f"{prompt.kind}, again", prompt.ids) for prompt in stream]


def batches_of(stream: list[Prompt], size: int, pad: int, device: str) -> list[Batch]:
    """Batches of ``size`` prompts that follow each other; what does not fill one is left out."""
    groups = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    return [Batch.of(group, pad, device) for group in groups]


def _first(count: int, prompts: Iterator) -> list:
    found: list = []
    while len(found) < count and (prompt := next(prompts, _END)) is not _END:
        if prompt is not None:
            found.append(prompt)
    return found


_END = object()
