"""A text of which a target holds all but the last token, for tests that look at passes beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from hf_selfspec.batch import Text
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.target import Target


def after_prefill(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    """Rows of these lengths, all tokens of which but the last are in the cache; prepare the target to use it."""
    width = max(lengths)
    ids = torch.randint(3, 90, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    return prefilled(model, ids, lengths)


def prefilled(model: PreTrainedModel, ids: torch.Tensor, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    anatomy, width = Anatomy.of(model), max(lengths)
    text = Text.of(ids, [0] * len(lengths), 20)
    text.lengths = list(lengths)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, len(lengths), width + 20))
    with target.prepared():
        target.prefill(ids[:, :-1], [0] * len(lengths), [length - 1 for length in lengths])
    target.roots = text.last_slots()
    return target, text


def keys_and_values(target: Target, text: Text) -> list[torch.Tensor]:
    """Copies of what the cache holds of the text."""
    return [
        buffer[row, :, :root].clone()
        for layer in target.cache.layers
        for buffer in (layer.keys, layer.values)
        for row, root in enumerate(text.last_slots())
    ]


def by_hand(model: LlamaForCausalLM, ids: torch.Tensor, layers: Sequence[int], most: int) -> list[list[int]]:
    """The dynamic programme with the layers called one by one, for the last of ``ids`` ``[1, s]``."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    position = torch.tensor([[ids.shape[1] - 1]])
    start = model.model.embed_tokens(ids[:, -1:])
    rotary = model.model.rotary_emb(start, position)

    def run(layer: int, state: torch.Tensor) -> torch.Tensor:
        return model.model.layers[layer](
            state, position_embeddings=rotary, position_ids=position, past_key_values=copy.deepcopy(cache)
        )

    states: dict[int, tuple[torch.Tensor, list[int]]] = {0: (start, [])}
    for layer in range(model.config.num_hidden_layers):
        found = {count: (run(layer, state), skipped) for count, (state, skipped) in states.items()}
        if layer in layers:
            whole = found[0][0]
            for count, (state, skipped) in states.items():
                ways = [(state, [*skipped, layer]), *([found[count + 1]] if count + 1 in states else [])]
                if count < most:
                    near = max(ways, key=lambda way: torch.cosine_similarity(way[0], whole, dim=-1).item())
                    found[count + 1] = near
        states = found
    return [states[count][1] for count in range(1, most + 1)]
