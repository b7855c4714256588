"""Makes the config of a model that has some layers of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..errors import UnsupportedModelError, brief

# What transformers raises for a config that it refuses.
REFUSALS: tuple[type[Exception], ...] = (StrictDataclassError, TypeError, ValueError)
# Settings that are lists of layer numbers; other lists with an entry for each layer are recognised by their length.
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
# Settings that give a number of first layers.
_LEADING = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
# Lists that have nothing to do with layers, whatever their length.
_NO_LAYERS = ("architectures", "bad_words_ids", "eos_token_id", "suppress_tokens")
# Layers after the model's own that predict further tokens; neither transformers nor drafts use them.
_FURTHER = "num_nextn_predict_layers"


def depth_name(config: PreTrainedConfig) -> str:
    """The name of the number of layers in this kind of config."""
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def config_of_layers(config: PreTrainedConfig, kept: Sequence[int], **changes: Any) -> PreTrainedConfig:
    """Returns the config of a model that consists of the ``kept`` layers, with further ``changes``."""
    depth, values = config.num_hidden_layers, config.to_dict()
    chosen = {name: _of_layers(name, value, kept, depth) for name, value in values.items()}
    chosen |= _sparse_steps(values, kept) | _kinds_of_attention(chosen) | {depth_name(config): len(kept)} | changes
    if _FURTHER in chosen:
        chosen[_FURTHER] = 0
    try:
        found = type(config).from_dict(chosen)
    except REFUSALS as error:
        raise no_such_config(config, error) from error
    found._attn_implementation = config._attn_implementation
    return found


def no_such_config(config: PreTrainedConfig, error: Exception) -> UnsupportedModelError:
    """The error to raise where transformers refuses the config with fewer layers, or a model of it."""
    return UnsupportedModelError(
        f"no model of some of its layers can be made from the config of a {config.model_type} ({brief(error)}). Update "
        "transformers, or use the draft with generate(assistant=...)."
    )


def _of_layers(name: str, value: Any, kept: Sequence[int], depth: int) -> Any:
    if name in _LAYER_NUMBERS and value is not None:
        return [place for place, layer in enumerate(kept) if layer in value]
    if name in _LEADING and value is not None:
        return sum(layer < value for layer in kept)
    if isinstance(value, (list, tuple)) and len(value) == depth and name not in _NO_LAYERS:
        return [value[layer] for layer in kept]
    return value


def _sparse_steps(values: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Experts in every n-th layer (Qwen's MoE) as a list of the layers without them."""
    step = values.get("decoder_sparse_step")
    if step is None:
        return {}
    dense = values.get("mlp_only_layers") or ()
    named = [place for place, layer in enumerate(kept) if layer in dense or (layer + 1) % step]
    return {"decoder_sparse_step": 1, "mlp_only_layers": named}


def _kinds_of_attention(chosen: dict[str, Any]) -> dict[str, Any]:
    """GPT-Neo's kinds of attention, which its config holds twice."""
    if "attention_types" not in chosen:
        return {}
    return {"attention_types": [[list(chosen["attention_layers"]), 1]]}
