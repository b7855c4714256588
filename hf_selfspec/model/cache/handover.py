"""Keys, values and states that a call takes over from an earlier one and leaves to the next.

Keys and values are moved, one tensor at a time, so that they are there once.
"""

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..prompt import Prompt
from .speculative_cache import SpeculativeCache, window_of

# Layers that hold nothing but keys and values; those of others are copied.
_MOVED = DynamicLayer, DynamicSlidingWindowLayer


def take_in(cache: SpeculativeCache, past: Cache, columns: torch.Tensor | None, slots: list[int]) -> None:
    """Moves what an earlier ``generate`` returned: its ``columns`` ``[b, m]`` (``None``: all) go to slots ``0..m-1``,
    of which each row has ``slots``. The cursors do not change."""
    length = past.get_seq_length()
    cache.round_up()
    cache.timeline.restart(slots[0])
    for recurrent in cache.recurrent:
        recurrent.take_states(past.layers[recurrent.index])
    if cache.window is not None:
        cache.window.begin(slots, cache.capacity)
    cache.was_given = True
    for index, source in enumerate(past.layers):
        if getattr(source, "keys", None) is None:
            continue
        layer, states_of = cache.layer(index), {"keys": source.keys, "values": source.values}
        if getattr(source, "indexer_keys", None) is not None:
            states_of["indexer"] = source.indexer_keys[:, None]
        if getattr(source, "indexer_position_ids", None) is not None:
            states_of["positions"] = source.indexer_position_ids.transpose(0, 1)[..., None]
        for name in list(states_of):
            states = states_of.pop(name)
            buffers = layer.buffers_for(name, states)
            dropped, places = length - states.shape[2], columns
            if buffers.bases is not None:  # the slots in the window; what the source has dropped of them is not read
                first = buffers.bases.on(states.device)
                places = first + torch.arange(max(slots) - max(buffers.bases), device=states.device)
                if columns is not None:
                    places = columns.to(states.device).gather(1, places.clamp(min=0))
                places = (places - dropped).clamp(0, states.shape[2] - 1).expand(len(states), -1)
            whole = states if places is None else _picked(states, places.to(states.device))
            layer.buffer(name)[:, :, : whole.shape[2]] = whole
            buffers.zeroed_to = max(buffers.zeroed_to, whole.shape[2])
            if type(source) in _MOVED:
                setattr(source, name, None)
        layer.lazy_initialization(*layer.buffers())
        source.is_initialized = type(source) not in _MOVED


def hand_back(cache: SpeculativeCache, past: Cache, prompt: Prompt, columns: int, generated: list[int]) -> None:
    """Fills a dynamic or static cache as ``generate`` without us would have left it, after ``generated`` tokens of
    each row behind ``columns`` columns of ids: padding that was not run is zero."""
    length = prompt.width + max(generated) - 1
    places = prompt.slots(length, generated)
    cache.was_given = False
    empty(past)
    if past.layer_class_to_replicate is not None:  # one that was made without a config
        past.layers += [past.layer_class_to_replicate() for _ in cache.layers[len(past.layers) :]]
    for layer in cache.recurrent:
        layer.hand_states(past.layers[layer.index], prompt.base[0] + columns + generated[0] - 1)
    _fill(cache, past, places, length)


def _fill(cache: SpeculativeCache, past: Cache, places: torch.Tensor | None, length: int) -> None:
    """Moves what is in slots ``places`` ``[b, length]`` (-1: zeros; ``None``: the first ones) to an empty cache."""
    for layer, target in zip(cache.layers, past.layers, strict=False):
        is_moved, copies = type(target) in _MOVED, dict[str, torch.Tensor]()
        if is_moved and layer.is_initialized and not target.is_initialized:
            target.lazy_initialization(*layer.buffers())
            target.keys = target.values = None
        for name in list(layer.by_name):
            buffer, bases, window = layer.buffer(name), layer.by_name[name].bases, window_of(target)
            slots = torch.arange(length, device=buffer.device)[None] if places is None else places.to(buffer.device)
            slots = within_buffer = slots.expand(len(buffer), -1)
            if bases is not None and cache.window is not None:
                slots = slots[:, 1 - window if window else -cache.window.size :]
                within_buffer = slots - bases.on(buffer.device)
            if places is None and bases is None:
                states = buffer[:, :, :length].clone()
            else:
                states = _picked(buffer, within_buffer.clamp(0, buffer.shape[2] - 1))
                states = states.masked_fill((slots < 0)[:, None, :, None], 0).contiguous()
            if target.is_sliding and window is None:  # a static one counts what it gets
                states = pad(states, (0, 0, length - slots.shape[1], 0))
            if is_moved:
                setattr(target, name, states)
            else:
                copies[name] = states
            del buffer, states
            cache.release(layer, name)
        if copies:
            target.update(copies["keys"], copies["values"])
        if "indexer" in copies:
            target.update_indexer(copies["indexer"][:, 0])
        if "positions" in copies:
            target.indexer_position_ids = copies["positions"][..., 0].transpose(0, 1)
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
