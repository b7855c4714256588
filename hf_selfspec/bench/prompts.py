"""Makes one stream of prompts of several kinds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..data.prompts import Prompt as Given
from ..data.prompts import as_prompts, token_ids
from ..data.texts import read_rows

# The column of a data file that names the kind of a prompt, and the kind of prompts without one.
_COLUMN, KIND = "kind", "text"


class Prompt(NamedTuple):
    """The kind of task, such as ``math``, and the token ids of one prompt of a stream."""

    kind: str
    ids: list[int]


class Batch(NamedTuple):
    """Prompts that are generated together: ``ids`` and ``mask`` are ``[b, s]``, padded on the left."""

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


@dataclass
class Encoder:
    """Tokenizes texts and chats of up to ``longest`` tokens, and counts by kind what it leaves out."""

    tokenizer: PreTrainedTokenizerBase
    longest: int
    chat: bool | None = None  # whether a text is a user's message, by default where there is a chat template
    left_out: Counter[str] = field(default_factory=Counter)

    def prompt(self, kind: str, given: Given) -> Prompt | None:
        """Returns the prompt, ``None`` if it is too long or empty; a chat needs a chat template."""
        (whole,) = as_prompts(self.tokenizer, [given], self.chat)
        ids = token_ids(self.tokenizer, whole)
        fits = 0 < len(ids) <= self.longest
        self.left_out[kind] += not fits
        return Prompt(kind, ids) if fits else None


def texts_of(data: Iterable[str], column: str | None = None) -> dict[str, list[Given]]:
    """Returns the prompts of data files by kind; ``column`` holds them, by default the first that usually does."""
    found: dict[str, list[Given]] = {}
    for path in data:
        for row in read_rows(path, column):
            found.setdefault(str(row.columns.get(_COLUMN) or KIND), []).append(row.prompt(column))
    return found


def stream_of(
    texts: Mapping[str, Sequence[Given]], encoder: Encoder, count: int | None, rng: random.Random
) -> list[Prompt]:
    """Returns ``count`` prompts of each kind (``None`` for all), with the kinds in turn."""
    lists = []
    for kind, of_kind in texts.items():
        prompts = map(encoder.prompt, [kind] * len(of_kind), rng.sample(list(of_kind), len(of_kind)))
        lists.append(list(islice((prompt for prompt in prompts if prompt is not None), count)))
    return [prompt for together in zip_longest(*lists) for prompt in together if prompt is not None]


def repeated(stream: Sequence[Prompt]) -> list[Prompt]:
    """Returns the stream twice."""
    return [*stream, *(Prompt(f"{prompt.kind}, again", prompt.ids) for prompt in stream)]
