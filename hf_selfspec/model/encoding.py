"""Texts and chats as the token ids that a model gets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import SettingError, SettingTypeError

# A text to continue, or the messages of a chat to answer.
Prompt: TypeAlias = str | Sequence[Mapping[str, Any]]
# Characters of what was given that a message repeats.
_SHOWN = 100


def is_chat(value: Any) -> bool:
    """Returns whether a value is a list of messages."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return is_list and all(isinstance(message, Mapping) for message in value)


def has_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_chats(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the tokenizer has a chat template."""
    if not has_chats(tokenizer):
        raise SettingError(
            "the tokenizer has no chat template, so the model cannot chat. Give a text for it to continue, or an "
            "instruction-tuned model."
        )


def as_prompts(tokenizer: PreTrainedTokenizerBase, texts: Iterable[Prompt], chat: bool | None = None) -> list[Prompt]:
    """Turns each text into the first message of a chat, by default if the tokenizer has a chat template."""
    chat = has_chats(tokenizer) if chat is None else chat
    prompts = [[{"role": "user", "content": text}] if chat and isinstance(text, str) else text for text in texts]
    if not all(isinstance(prompt, str) for prompt in prompts):
        check_chats(tokenizer)
    return prompts


def checked_texts(
    function: str, texts: object, chats: bool = False, empty: bool = False, name: str = "texts"
) -> list[Any]:
    """Returns the texts that a function was given, at least one, and chats and empty texts only if it takes them."""
    items = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, Mapping)) else []
    if not items or not all((isinstance(item, str) and (item or empty)) or (chats and is_chat(item)) for item in items):
        types = "strings or chats (lists of messages)" if chats else "strings"
        raise SettingTypeError(
            f"{function}({name}) must be a list of {types}, at least one{'' if empty else ' and none of them empty'}, "
            f"got {repr(texts)[:_SHOWN]}."
        )
    return items


def token_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Returns the tokens of a text, or of a chat up to where an answer begins."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    if not is_chat(prompt):
        raise SettingTypeError(
            f"a prompt must be a string or a chat, a list of messages, got {repr(prompt)[:_SHOWN]}. Example of a chat: "
            '[{"role": "user", "content": "..."}].'
        )
    check_chats(tokenizer)
    encoding = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    return list(encoding["input_ids"])


def encoded(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, device: torch.device, longest: int | None = None
) -> dict[str, torch.Tensor]:
    """Returns the inputs of ``generate``, tensors ``[1, s]``; a text, not a chat, is cut after ``longest`` tokens."""
    tokens = token_ids(tokenizer, prompt)
    ids = torch.tensor([tokens[:longest] if isinstance(prompt, str) else tokens], device=device)
    if not ids.numel():
        raise SettingError("the prompt is empty. Give at least one token to continue from.")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
