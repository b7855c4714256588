"""Shows texts to free drafts before the first call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SettingTypeError, UnsupportedModelError
from ..model.patching import evaluating
from . import LookupRow
from .findings import LookupFindings
from .likeliest import likeliest, tops_of

# Tokens of a text whose logits are in memory at a time.
_CHUNK = 256


def token_rows(tokenizer: PreTrainedTokenizerBase, texts: Iterable[Any], as_prompts: bool) -> list[list[int]]:
    """Returns the ids of texts or chats.

    Args:
        tokenizer: the model's tokenizer.
        texts: strings, or chats as lists of messages.
        as_prompts: whether the model will answer them.

    Raises:
        SettingTypeError: ``texts`` are something else.
    """
    given = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, Mapping)) else []
    rows: list[list[int]] = []
    for text in given:
        if isinstance(text, str) and text:
            rows.append(tokenizer(text)["input_ids"])
        elif isinstance(text, list) and text and all(isinstance(message, Mapping) for message in text):
            rows.append(
                tokenizer.apply_chat_template(text, add_generation_prompt=as_prompts, return_dict=True)["input_ids"]
            )
    if not rows or len(rows) < len(given):
        raise SettingTypeError(
            "SelfSpec.observe(texts) must be a list of strings that are not empty or of chats (lists of messages), at "
            f"least one, got {repr(texts)[:100]}."
        )
    return rows


@torch.no_grad()
def observe(model: PreTrainedModel, findings: LookupFindings, rows: list[list[int]]) -> None:
    """Runs the model once over each text, and keeps the texts and the most likely tokens after each token.

    Raises:
        UnsupportedModelError: the model keeps no key-value cache between chunks of a text.
    """
    with evaluating(model):
        for ids in rows:
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            tops = []
            for start in range(0, len(ids), _CHUNK):
                chunk = torch.tensor([ids[start : start + _CHUNK]], device=model.device)
                output = model(input_ids=chunk, past_key_values=cache, use_cache=True)
                if cache.get_seq_length() < start + chunk.shape[1] and start + _CHUNK < len(ids):
                    raise UnsupportedModelError(
                        f"{type(model).__name__} keeps no key-value cache, so SelfSpec.observe cannot read a text of "
                        f"{len(ids)} tokens in chunks. Give texts of at most {_CHUNK} tokens."
                    )
                tops += tops_of(likeliest(output.logits.float()))[0]
            row = LookupRow(findings.known)
            with findings.lock:
                row.read(ids, tops)
            findings.end([row])
        findings.write()
