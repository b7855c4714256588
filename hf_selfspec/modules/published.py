"""Heads as others publish them: each format is a row of ``FORMATS``, a mapping of its names to those of our modules.

What each has is a table in the guide (examples/GUIDE.md, "Formats of heads").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from ..errors import SettingError
from .assistant import AssistantHead
from .block import DEFAULTS, BlockHead
from .draft_module import (
    WEIGHTS,
    Config,
    DraftModule,
    check_served,
    file_of,
    not_finite,
    read_config,
    read_tensors,
    reading,
    register_format,
)
from .mtp import MtpHead, config_of_layer

# How configs of EAGLE-3 heads name the layers that are read, and those of P-EAGLE the token of masked places.
_LAYERS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
# How many tokens heads of P-EAGLE are trained to draft where the config does not say (the default of speculators).
_DEPTHS = 8
# What differs from DFlash in the defaults of speculators' kinds of block heads.
_KINDS: dict[str, Config] = {
    "dflash": {},
    "dflash2": {
        "sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
        "selector_top_k": 16,
    },
    "dspark": {"sample_from_anchor": True, "markov_rank": 256, "enable_confidence_head": True},
}  # fmt: skip
# Settings in z-lab's ``dflash_config``, those that are ours by their names here, and all that are read.
_OURS = {name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")} | {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "logit_cap",
}
_ZLAB = {*_OURS, "mask_token_id", "target_layer_ids", "block_size", "causal", "is_causal"}


@dataclass(frozen=True)
class Published:
    """A format of others: what tells it, the settings of our module by a head's name and config, which raise for what
    is not served, what beginnings of weights' names become, and those of weights that drafts do not need."""

    is_format: Callable[[Config], bool]
    settings: Callable[[str, Config], Any]
    module_class: type[DraftModule]
    names: dict[str, str]
    dropped: tuple[str, ...] = ()

    def make(self, name: str, config: Config, tensors: dict[str, torch.Tensor] | None = None) -> DraftModule:
        """Returns the head without weights, for which no memory is allocated; raises if it is not served."""
        settings = self.settings(name, config)
        if tensors is not None and self.module_class is MtpHead:
            _complete(settings, tensors)
        with torch.device("meta"):
            return self.module_class(**settings)

    def load(self, checkpoint: str | os.PathLike[str], state_layers: Sequence[int] = (), **options: Any) -> DraftModule:
        """Loads a head; raises if it is damaged or not served."""
        name, kind = os.fspath(checkpoint), self.module_class.kind
        config = read_config(kind, name, **options)
        with reading(kind, name):
            config |= {"state_layers": list(state_layers)} if state_layers else {}
            self.settings(name, config)  # refuses what is not served, whatever its weights are
            tensors = self._tensors(name, **options)
            head = self.make(name, config, tensors)
            if isinstance(head, BlockHead):
                if head.d2t is not None:
                    tokens_of(tensors.get("d2t"), len(head.d2t), head.vocabulary)
                else:  # the output head is the model's own
                    tensors = {key: value for key, value in tensors.items() if not key.startswith(("lm_head.", "d2t"))}
            head.load_state_dict(tensors, assign=True)
        return head.eval().requires_grad_(False)

    def _tensors(self, name: str, **options: Any) -> dict[str, torch.Tensor]:
        """The weights by our names, floating-point ones in the type of ``fc``'s."""
        kind = self.module_class.kind
        try:
            tensors = read_tensors(file_of(kind, name, WEIGHTS, **options))
        except SettingError:
            file = file_of(kind, name, "pytorch_model.bin", **options)
            tensors = dict(torch.load(file, map_location="cpu", weights_only=True))
        tensors = {key: value for key, value in tensors.items() if not key.startswith(self.dropped or "\0")}
        if key := not_finite(tensors):
            raise ValueError(f"{key} is not finite")
        fuse = next((key for key in tensors if key.endswith("fc.weight")), "fc.weight")
        dtype, renamed = tensors[fuse].dtype, dict[str, torch.Tensor]()
        for key, value in tensors.items():
            key = key.removeprefix("model.")  # of NeMo
            begin = next((begin for begin in self.names if key.startswith(begin)), "")
            ours = self.names.get(begin, "") + key[len(begin) :]
            renamed[ours] = value.to(dtype) if value.is_floating_point() else value
        return renamed


def _is_eagle3(config: Config) -> bool:
    """Heads of the paper's authors are called Llamas, and have a vocabulary of their own."""
    called = str(config.get("speculators_model_type", config.get("architectures"))).lower()
    is_named = any(kind in called for kind in ("eagle3", "peagle"))
    return is_named or (
        "draft_vocab_size" in config and not config.keys() & {"speculators_model_type", "dflash_config"}
    )


def _eagle3(name: str, config: Config) -> Config:
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config", config)
    of_layer = AutoConfig.for_model(**{"model_type": "qwen3"} | layer)
    places = (config, config.get("eagle_config") or {})
    named: list[int] = next((place[key] for place in places for key in _LAYERS if place.get(key)), [])
    state_layers = config.get("state_layers", named)
    is_parallel = kind == "peagle" or any(config.get(key) is not None for key in _MASKS[1:])
    is_parallel = is_parallel or bool(config.get("parallel_drafting"))
    mask_token = next((int(config[key]) for key in _MASKS if config.get(key) is not None), None)
    norms = [bool(config.get("norm_before_fc")), bool(config.get("fc_norm"))]
    partial = (layer | (getattr(of_layer, "rope_parameters", None) or {})).get("partial_rotary_factor")
    refused = {
        f"layers of {of_layer.model_type}": of_layer.model_type not in ("llama", "qwen3"),
        "sliding attention": "sliding_attention" in (getattr(of_layer, "layer_types", None) or ()),
        f"partial_rotary_factor {partial}": partial not in (None, 1.0),
        "target_hidden_size": config.get("target_hidden_size") not in (None, layer["hidden_size"]),
        f"layers {named} without MTP.from_eagle3(..., state_layers=[...]), as engines count them in two ways: give "
        "those whose entering states it reads, these numbers or each plus 1": bool(named)
        and layer is config
        and "state_layers" not in config,
        "norm_before_fc and fc_norm together": all(norms),
        "parallel drafts without a mask token": is_parallel and mask_token is None,
    }
    check_served(name, refused)
    count = layer.get("num_hidden_layers", 1)
    eagle3: Config = {
        "vocabulary": layer["vocab_size"],
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_output": bool(config.get("norm_output")),
        "own_embedding": False,
    }
    if any(norms):
        eagle3["norms_before_fuse"] = 1 if norms[0] else len(state_layers) or 3
    if is_parallel:
        (method, *_) = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        eagle3 |= {"mask_token": mask_token, "num_tokens": method.get("speculative_tokens", _DEPTHS)}
    return {
        "configs": [config_of_layer(of_layer, 0, count)],
        "about": _about(name, config),
        "size": config.get("draft_vocab_size") or layer["vocab_size"],
        "state_layers": state_layers,
        "eagle3": eagle3,
    }


def _complete(settings: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Completes the settings of an EAGLE-3 head by its weights, and these by the tokens that it can draft."""
    eagle3, size = settings["eagle3"], len(tensors["output.1.weight"])
    settings["size"] = size
    tensors["tokens"] = tokens_of(tensors.pop("d2t", None), size, eagle3["vocabulary"])
    eagle3["own_embedding"] = "embedding.weight" in tensors
    if "mask_state" in tensors:
        tensors["mask_state"] = tensors["mask_state"].flatten()
    if eagle3["norm_output"]:
        tensors["layers.0.decoder.norm.weight"] = tensors.pop("output.0.weight")


def tokens_of(offsets: torch.Tensor | None, size: int, vocabulary: int) -> torch.Tensor:
    """The tokens ``[size]`` that a head can draft, from how far each is from its number."""
    if offsets is None and size < vocabulary:
        raise ValueError("there is no d2t for its reduced vocabulary")
    tokens = torch.arange(size, device="cpu") + (0 if offsets is None else offsets)
    if len(tokens.unique()) < size or not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError("d2t names no distinct tokens of the vocabulary")
    return tokens


def _of_speculators(name: str, config: Config) -> Config:
    check_served(name, {str(kind := config["speculators_model_type"]): kind not in _KINDS})
    settings = {key: config.get(key, value) for key, value in (DEFAULTS | _KINDS[kind]).items()}
    return settings | {"about": _about(name, config)}


def _of_zlab(name: str, config: Config) -> Config:
    own = config["dflash_config"]
    both = config | own
    layer = {key: value for key, value in config.items() if key not in ("dflash_config", "architectures", "auto_map")}
    kinds, window = AutoConfig.for_model(**layer).layer_types, AutoConfig.for_model(**layer).sliding_window
    is_causal = both.get("is_causal", both.get("causal"))
    refused = {
        **{f"{key} {value!r}": bool(value) and key not in _ZLAB for key, value in own.items()},
        "quantised weights": "quantization_config" in config,
        "causal blocks in full attention": bool(is_causal) and "full_attention" in kinds,
        "windows without a size": "sliding_attention" in kinds and window is None,
    }
    check_served(name, refused)
    # A slot sees what is less than a window away, where transformers' sees what is a window away, too.
    layer |= {} if window is None else {"sliding_window": window - 1}
    given = {ours: both[theirs] for theirs, ours in _OURS.items() if theirs in both}
    return _counted(name, config, layer, both) | given | {"sliding_window_non_causal": is_causal is False}


def _of_transformers(name: str, config: Config) -> Config:
    # Its decoder layers have Qwen 3's form; its vocabulary is the model's.
    layer = AutoConfig.for_model(**config).to_dict() | {"model_type": "qwen3", "use_sliding_window": True}
    return _counted(name, config, layer | {"vocab_size": 0}, layer) | {"sliding_window_non_causal": True}


def _counted(name: str, config: Config, layer: Config, given: Config) -> Config:
    """The settings of a head whose format counts layers from 0 behind the first, and windows from each slot."""
    return DEFAULTS | {
        "transformer_layer_config": layer,
        "draft_vocab_size": layer["vocab_size"],
        "block_size": given.get("block_size", 16),
        "mask_token_id": given["mask_token_id"],
        "aux_hidden_state_layer_ids": [number + 1 for number in given["target_layer_ids"]],
        "window_of": "slot",
        "about": _about(name, config),
    }


def _about(name: str, config: Config) -> Config:
    return {"recipe": {"made for": verifier_of(config), "published as": name}}


def verifier_of(config: Config) -> str | None:
    """The model for which a head of speculators was made."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


_LAYER = "layers.0.decoder.layers."
# The first that fits counts.
FORMATS = (
    EAGLE3 := Published(
        _is_eagle3,
        _eagle3,
        MtpHead,
        {
            "midlayer.": f"{_LAYER}0.", "layers.": _LAYER, "norm.": "output.0.", "lm_head.": "output.1.",
            "embed_tokens.": "embedding.", "fc.": "fuse.", "input_norm.": "fuse_norm.0.", "fc_norm.": "fuse_norm.",
            "mask_hidden": "mask_state",
        },
        ("t2d", "verifier_"),
    ),
    Published(
        lambda config: config.get("speculators_model_type") not in (None, "mtp"),  # others are refused by name
        _of_speculators,
        BlockHead,
        {},
        ("t2d", "verifier_", "embed_tokens."),
    ),
    Published(lambda config: "dflash_config" in config, _of_zlab, BlockHead, {}),
    Published(
        lambda config: config.get("model_type") == "muse_glimmer_assistant",
        _of_transformers,
        BlockHead,
        {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
    ),
)  # fmt: skip
for _format in FORMATS:
    register_format(_format.is_format, _format.load, _format.make, is_last=True)
_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
register_format(
    lambda config: config.get("model_type") in _TYPES, AssistantHead.from_pretrained, AssistantHead._made, is_last=True
)
