"""Keys, values and states that a call takes over from an earlier one and leaves to the next."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from .cache import SpeculativeCache, window_of
from .prompt import Prompt
from .recurrences.states import StateLayer
from .target import Target


def take_in(cache: SpeculativeCache, other: Cache, columns: torch.Tensor | None, slots: list[int]) -> None:
    """Copies a cache that an earlier ``generate`` returned: its ``columns`` ``[b, m]`` (``None``: all) go to slots
    ``0..m-1``, of which each row has ``slots``. The cursors do not change."""
    length = other.get_seq_length()
    for state, before in zip(cache.layers, other.layers, strict=False):
        if isinstance(state, StateLayer):
            state.take_states(before, slots)
    if cache.window is not None:
        held = [source.keys.shape[2] for source in other.layers if window_of(source) and source.is_initialized]
        cache.window.begin(slots, min(held, default=length), cache.capacity)
    for index, source in enumerate(other.layers):
        if getattr(source, "keys", None) is None:
            continue
        layer = cache.layer(index)
        layer.lazy_initialization(source.keys, source.values)
        kept = {"keys": source.keys, "values": source.values}
        if getattr(source, "indexer_keys", None) is not None:
            kept["indexer"] = source.indexer_keys[:, None]
        if getattr(source, "indexer_position_ids", None) is not None:
            kept["positions"] = source.indexer_position_ids.transpose(0, 1)[..., None]
        for name, states in kept.items():
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
    empty(other)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StateLayer):
            layer.hand_states(other.layers[index], slots)
        if not layer.is_initialized:
            continue
        kept, target = {}, other.layers[index]
        for name, bank in layer.banks.items():
            buffer, wanted = layer.buffer(name), places
            if wanted is None and bank.bases is None:
                kept[name] = buffer[:, :, :length].clone()
                continue
            if wanted is None:
                wanted = torch.arange(length, device=buffer.device).expand(len(buffer), -1)
            at = wanted = wanted.to(buffer.device)
            if bank.bases is not None and cache.window is not None:
                wanted = wanted[:, -cache.window.size :]
                at = wanted - bank.bases.on(buffer.device)
            picked = _picked(buffer, at.clamp(0, buffer.shape[2] - 1))
            kept[name] = picked.masked_fill((wanted < 0)[:, None, :, None], 0).contiguous()
            if target.is_sliding and window_of(target) is None:  # a static one counts what it gets
                kept[name] = pad(kept[name], (0, 0, length - wanted.shape[1], 0))
        other.update(kept["keys"], kept["values"], layer_idx=index)
        if window_of(target) is not None:
            target.cumulative_length = length
        if "indexer" in kept:
            other.layers[index].update_indexer(kept["indexer"][:, 0])
        if "positions" in kept:
            other.layers[index].indexer_position_ids = kept["positions"][..., 0].transpose(0, 1)


def empty(cache: Cache) -> None:
    """Empties a dynamic or static cache."""
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            # Older versions' `reset` leaves zeros, to which `update` would append.
            layer.keys = layer.values = None
            layer.is_initialized = False


def _picked(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys or values ``[b, k, n, h]`` in slots ``[b, n]``."""
    return states[torch.arange(len(states), device=states.device)[:, None], :, slots].transpose(1, 2)
