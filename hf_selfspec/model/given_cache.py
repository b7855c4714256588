"""The caches that ``generate`` passes on, and the one that replaces them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ..errors import UnsupportedModelError, UnsupportedOptionError
from .cache import SpeculativeCache
from .modules import forward_parameters
from .recurrences import SERVED

# In newer versions' caches, layers that read another layer's keys and values have an empty entry.
_ROLLS_BACK = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))


def cache_for(model: PreTrainedModel, batch_size: int, capacity: int, like: Cache | None = None) -> SpeculativeCache:
    """Returns the cache that a model needs; ``like`` is its own, ``None`` for a new one."""
    like = DynamicCache(config=model.config.get_text_config(decoder=True)) if like is None else like
    cache = SpeculativeCache(len(like.layers), batch_size, capacity)
    if model.config.model_type in SERVED:
        cache.hold_states(like, SERVED[model.config.model_type], type(model).__name__)
    return cache


def cache_name(model: PreTrainedModel) -> str:
    """Returns the name of the cache argument of a model's forward."""
    return "cache_params" if "cache_params" in forward_parameters(model) else "past_key_values"


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among a model's arguments; models without attention use another name for it."""
    given = arguments.get("past_key_values")
    return arguments.get("cache_params") if given is None else given


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


def check_cache(cache: Any, model: PreTrainedModel) -> None:
    """Checks that the tokens of ``cache`` can be rolled back."""
    if cache is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} makes a cache of its own, whose tokens cannot be rolled back when a draft is "
            "rejected. Call generate without `assistant`."
        )
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = f"offloaded {type(cache).__name__}" if getattr(cache, "offloading", False) else type(cache).__name__
        raise UnsupportedOptionError(
            f"a KV cache of type {kind} cannot be used with self-speculative decoding. Leave out `past_key_values` and "
            "`cache_implementation`, or pass a DynamicCache."
        )
    # Recurrent states can be rolled back for the models for which this is proven.
    recurrent = LinearAttentionCacheLayerMixin if model.config.model_type in SERVED else ()
    for layer in cache.layers:
        if type(layer) not in _ROLLS_BACK and not isinstance(layer, recurrent):
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps a {type(layer).__name__} in its cache, whose state cannot be rolled "
                "back when a draft is rejected. Call generate without `assistant`."
            )
