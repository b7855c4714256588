"""Makes one stream of prompts of several kinds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from ...prompts import Prompt as Whole
from ...prompts import as_prompts, token_ids

# Tokens of a suite's text that are the prompt of a model without a chat template.
BEGINNING = 64
_T = TypeVar("_T")


@dataclass(frozen=True)
class Beginning:
    """A text of a suite, of which the first ``BEGINNING`` tokens are the prompt."""

    text: str


# A whole text or chat, or the beginning of a text.
Given = Whole | Beginning
Texts = Mapping[str, Sequence[Given]]
Pairs = Mapping[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a stream.

    Attributes:
        kind: kind of task, such as ``math``.
        ids: the prompt's token ids.
    """

    kind: str
    ids: list[int]


@dataclass(frozen=True)
class Batch:
    """Prompts that are generated together.

    Attributes:
        kind: kind of the prompt, or ``batch of N``.
        ids, mask: ``[b, s]``, padded on the left.
    """

    kind: str
    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Prompt], pad: int, device: torch.device) -> Batch:
        """Pads prompts on the left to one length."""
        width = max(len(prompt.ids) for prompt in prompts)
        ids = [[pad] * (width - len(prompt.ids)) + prompt.ids for prompt in prompts]
        mask = [[0] * (width - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts]
        kind = prompts[0].kind if len(prompts) == 1 else f"batch of {len(prompts)}"
        return cls(kind, torch.tensor(ids, device=device), torch.tensor(mask, device=device))

    @property
    def lengths(self) -> list[int]:
        """Number of tokens in each prompt."""
        found: list[int] = self.mask.sum(1).tolist()
        return found


@dataclass
class Encoder:
    """Tokenizes texts and chats.

    Attributes:
        tokenizer: the model's tokenizer.
        longest: the most tokens of a prompt.
        chat: whether a text is a message of a user; ``None`` if so where the tokenizer has a chat template.
        left_out: for each kind the number of prompts that are too long or empty.
    """

    tokenizer: PreTrainedTokenizerBase
    longest: int
    chat: bool | None = None
    left_out: Counter[str] = field(default_factory=Counter)

    def prompt(self, kind: str, given: Given) -> Prompt | None:
        """Returns the prompt, ``None`` if it is too long or empty.

        Raises:
            SettingError: it is a chat, and the tokenizer has no chat template.
        """
        ids = self._ids(given)
        fits = 0 < len(ids) <= self.longest
        self.left_out[kind] += not fits
        return Prompt(kind, ids) if fits else None

    def _ids(self, given: Given) -> list[int]:
        if isinstance(given, Beginning):
            return token_ids(self.tokenizer, given.text)[:BEGINNING]
        (whole,) = as_prompts(self.tokenizer, [given], self.chat)
        return token_ids(self.tokenizer, whole)


def stream_of(texts: Texts, encoder: Encoder, count: int | None, rng: random.Random) -> list[Prompt]:
    """Returns ``count`` prompts of each kind (``None`` for all), with the kinds in turn."""
    chosen = []
    for kind, all_of_kind in texts.items():
        prompts = (encoder.prompt(kind, text) for text in rng.sample(list(all_of_kind), len(all_of_kind)))
        chosen.append(_first(count, prompts))
    return _in_turn(chosen)


def stream_of_variants(pairs: Pairs, encoder: Encoder, count: int | None, rng: random.Random) -> list[Prompt]:
    """Returns ``count`` prompts of each kind, with the kinds in turn, and a variant of each some prompts later."""
    chosen = []
    for kind, all_of_kind in pairs.items():
        both = (
            (encoder.prompt(kind, original), encoder.prompt(f"{kind}, variant", variant))
            for original, variant in rng.sample(list(all_of_kind), len(all_of_kind))
        )
        chosen.append(_first(count, ((a, b) if a and b else None for a, b in both)))
    originals = _in_turn(chosen)
    stream: list[Prompt] = []
    waiting: list[Prompt] = []
    for index, (original, variant) in enumerate(originals):
        stream.append(original)
        waiting.append(variant)
        if index >= len(originals) // 4:
            stream.append(waiting.pop(rng.randrange(len(waiting))))
    return stream + rng.sample(waiting, len(waiting))


def repeated(stream: Sequence[Prompt]) -> list[Prompt]:
    """Returns the stream twice."""
    return [*stream, *(Prompt(f"{prompt.kind}, again", prompt.ids) for prompt in stream)]


def batches_of(stream: Sequence[Prompt], size: int, pad: int, device: torch.device) -> list[Batch]:
    """Returns batches of ``size`` consecutive prompts; an incomplete last batch is left out."""
    groups = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
    return [Batch.of(group, pad, device) for group in groups]


def padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that pads batches."""
    known: tuple[Any, ...] = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return int(next(token for token in known if token is not None))


def _in_turn(lists: Iterable[Sequence[_T]]) -> list[_T]:
    return [item for together in zip_longest(*lists) for item in together if item is not None]


def _first(count: int | None, items: Iterator[_T | None]) -> list[_T]:
    """The first ``count`` items that are not ``None``; the iterator is not read any further."""
    found: list[_T] = []
    for item in items:
        if item is not None:
            found.append(item)
        if count is not None and len(found) >= count:
            break
    return found
