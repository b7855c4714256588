"""Prompts, as texts or as chats, as a model takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from .errors import SettingError, SettingTypeError

# A text to go on from, or the messages of a chat that is to be answered.
Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
_SHOWN = 60


def has_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer knows how chats are written."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the tokenizer has a chat template.

    Raises:
        SettingError: it has none.
    """
    if not has_chats(tokenizer):
        raise SettingError(
            "the tokenizer has no chat template, so the model cannot chat. Give a text for it to go on from, or an "
            "instruction-tuned model."
        )


def as_prompts(tokenizer: PreTrainedTokenizerBase, given: Iterable[Prompt], chat: bool | None = None) -> list[Prompt]:
    """Texts as prompts; chats stay as they are.

    Args:
        tokenizer: the model's tokenizer.
        given: texts and chats.
        chat: whether a text is the first message of a chat; ``None`` where the tokenizer has a chat template.

    Raises:
        SettingError: there is a chat, and the tokenizer has no chat template.
    """
    chat = has_chats(tokenizer) if chat is None else chat
    found = [[{"role": "user", "content": one}] if chat and isinstance(one, str) else one for one in given]
    if not all(isinstance(prompt, str) for prompt in found):
        check_chats(tokenizer)
    return found


def encoded(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, device: torch.device, longest: int | None = None
) -> dict[str, torch.Tensor]:
    """Inputs of ``generate``, one row.

    Args:
        tokenizer: the model's tokenizer.
        prompt: a text, or a chat as a list of messages.
        device: the model's.
        longest: tokens of a text that count, the first ones; chats are taken whole.

    Raises:
        SettingError: it is empty, or a chat and the tokenizer has no chat template.
        SettingTypeError: it is neither.
    """
    found = token_ids(tokenizer, prompt)
    ids = torch.tensor([found[:longest] if isinstance(prompt, str) else found], device=device)
    if not ids.numel():
        raise SettingError("the prompt is empty. Give at least one token to go on from.")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def token_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Tokens of a text, or of a chat up to where the answer begins.

    Raises:
        SettingError: it is a chat, and the tokenizer has no chat template.
        SettingTypeError: it is neither.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    is_list = isinstance(prompt, Sequence) and bool(prompt)
    if not is_list or not all(isinstance(message, Mapping) for message in prompt):
        raise SettingTypeError(
            f"a prompt must be a string or a chat, a list of messages, got {repr(prompt)[:_SHOWN]}. Example of a chat: "
            '[{"role": "user", "content": "..."}].'
        )
    check_chats(tokenizer)
    found = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    return list(found["input_ids"])
