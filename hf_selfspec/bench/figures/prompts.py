"""Prompts and models of the figures on trained models: beginnings of texts, with as many new tokens in every run."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import SettingError
from ...loading import NamedModel
from ...train.texts import texts
from ..corpus import Corpus, read_corpus
from ..trained import Asked, compare

PROMPT = 64
# Pieces into which a file is divided, so that there are enough prompts.
_PIECES = 3


def add_prompts(parser: argparse.ArgumentParser, prompts: int) -> None:
    """Declares options of models and prompts."""
    parser.add_argument("--model", required=True, help="folder or name of the model, e.g. examples/demo_model")
    parser.add_argument("--humaneval", required=True, help="HumanEval.jsonl")
    parser.add_argument("--prompts", type=int, default=prompts, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")


def column(path: str, name: str) -> list[str]:
    """Reads a column of a file of JSON lines."""
    return texts(path, name)


def prompts_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[torch.Tensor]:
    """Returns the first 64 tokens, ``[1, 64]``, of ``count`` texts that have at least as many.

    Raises:
        SettingError: there are too few such texts.
    """
    found = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    long_enough = list(islice((ids[:PROMPT] for ids in found if len(ids) >= PROMPT), count))
    if len(long_enough) < count:
        raise SettingError(
            f"{count} prompts of {PROMPT} tokens are needed, but the texts have {len(long_enough)}. Give fewer "
            "--prompts, or another file."
        )
    return [torch.tensor([ids], device="cpu") for ids in long_enough]


def standard_library() -> Corpus:
    """Reads the sources of this interpreter's standard library."""
    return read_corpus(Path(sysconfig.get_paths()["stdlib"]))


def held_out_texts() -> list[str]:
    """Files of the standard library that the demo model was not trained on, some of them from the middle."""
    held_out = standard_library().held_out
    texts = []
    for part in range(_PIECES):
        for text in held_out:
            start = text.find("\ndef ", part * len(text) // _PIECES)
            texts.append(text[start + 1 :] if part and start >= 0 else text)
    return texts


def load(name: str) -> PreTrainedModel:
    """Loads a model in float32 on the CPU; it never ends a text early."""
    model = NamedModel.find(name).model("float32")
    config: Any = model.generation_config
    config.eos_token_id = None  # every run has the same number of tokens
    return model


def best_early_exit(asked: Asked, prompts: Sequence[torch.Tensor], layers: int) -> tuple[int, int]:
    """Returns the exit and the draft length with which transformers' early exit is fastest on ``prompts``."""
    grid = [
        (layer, length)
        for layer in sorted({min(3, layers - 1), min(4, layers - 1), -(-layers // 4), -(-layers // 3)})
        for length in (1, 2, 4)
    ]
    ways = {f"{case}": asked.early_exit(*case) for case in grid}
    speeds = compare(ways, prompts[:2], repeats=1)
    return min(grid, key=lambda case: speeds[f"{case}"].ms_per_token)
