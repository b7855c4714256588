"""Finding the tokens that drafts consist of (FR-Spec, arXiv 2502.14856 §3.2)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import SettingError, UnsupportedModelError
from ..model.anatomy import causal_lm
from ..model.head_rows import output_head
from ..parts.part import about
from ..parts.reduced_head import ReducedHead
from ..settings import check_count
from .blocks import HELD_OUT, Blocks
from .fitting import keep

USUAL_SIZE = 8192


def fit_reduced_head(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    dataset: Iterable[Any],
    *,
    size: int = USUAL_SIZE,
    output_dir: str | os.PathLike[str] | None = None,
) -> ReducedHead:
    """Finds the most frequent tokens of some text, and adds the end-of-text tokens. Nothing is trained.

    Args:
        model: a causal LM of transformers, or a PEFT model around one; it stays as it is.
        tokenizer: its tokenizer; ``None`` where the rows have ``input_ids``.
        dataset: texts, best such as the model writes, or rows with a ``text`` or with ``input_ids``; 5 % at the end
            are held out, and the share of them that the head covers is its figure.
        size: number of tokens, or the whole vocabulary if that has fewer.
        output_dir: folder in which the head is saved, with a model card.

    Returns:
        The head, for ``EarlyExit(layer, head=head)``, ``EarlyExitAdapter(adapter, head=head)`` or
        ``EarlyExitLora(lora, head=head)``.

    Raises:
        SettingError, SettingTypeError: there is no text, or a setting is not allowed.
        UnsupportedModelError: the model has no output head.
    """
    name = "fit_reduced_head"
    check_count(f"{name}(size)", size)
    inner = causal_lm(model, name)
    if output_head(inner) is None:
        raise UnsupportedModelError(f"{name}: {type(inner).__name__} has no output head. Give the causal LM around it.")
    vocabulary = inner.config.get_text_config(decoder=True).vocab_size
    tokens = Blocks(tokenizer, dataset, 1, name).rows.flatten()
    if int(tokens.max()) >= vocabulary or int(tokens.min()) < 0:
        raise SettingError(
            f"{name} was given tokens from {int(tokens.min())} to {int(tokens.max())}, but the model has {vocabulary}. "
            "Give the model's own tokenizer."
        )
    held = len(tokens) // HELD_OUT
    counted, held_out = tokens[: len(tokens) - held], tokens[len(tokens) - held :]
    counts = torch.bincount(counted, minlength=vocabulary)
    ends = inner.generation_config.eos_token_id
    for end in [] if ends is None else ends if isinstance(ends, list) else [ends]:
        if 0 <= end < vocabulary:
            counts[end] = len(tokens)
    # Of equally frequent tokens, those with lower ids: tokenizers give these to the tokens that they met most often.
    chosen = counts.sort(descending=True, stable=True).indices[: min(size, vocabulary)].sort().values
    head = ReducedHead.of(chosen.tolist(), vocabulary)
    figures = {"share of held-out tokens": round(torch.isin(held_out, chosen).float().mean().item(), 4)} if held else {}
    return keep(head, about(inner, {"tokens": len(chosen), "tokens of text": len(counted)}, figures), output_dir)
