"""Turns prompts, texts or chats, into a model's inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import SettingError, SettingTypeError

# A text to continue, or the messages of a chat to answer.
Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
_SHOWN = 60


def has_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the tokenizer has a chat template.

    Raises:
        SettingError: it has none.
    """
    if not has_chats(tokenizer):
        raise SettingError(
            "the tokenizer has no chat template, so the model cannot chat. Give a text for it to continue, or an "
            "instruction-tuned model."
        )


def as_prompts(tokenizer: PreTrainedTokenizerBase, given: Iterable[Prompt], chat: bool | None = None) -> list[Prompt]:
    """Turns texts into prompts; chats stay as they are.

    Args:
        tokenizer: the model's tokenizer.
        given: texts and chats.
        chat: whether a text becomes the first message of a chat; ``None`` for yes if the tokenizer has a chat template.

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
    """Returns the inputs of ``generate`` for one prompt: tensors ``[1, s]``.

    Args:
        tokenizer: the model's tokenizer.
        prompt: a text, or a chat as a list of messages.
        device: the model's device.
        longest: a text is cut after this many tokens; chats are never cut.

    Raises:
        SettingError: the prompt is empty, or it is a chat and the tokenizer has no chat template.
        SettingTypeError: the prompt is neither a text nor a chat.
    """
    found = token_ids(tokenizer, prompt)
    ids = torch.tensor([found[:longest] if isinstance(prompt, str) else found], device=device)
    if not ids.numel():
        raise SettingError("the prompt is empty. Give at least one token to continue from.")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def token_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Returns the tokens of a text, or of a chat up to where the answer begins.

    Raises:
        SettingError: the prompt is a chat, and the tokenizer has no chat template.
        SettingTypeError: the prompt is neither a text nor a chat.
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
