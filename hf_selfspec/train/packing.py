"""Texts packed into rows of tokens, some of which are held out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import SettingError, SettingTypeError
from ..validation import check_count

# One row in so many is held out of the training to measure the fit, and the most rows that are held out.
HELD_OUT, MOST_HELD_OUT = 20, 64


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Texts, joined with end-of-text tokens, as rows of ``length`` tokens; an incomplete last row is dropped."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, texts: Iterable[Any], length: int, name: str = "fit"
    ) -> None:
        check_count(f"{name}(block_size)", length)
        if isinstance(texts, (str, bytes, Mapping)):
            raise SettingTypeError(f"{name} takes a list of texts or a dataset with a `text` column, got {texts!r}.")
        tokens: list[int] = []
        end = getattr(tokenizer, "eos_token_id", None)
        for text in texts:
            tokens += _tokens(tokenizer, text, name)
            if end is not None:
                tokens.append(end)
        if not tokens:
            raise SettingError(
                f"{name} was given no text: the dataset is empty. Give texts that the model is used for."
            )
        if len(tokens) < length:
            raise SettingError(
                f"{name} was given {len(tokens)} tokens, fewer than one row of block_size={length}. Give more text or "
                "a smaller block_size."
            )
        count = len(tokens) // length
        self.rows = torch.tensor(tokens[: count * length], device="cpu").view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index]}

    def split(self) -> tuple[PackedDataset, PackedDataset]:
        """The rows to train on, and those at the end that are held out."""
        held = min(MOST_HELD_OUT, len(self) // HELD_OUT)
        training, held_out = copy.copy(self), copy.copy(self)
        training.rows, held_out.rows = self.rows[: len(self) - held], self.rows[len(self) - held :]
        return training, held_out


def _tokens(tokenizer: PreTrainedTokenizerBase | None, text: Any, name: str) -> list[int]:
    if isinstance(text, Mapping):
        if "input_ids" in text:
            return [int(token) for token in text["input_ids"]]
        text = text.get("text")
    if not isinstance(text, str) or tokenizer is None:
        raise SettingTypeError(
            f"{name} takes strings, or rows with a `text` (and the tokenizer) or with `input_ids`; got {text!r}."
        )
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
