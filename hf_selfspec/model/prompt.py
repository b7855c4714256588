"""The prompts that ``generate`` passes on, laid out so that every row starts at slot 0, and its caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..errors import SettingError, UnsupportedOptionError, unsupported
from .anatomy import Anatomy
from .module_tools import forward_parameters

# In newer versions' caches, layers that read another layer's keys and values have an empty entry.
_ROLLS_BACK = (
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    getattr(cache_utils, "DummyLayer", DynamicLayer),
)


@dataclass
class Prompt:
    """The prompts of a batch, aligned left."""

    tokens: torch.Tensor  # [b, s] ids or [b, s, d] embeddings that have not been through the model, junk on the right
    cursors: list[int]  # for each row the slot of its first token (the number of its tokens in an earlier cache)
    lengths: list[int]  # for each row how many of tokens are real
    base: list[int]  # for each row the slot of column 0 of input_ids
    width: int  # number of columns of the prompt in the attention mask, including an earlier cache
    valid: torch.Tensor | None  # [b, width] which columns hold tokens, None for all
    has_positions: bool = False  # whether position_ids of several dimensions differ from 0, 1, 2, ... in any
    has_gaps: bool = False  # whether columns are masked after a row's first token, which nothing here is laid out for

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,  # [b, s], the whole text or what follows the cache
        arguments: Mapping[str, Any],  # what `generate` has prepared for the model's forward
        past_tokens: int,  # number of tokens in the cache
        mask_length: int | None,  # m where `generate` dropped a mask of ones
    ) -> Prompt:
        """Lays out a prompt of ids, or embeddings ``[b, s, d]``, with a mask ``[b, m]`` over the whole text and
        positions ``[b or 1, m]``, or ``[n, b or 1, m]`` for a rotary embedding of several dimensions."""
        b, columns = input_ids.shape
        names = ("inputs_embeds", "attention_mask", "position_ids")
        inputs_embeds, attention_mask, position_ids = (arguments.get(name) for name in names)
        source = input_ids if inputs_embeds is None else inputs_embeds
        if attention_mask is not None and bool(attention_mask.all()):
            mask_length, attention_mask = attention_mask.shape[1], None
        if attention_mask is not None:
            width = attention_mask.shape[1]
        elif mask_length is not None:
            width = mask_length
        elif position_ids is not None:
            width = position_ids.shape[-1]
        else:
            width = source.shape[1] if source.shape[1] > past_tokens else past_tokens + source.shape[1]
        fresh = width - past_tokens
        if fresh < 1 or source.shape[1] < fresh:
            raise SettingError(
                f"the prompt is empty: {source.shape[1]} columns of input for a text of {width} tokens, of which "
                f"{past_tokens} are in the cache. Pass the whole text with at least one token that is not in the "
                "cache, or the new tokens with an `attention_mask` over the whole text."
            )
        tokens = source[:, -fresh:]
        valid = None if attention_mask is None else attention_mask.bool()
        has_gaps = valid is not None and bool((valid[:, :-1] & ~valid[:, 1:]).any())
        has_positions = not has_gaps and _are_unusual(position_ids, valid, width)
        if valid is None or has_gaps:
            as_it_is = [past_tokens] * b, [fresh] * b, [width - columns] * b
            return cls(tokens, *as_it_is, width, None, has_positions, has_gaps)
        lengths = valid[:, past_tokens:].sum(1).tolist()
        if 0 in lengths:
            raise SettingError(
                f"the prompt of row {lengths.index(0)} is empty: its attention mask has no ones among the {fresh} new "
                "columns. Pass at least one token to continue from, e.g. the tokenizer's bos token."
            )
        total = valid.sum(1).tolist()
        order = _front(valid[:, past_tokens:])[:, : max(lengths)]
        rows = torch.arange(b, device=order.device)[:, None]
        return cls(
            tokens=tokens[rows, order],
            cursors=[whole - new for whole, new in zip(total, lengths, strict=True)],
            lengths=lengths,
            base=[whole - columns for whole in total],
            width=width,
            valid=valid,
            has_positions=has_positions,
        )

    def past_columns(self, past_tokens: int) -> torch.Tensor | None:
        """The columns ``[b, past_tokens]`` of an earlier cache in the order of slots, ``None`` if they are in order."""
        return None if self.valid is None else _front(self.valid[:, :past_tokens])

    def ends(self) -> list[int]:
        """The slot after each row's prompt."""
        return [cursor + length for cursor, length in zip(self.cursors, self.lengths, strict=True)]

    def aligned(self, values: torch.Tensor) -> torch.Tensor:
        """Aligns ``[*n, b, s, d]`` for the columns that ``generate`` feeds like ``tokens``: padding after each row."""
        if self.valid is None:
            return values
        order = _front(self.valid[:, -values.shape[-2] :])[:, : max(self.lengths)]
        return values.take_along_dim(order[..., None].to(values.device), dim=-2)

    def slots(self, total: int, generated: list[int]) -> torch.Tensor | None:
        """The slot of each column of the padded text ``[b, total]``, -1 where there is none, ``None`` if in order."""
        if self.valid is None:
            return None
        ranks = self.valid.long().cumsum(1) - 1
        prompt = torch.where(self.valid, ranks, -1)
        ends = self.valid.sum(1, keepdim=True)
        after = torch.arange(total - self.width, device=prompt.device)[None]
        counts = torch.tensor(generated, device=prompt.device)[:, None]
        return torch.cat([prompt, torch.where(after < counts, ends + after, -1)], dim=1)


def _front(valid: torch.Tensor) -> torch.Tensor:
    """Column indices ``[b, n]`` with the valid ones first, otherwise in order."""
    return (~valid).int().argsort(dim=1, stable=True)


def _are_unusual(position_ids: torch.Tensor | None, valid: torch.Tensor | None, width: int) -> bool:
    """Whether positions of several dimensions differ from 0, 1, 2, ... over each row's tokens."""
    if position_ids is None:
        return False
    columns, device = position_ids.shape[-1], position_ids.device
    expected = torch.arange(width, device=device)[None] if valid is None else valid.long().cumsum(1) - 1
    differing = position_ids != expected[:, -columns:]
    differ = bool((differing if valid is None else differing & valid[:, -columns:]).any())
    if differ and position_ids.dim() == 2:
        raise UnsupportedOptionError(
            "`position_ids` other than 0, 1, 2, ... over each row's tokens are not supported. Leave them out."
        )
    return differ


# The name of caches in transformers' outputs (since 5.24, and before), and all that models have for their argument.
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
CACHE_NAMES = (CACHE_NAME, "past_key_values", "cache_params")


def cache_name(model: nn.Module) -> str:
    """Returns the name of the cache argument of a model's forward."""
    return next(filter(forward_parameters(model).__contains__, CACHE_NAMES), CACHE_NAME)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among a model's arguments."""
    return next((cache for name in CACHE_NAMES if (cache := arguments.get(name)) is not None), None)


def tokens_in(cache: Cache) -> int:
    """Returns how many tokens the rows of a cache have, padding included."""
    if not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return int(cache.get_seq_length())
    if any(any(getattr(layer, "has_previous_state", {}).values()) for layer in cache.layers):
        raise UnsupportedOptionError(
            "a cache of recurrent states alone does not know how many tokens it holds, so a text cannot continue from "
            "it with self-speculative decoding. Leave the cache out and pass the whole text."
        )
    return 0


def check_cache(cache: Any, anatomy: Anatomy) -> None:
    """Checks that the tokens of ``cache`` can be rolled back."""
    if cache is None:
        raise unsupported(f"{anatomy.model_name} makes a cache of its own, whose tokens cannot be rolled back")
    if type(cache) is not DynamicCache or cache.offloading:  # subclasses may keep more, which models ask them for
        offloaded = "offloaded " if getattr(cache, "offloading", False) else ""
        raise UnsupportedOptionError(
            f"a KV cache of type {offloaded}{type(cache).__name__} cannot be used with self-speculative decoding. "
            f"Leave out `{CACHE_NAME}` and `cache_implementation`, or pass a DynamicCache."
        )
    for part in (cache, *cache.layers):
        if replaced := [name for name in vars(part) if callable(getattr(type(part), name, None))]:
            raise UnsupportedOptionError(
                f"the KV cache that was given has methods of others ({', '.join(replaced)}), which drafts would go "
                f"past. Leave out `{CACHE_NAME}`, or pass a DynamicCache as it is."
            )
    for layer in cache.layers:
        rolls_back = anatomy.is_recurrent and isinstance(layer, LinearAttentionCacheLayerMixin)
        if type(layer) not in _ROLLS_BACK and not rolls_back:
            kind = type(layer).__name__
            raise unsupported(f"{anatomy.model_name} keeps a {kind} in its cache, whose state cannot be rolled back")
