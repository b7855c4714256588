"""The parts of a Hugging Face causal language model, whatever its architecture.

A decoder is a list of layers; a layer has an attention block and an MLP block. Everything else in this package is
written against :class:`Anatomy` and never against a model class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer

from ..errors import SettingError, SettingTypeError, UnsupportedModelError, unsupported
from .cache.recurrent_states import RECURRENCES, Kernels
from .internals import is_stateful
from .module_tools import ModelView, forward_parameters

_ATTENTION_NAMES: Sequence[tuple[str, ...]] = (
    ("self_attn",), ("attn",), ("attention",), ("self_attention",), ("linear_attn",), ("mamba",), ("conv",), ("mixer",),
)  # fmt: skip
_MLP_NAMES: Sequence[tuple[str, ...]] = (
    ("mlp",), ("feed_forward",), ("ffn",), ("block_sparse_moe",), ("moe",), ("fc1", "fc2"), ("intermediate", "output"),
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """Where a model type keeps its blocks, for types that do not use the usual names.

    Args:
        layers: path from the causal LM to the ``ModuleList`` of decoder layers, or ``None`` to search for it.
        attention: path from a layer to its attention block, or ``None`` to search by the usual names.
        mlp: paths from a layer to the modules that make up its MLP in the order in which they run (one for most
            models, ``("fc1", "fc2")`` for OPT), or ``None`` to search.
        tree: whether the model can take a mask in which several tokens share a position. ``False`` where attention
            biases follow from the place of a key in the cache (ALiBi).
        ragged: whether rows of a batch may be at different lengths. ``False`` where the model computes positions or
            windows from the length of the cache; plain ``generate`` then serves batches.
        replay: whether a forward may start at a later layer from a stored state. ``False`` where later layers read what
            earlier ones stored in the same forward.
        exits: whether the code after the last layer takes any number of rows, so that the states of several exits can
            go through it together.
        endless: whether positions are computed for any index although they are not rotary, so that texts may be longer
            than the config says.
        causal: whether attention that gets no mask is causal. ``False`` where it makes a mask of its own from the one
            that it gets. Modules whose ``is_causal`` is false are found without that.
    """

    layers: str | None = None
    attention: str | None = None
    mlp: tuple[str, ...] | None = None
    tree: bool = True
    ragged: bool = True
    replay: bool = True
    exits: bool = True
    endless: bool = False
    causal: bool = True


_ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture(tree=False, endless=True),
    "mpt": Architecture(attention="attn", mlp=("ffn",), tree=False),
    "glm5_next_text": Architecture(tree=False, ragged=False, exits=False),
    "gpt_neo": Architecture(attention="attn", tree=False, ragged=False),
    **dict.fromkeys(("semantic", "coarse_acoustics"), Architecture(tree=False, ragged=False)),  # of Bark
    "gpt_bigcode": Architecture(exits=False),
    "ctrl": Architecture(attention="multi_head_attention", mlp=("ffn",)),
    "qwen4_exp_text": Architecture(ragged=False, exits=False),
    "xglm": Architecture(endless=True),
    "doge": Architecture(causal=False),
    "dbrx": Architecture(attention="norm_attn_norm.attn", mlp=("ffn",)),
    "hy_v4": Architecture(exits=False),
    "inkling2_text": Architecture(tree=False, ragged=False, replay=False, exits=False),
    "inkling_text": Architecture(tree=False, ragged=False),
}

# Fields of configs, where they are set, and what such a model does that cannot be rolled back.
_REFUSED = {
    "ple_layer_ids": "reads the ids of earlier tokens back from its cache",
    "loop_num_passes": "runs layers several times, each time with keys and values of its own",
}
if not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):  # before transformers 5.23
    _REFUSED["indexer_compress_ratio"] = "keeps positions beside the layers of its cache in this version"


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Registers where a model type keeps its blocks.

    Args:
        model_type: ``config.model_type`` of the model, e.g. ``"llama"``.
        architecture: its block names and what it supports; replaces an earlier registration.

    Raises:
        SettingError: ``model_type`` is not a non-empty string or ``architecture`` is not an :class:`Architecture`.
    """
    if not isinstance(model_type, str) or not model_type or not isinstance(architecture, Architecture):
        raise SettingError(
            f"register_architecture takes a model type and an Architecture, got {model_type!r} and {architecture!r}. "
            'Example: register_architecture("my_model", Architecture(attention="mixer", mlp=("ffn",))).'
        )
    _ARCHITECTURES[model_type] = architecture


def causal_lm(model: Any, who: str) -> PreTrainedModel:
    """Returns the transformers model, unwrapped from PEFT if needed."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise SettingTypeError(
            f"{who} takes a causal LM of transformers or a PEFT model around one, got {type(inner).__name__}. Unwrap "
            "it first, e.g. pass model.module."
        )
    return inner


@dataclass(frozen=True)
class Anatomy:
    """The decoder layers of one model and the blocks in them; for the other flags see :class:`Architecture`."""

    view: ModelView = field(compare=False)  # the model as it was when these were found
    model_name: str  # class name of the model, for messages
    layers: tuple[nn.Module, ...]  # the L decoder layers, first to last
    attention: tuple[nn.Module | None, ...]  # for each layer its attention block, None where none was found
    mlp: tuple[tuple[nn.Module, ...], ...]  # for each layer the modules of its MLP in the order in which they run
    decoder: nn.Module  # the model without its output head (the model itself where it has no such part)
    stack: nn.Module  # the module whose forward runs the layers; what it returns goes into the output head
    kv_sources: frozenset[int]  # layers whose keys or choice of keys later ones read; their attention has to run
    max_positions: int | None  # length of the texts that the model was made for, None if its config does not give it
    # Number of positions, None where they are computed for any index (rotary, ALiBi): the model is then only less
    # accurate on longer texts.
    position_limit: int | None
    takes_positions: bool  # whether the model's forward takes the positions of tokens
    tree: bool
    by_slot: bool  # whether tokens are told apart by their positions alone, whatever the cache holds
    replay: bool
    exits: bool
    causal: bool
    streams: bool  # whether layers pass on [b, s, n, d], several residual streams of each token
    kernels: Kernels | None  # what computes recurrent states, or convolutions, besides keys and values; None for none

    @property
    def is_recurrent(self) -> bool:
        return self.kernels is not None

    @property
    def ragged(self) -> bool:
        return self.by_slot and not self.is_recurrent

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Anatomy:
        """Finds the parts of ``model``, a decoder-only causal LM of transformers."""
        name, view, config = type(model).__name__, ModelView(model), model.config
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{name} is an encoder-decoder model. Self-speculative decoding needs a decoder-only model, such as "
                "those that AutoModelForCausalLM loads."
            )
        text_config = config.get_text_config(decoder=True)
        usual = _ARCHITECTURES.get(text_config.model_type, Architecture())
        architecture = _ARCHITECTURES.get(config.model_type, usual)
        layers = _find_layers(model, architecture)
        if getattr(layers[0], "is_decoder", True) is False:
            raise unsupported(
                f"{name} is an encoder: its tokens attend to later ones, so each would change with the draft after it",
                "Load it with is_decoder=True",
            )
        names = _ATTENTION_NAMES if architecture.attention is None else [(architecture.attention,)]
        attention = tuple(next(iter(_find_blocks(layer, names)), None) for layer in layers)
        if len({*layers}) < len(layers) or len({*attention} - {None}) < len(layers) - attention.count(None):
            raise unsupported(
                f"{name} runs one layer, or attention block, several times, whose keys and values would overwrite each "
                "other"
            )
        for setting, why in _REFUSED.items():
            if value := getattr(text_config, setting, None):
                raise unsupported(f"{name} {why} ({setting}={value!r}), which drafts do not support")
        kernels = Kernels.of(layers)
        if is_stateful(model) and (kernels is None or kernels.recurrence is None):
            types = sorted(set(getattr(text_config, "layer_types", None) or [config.model_type]))
            raise unsupported(
                f"{name} is stateful ({', '.join(types)}), and its states cannot be rolled back when a draft is "
                "rejected: no file of its layers, or more than one, has causal_conv1d_fn and one of the functions for "
                f"which that is known, with their parameters ({', '.join(family.kernel for family in RECURRENCES)})"
            )
        decoder = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
        path = next(name for name, module in model.named_modules() if module is layers[0])
        stack = model.get_submodule(".".join(path.split(".")[:-2]))  # the layers are in a list of it
        ends_apart = stack is not model  # else there is nothing between the last layer and the logits
        kv_sources = _kv_sources(text_config)
        limit = max_positions(text_config)
        is_rotary = getattr(text_config, "rope_parameters", None) is not None
        alibi = bool(getattr(text_config, "alibi", False))
        takes_positions = "position_ids" in forward_parameters(model)
        # Without attention there are no positions.
        has_places = alibi or architecture.tree is False or takes_positions or kernels is not None
        names = _MLP_NAMES if architecture.mlp is None else [architecture.mlp]
        return cls(
            view=view,
            model_name=name,
            layers=layers,
            attention=attention,
            mlp=tuple(_find_blocks(layer, names) for layer in layers),
            decoder=decoder if isinstance(decoder, nn.Module) else model,
            stack=stack,
            kv_sources=kv_sources,
            max_positions=limit,
            position_limit=None if architecture.endless or is_rotary or kernels is not None else limit,
            takes_positions=takes_positions,
            tree=architecture.tree and not alibi and has_places,
            by_slot=architecture.ragged and has_places and ends_apart,
            replay=architecture.replay and not kv_sources and ends_apart,
            exits=architecture.exits and ends_apart,
            causal=architecture.causal and all(getattr(block, "is_causal", True) for block in attention),
            streams=hasattr(text_config, "hc_mult"),
            kernels=kernels,
        )


def _kv_sources(text_config: Any) -> frozenset[int]:
    shared = getattr(text_config, "num_kv_shared_layers", 0) or 0
    if not shared:
        indexers = getattr(text_config, "indexer_types", None) or []
        return frozenset(layer for layer, later in enumerate(indexers[1:]) if later == "shared")
    unshared = text_config.num_hidden_layers - shared
    types = (getattr(text_config, "layer_types", None) or ["full_attention"] * unshared)[:unshared]
    return frozenset({type_: index for index, type_ in enumerate(types)}.values())


def max_positions(text_config: Any) -> int | None:
    """Returns the length of the texts that a model was made for, ``None`` if its config does not give it."""
    limits = (getattr(text_config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _find_layers(model: PreTrainedModel, architecture: Architecture) -> tuple[nn.Module, ...]:
    if architecture.layers is not None:
        return tuple(model.get_submodule(architecture.layers).children())
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    # An encoder of images or sound may have as many layers as the decoder.
    outer = _lists(model.get_decoder(), depth) or _lists(model, depth)
    if len(outer) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) has {len(outer)} module lists of "
            f"num_hidden_layers={depth} entries, so its decoder layers are not certain. Name them with "
            'register_architecture(model_type, Architecture(layers="path.to.layers")).'
        )
    return tuple(outer[0])


def _lists(module: nn.Module, depth: int | None) -> list[nn.ModuleList]:
    """The outermost module lists with ``depth`` entries; a layer may hold such lists, too (experts)."""
    if isinstance(module, nn.ModuleList) and len(module) == depth:
        return [module]
    return list(dict.fromkeys(inner for child in module.children() for inner in _lists(child, depth)))


def _find_blocks(layer: nn.Module, choices: Iterable[tuple[str, ...]]) -> tuple[nn.Module, ...]:
    """The modules of the first choice of paths that all exist, none where there is no such choice."""
    modules = layer._modules
    for paths in choices:
        if all(modules.get(path) is not None for path in paths):
            return tuple(modules[path] for path in paths)  # type: ignore[misc]  # without a search, which is slow
        first = paths[0].partition(".")[0]
        if first in modules or hasattr(type(layer), first):
            with suppress(AttributeError):
                return tuple(layer.get_submodule(path) for path in paths)
    return ()
