"""Keys, values and states that a call takes over from an earlier one and leaves to the next.

Keys and values are moved, one tensor at a time, so that they are there once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import only_warned, warn_once
from .cache import SpeculativeCache, window_of
from .prompt import Prompt
from .recurrences.states import StateLayer
from .target import Target

# Layers that hold nothing but keys and values; those of others are copied.
_MOVED = DynamicLayer, DynamicSlidingWindowLayer


def take_in(cache: SpeculativeCache, other: Cache, columns: torch.Tensor | None, slots: list[int]) -> None:
    """Moves what an earlier ``generate`` returned, until an error puts it back: its ``columns`` ``[b, m]`` (``None``:
    all) go to slots ``0..m-1``, of which each row has ``slots``. The cursors do not change."""
    length = other.get_seq_length()
    cache.round_up()
    for state, before in zip(cache.layers, other.layers, strict=False):
        if isinstance(state, StateLayer):
            state.take_states(before, slots)
    if cache.window is not None:
        held = [source.keys.shape[2] for source in other.layers if window_of(source) and source.is_initialized]
        cache.window.begin(slots, min(held, default=length), cache.capacity)
    cache.put_back = partial(_put_back, cache, other, columns, length, cache.window and cache.window.bases)
    for index, source in enumerate(other.layers):
        if getattr(source, "keys", None) is None:
            continue
        layer, kept = cache.layer(index), {"keys": source.keys, "values": source.values}
        if getattr(source, "indexer_keys", None) is not None:
            kept["indexer"] = source.indexer_keys[:, None]
        if getattr(source, "indexer_position_ids", None) is not None:
            kept["positions"] = source.indexer_position_ids.transpose(0, 1)[..., None]
        like = [states[:, :, :0].clone() for states in kept.values()]  # views would hold all
        for name in list(kept):
            states = kept.pop(name)
            bank = layer.bank(name, states)
            dropped, places = length - states.shape[2], columns
            if bank.bases is not None:  # those in the window, of which some may have been dropped, too: none sees them
                first = bank.bases.on(states.device)
                places = first + torch.arange(max(slots) - max(bank.bases), device=states.device)
                if columns is not None:
                    places = columns.to(states.device).gather(1, places.clamp(min=0))
                places = (places - dropped).clamp(0, states.shape[2] - 1).expand(len(states), -1)
            whole = states if places is None else _picked(states, places.to(states.device))
            layer.buffer(name)[:, :, : whole.shape[2]] = whole
            bank.filled = max(bank.filled, whole.shape[2])
            if type(source) in _MOVED:
                setattr(source, name, None)
        layer.lazy_initialization(*like[:2])
        source.is_initialized = type(source) not in _MOVED


def run_out(target: Target, tokens: torch.Tensor, roots: Sequence[int], lengths: Sequence[int], pad_token: int) -> None:
    """Runs what rows that end before others, by their ``lengths``, lack in a cache: their last tokens ``[b, 1]``, and
    padding where states hold it, since plain ``generate`` goes on with such rows."""
    if target.anatomy.is_recurrent:
        tokens = pad(tokens, (0, max(lengths) - min(lengths)), value=pad_token)
    target.step(tokens, roots, target.verification(keep=1, spreads=False))


def hand_back(cache: SpeculativeCache, other: Cache, prompt: Prompt, columns: int, generated: list[int]) -> None:
    """Fills a dynamic or static cache as ``generate`` without us would have left it, after ``generated`` tokens of
    each row behind ``columns`` columns of ids: padding that was not run is zero."""
    new = max(generated)
    length = prompt.width + new - 1
    places = prompt.slots(length, [new] * len(generated) if cache.has_states else generated)
    slots = [base + columns + new - 1 for base in prompt.base]
    cache.put_back = None
    empty(other)
    if other.layer_class_to_replicate is not None:  # one that was made without a config
        other.layers += [other.layer_class_to_replicate() for _ in cache.layers[len(other.layers) :]]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StateLayer):
            layer.hand_states(other.layers[index], slots)
    _fill(cache, other, places, length)


def _put_back(cache: SpeculativeCache, other: Cache, columns: torch.Tensor | None, length: int, bases: Any) -> None:
    """Undoes :func:`take_in`, unless windows, which began at ``bases``, have moved on."""
    moved = [layer for layer, source in zip(cache.layers, other.layers, strict=False) if type(source) in _MOVED]
    if any(bank.bases not in (None, bases) for layer in moved for bank in layer.banks.values()):
        empty(other)
        warn_once("the cache that was given is empty now, since an error came after its windows had moved on.")
    else:
        with only_warned("putting back a cache, which is empty now,", partial(empty, other)):
            _fill(cache, other, columns if columns is None else columns.argsort(1), length, only_moved=True)


def _fill(
    cache: SpeculativeCache, other: Cache, places: torch.Tensor | None, length: int, only_moved: bool = False
) -> None:
    """Moves what is in slots ``places`` ``[b, length]`` (-1: zeros; ``None``: the first ones) to an empty cache, or to
    where it was moved from."""
    for layer, target in zip(cache.layers, other.layers, strict=False):
        is_moved, kept = type(target) in _MOVED, dict[str, torch.Tensor]()
        if is_moved and layer.is_initialized and not target.is_initialized:
            target.lazy_initialization(*layer.buffers())
            target.keys = target.values = None
        for name in list(layer.banks):
            if only_moved and not (is_moved and getattr(target, name) is None):
                continue
            buffer, bases, wanted, window = layer.buffer(name), layer.banks[name].bases, places, window_of(target)
            if wanted is None:
                wanted = torch.arange(length, device=buffer.device)[None]
            at = wanted = wanted.to(buffer.device).expand(len(buffer), -1)
            if bases is not None and cache.window is not None:
                wanted = wanted[:, 1 - window if window else -cache.window.size :]
                at = wanted - bases.on(buffer.device)
            if places is None and bases is None:
                kept[name] = buffer[:, :, :length].clone()
            else:
                picked = _picked(buffer, at.clamp(0, buffer.shape[2] - 1))
                kept[name] = picked.masked_fill((wanted < 0)[:, None, :, None], 0).contiguous()
            if target.is_sliding and window is None:  # a static one counts what it gets
                kept[name] = pad(kept[name], (0, 0, length - wanted.shape[1], 0))
            if is_moved:
                setattr(target, name, kept.pop(name))
            del buffer
            cache.release(layer, name)
        if kept:
            target.update(kept["keys"], kept["values"])
        if "indexer" in kept:
            target.update_indexer(kept["indexer"][:, 0])
        if "positions" in kept:
            target.indexer_position_ids = kept["positions"][..., 0].transpose(0, 1)
        if window_of(target) is not None:
            target.cumulative_length = length


def empty(cache: Cache) -> None:
    """Empties a dynamic or static cache."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            # Older versions' `reset` leaves zeros, to which `update` would append.
            layer.keys = layer.values = None
            layer.is_initialized = False
    cache.reset()


def _picked(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys or values ``[b, k, n, h]`` in slots ``[b, n]``."""
    return states[torch.arange(len(states), device=states.device)[:, None], :, slots].transpose(1, 2)
