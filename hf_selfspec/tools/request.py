"""What is to be compared: the settings, and one stream of prompts of several kinds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..errors import SettingError
from ..model.encoding import Prompt as TextOrChat
from ..model.encoding import as_prompts, token_ids
from ..train.prompts import read_rows
from ..validation import check_count, check_share

Clock = Literal["auto", "wall", "cpu"]


@dataclass(frozen=True)
class Settings:
    """How methods are compared; see :func:`~hf_selfspec.compare` and the options of ``hf-selfspec bench``."""

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    clock: Clock = "auto"
    passes: int = 1

    def __post_init__(self) -> None:
        # One token comes with the prompt, so that decoding begins with the second.
        for name, least in {"max_new_tokens": 2, "passes": 1, "top_k": 0, "seed": 0}.items():
            check_count(name, getattr(self, name), least=least)
        check_share("top_p", self.top_p, zero=False, one=True)
        for size in self.batch_sizes:
            check_count("batch_size", size)
        for value in self.temperatures:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise SettingError(f"temperature must be a number of at least 0 (0 for greedy), got {value!r}.")
        for name in ("top_p", "top_k"):
            if getattr(self, name) != getattr(Settings, name) and not any(self.temperatures):
                raise SettingError(f"{name} has no effect on greedy decoding: give a temperature, or leave it out.")
        if not self.batch_sizes or not self.temperatures:
            raise SettingError("batch_size and temperature need at least one value each.")
        if self.clock not in (clocks := get_args(Clock)):
            raise SettingError(f"clock must be one of {', '.join(clocks)}, got {self.clock!r}.")

    @property
    def conditions(self) -> list[tuple[float, int]]:
        """All kinds of calls, in order, by temperature, 0 for greedy, and batch size."""
        sizes, temperatures = dict.fromkeys(self.batch_sizes), dict.fromkeys(self.temperatures)
        return [(float(temperature), size) for size in sizes for temperature in temperatures]

    def options(self, temperature: float, pad: int) -> dict[str, Any]:
        """Arguments of ``generate`` that are the same for all methods; drawn texts differ, so all get one length."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "pad_token_id": pad}
        if temperature:
            options |= {"do_sample": True, "temperature": temperature, "top_p": self.top_p, "top_k": self.top_k}
            options |= {"min_new_tokens": self.max_new_tokens}
        return options


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
        rows = [torch.tensor(prompt.ids, device=device) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        return cls(prompts[0].kind if len(prompts) == 1 else f"batch of {len(prompts)}", ids, mask)


@dataclass
class Encoder:
    """Tokenizes texts and chats of up to ``longest`` tokens, and counts by kind what it leaves out."""

    tokenizer: PreTrainedTokenizerBase
    longest: int
    chat: bool | None = None  # whether a text is a user's message, by default where there is a chat template
    left_out: Counter[str] = field(default_factory=Counter)

    def prompts(self, kind: str, texts: Iterable[TextOrChat]) -> Iterator[Prompt]:
        """Yields the prompts that are neither too long nor empty; chats need a chat template."""
        for text in texts:
            (prompt,) = as_prompts(self.tokenizer, [text], self.chat)
            ids = token_ids(self.tokenizer, prompt)
            if 0 < len(ids) <= self.longest:
                yield Prompt(kind, ids)
            else:
                self.left_out[kind] += 1


def texts_of(data: Iterable[str], column: str | None = None) -> dict[str, list[TextOrChat]]:
    """Returns the prompts of data files by kind; ``column`` holds them, by default the first that usually does."""
    texts: dict[str, list[TextOrChat]] = {}
    for path in data:
        for row in read_rows(path, column):
            texts.setdefault(str(row.columns.get(_COLUMN) or KIND), []).append(row.prompt(column))
    return texts


def stream_of(texts: Mapping[str, Sequence[TextOrChat]], encoder: Encoder, count: int, seed: int) -> list[Prompt]:
    """Returns ``count`` prompts of each kind, drawn by ``seed``, with the kinds in turn."""
    draw = random.Random(seed).sample
    shuffled = {kind: draw(list(of_kind), len(of_kind)) for kind, of_kind in texts.items()}
    return in_turn(islice(encoder.prompts(kind, of_kind), count) for kind, of_kind in shuffled.items())


def in_turn(kinds: Iterable[Iterable[Prompt]]) -> list[Prompt]:
    """The prompts of several kinds as one stream."""
    return [prompt for together in zip_longest(*kinds) for prompt in together if prompt is not None]


def repeated(stream: Sequence[Prompt]) -> list[Prompt]:
    """Returns the stream twice."""
    return [*stream, *(Prompt(f"{prompt.kind}, again", prompt.ids) for prompt in stream)]
