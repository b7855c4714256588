"""EAGLE-3 heads (arXiv 2503.01840) as others publish them: in the original format, and in that of speculators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig

from ..errors import SettingError, SettingTypeError
from .draft_module import (
    WEIGHTS,
    file_of,
    published_weights,
    read_config,
    read_tensors,
    reading,
    register_format,
)
from .mtp import MtpHead, config_of_layer

_KIND, _OLD_WEIGHTS = "EAGLE-3 head", "pytorch_model.bin"
# How configurations name the layers that are read.
_LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
# Parts of checkpoints that drafts do not need: `t2d` says the same as `d2t`, and the others are the model's own.
_UNUSED = ("t2d", "verifier_")


def load_eagle3(checkpoint: str | os.PathLike[str], state_layers: Sequence[int] = ()) -> MtpHead:
    """Loads a head; see :meth:`hf_selfspec.MTP.from_eagle3`."""
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise SettingTypeError(f"MTP.from_eagle3 takes a folder or a name on the Hub, got {checkpoint!r}.")
    name = os.fspath(checkpoint)
    config = read_config(_KIND, name)
    with reading(_KIND, name):
        return _head(name, config, _tensors(name), state_layers)


def is_eagle3(config: dict[str, Any]) -> bool:
    """Whether a configuration is that of an EAGLE-3 head, in any of the formats."""
    named = [str(config.get("speculators_model_type")), *map(str, config.get("architectures") or ())]
    return any("eagle3" in name.lower() for name in named)


register_format(is_eagle3, load_eagle3)


def _tensors(name: str) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(file_of(_KIND, name, WEIGHTS))
    except SettingError:
        return dict(torch.load(file_of(_KIND, name, _OLD_WEIGHTS), map_location="cpu", weights_only=True))


def _head(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], state_layers: Sequence[int]) -> MtpHead:
    is_original = "speculators_model_type" not in config
    layer = config if is_original else config["transformer_layer_config"]
    places = (config, config.get("eagle_config") or {})
    layers_of_config = next((place[key] for place in places for key in _LAYERS if place.get(key)), ())
    refused = {
        f"{config.get('speculators_model_type')}": config.get("speculators_model_type", "eagle3") != "eagle3",
        f"layers of {layer.get('model_type')}": layer.get("model_type") not in ("llama", "qwen3"),
        f"{layer.get('num_hidden_layers')} layers": layer.get("num_hidden_layers", 1) != 1,
        "sliding attention": "sliding_attention" in (layer.get("layer_types") or ()),
        "target_hidden_size": config.get("target_hidden_size") not in (None, layer["hidden_size"]),
        **{setting: bool(config.get(setting)) for setting in ("fc_norm", "norm_before_fc", "parallel_drafting")},
    }
    if variants := [variant for variant, is_there in refused.items() if is_there]:
        raise SettingError(f"MTP.from_eagle3: {name} is a variant that is not served: {', '.join(variants)}.")
    if layers_of_config and is_original and not state_layers:
        raise SettingError(
            f"MTP.from_eagle3: {name} reads the layers {layers_of_config}, which engines count in two ways. Give those "
            "whose entering states it reads, MTP.from_eagle3(..., state_layers=[...]): these numbers, or each plus 1."
        )
    vocabulary, size = layer["vocab_size"], len(tensors["lm_head.weight"])
    tokens = tokens_of(tensors.pop("d2t", None), size, vocabulary)
    settings = {
        "vocabulary": vocabulary,
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_output": bool(config.get("norm_output")),
        "own_embedding": "embed_tokens.weight" in tensors,
    }
    of_layer = config_of_layer(AutoConfig.for_model(**layer), 0)
    about = {"recipe": {"published as": name}}
    head = MtpHead([of_layer], about, size, state_layers or layers_of_config, settings)
    begins = {
        "midlayer.": "layers.0.decoder.layers.0.",
        "layers.0.": "layers.0.decoder.layers.0.",
        "norm.": "layers.0.decoder.norm." if settings["norm_output"] else "output.0.",
        "lm_head.": "output.1.",
        "embed_tokens.": "embedding.",
        "fc.": "fuse.",
    }
    state = {"tokens": tokens}
    for key, value in published_weights(tensors, _UNUSED).items():
        begin = next((begin for begin in begins if key.startswith(begin)), "")
        state[begins.get(begin, "") + key[len(begin) :]] = value
    head.load_state_dict(state, assign=True)
    return head.eval().requires_grad_(False)


def tokens_of(offsets: torch.Tensor | None, size: int, vocabulary: int) -> torch.Tensor:
    """The tokens ``[size]`` that a head can draft, from how far each is from its number."""
    if offsets is None and size < vocabulary:
        raise ValueError("there is no d2t for its reduced vocabulary")
    tokens = torch.arange(size, device="cpu") + (0 if offsets is None else offsets)
    if len(tokens.unique()) < size or not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError("d2t names no distinct tokens of the vocabulary")
    return tokens
