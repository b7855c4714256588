"""Makes an ordinary model and its config from some layers of another one; the two share their tensors."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError, brief
from ..model.anatomy import Anatomy
from ..model.internals import copy_attention_implementation, copy_file_layout
from ..model.plan import LayerPlan, check_plan

# What transformers raises for a config that it refuses.
_REFUSALS: tuple[type[Exception], ...] = (StrictDataclassError, TypeError, ValueError)
# Settings that are lists of layer numbers; other lists with an entry for each layer are recognised by their length.
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers")
# Settings that give a number of first layers.
_LEADING = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
# Lists that have nothing to do with layers, whatever their length.
_NO_LAYERS = ("architectures", "bad_words_ids", "eos_token_id", "suppress_tokens")
# The number of MTP layers after the model's own; neither transformers nor drafts use them.
_MTP_LAYERS = "num_nextn_predict_layers"
_PLAIN = (bool, int, float, str, type(None))
# Attributes of modules that have nothing to do with what they compute.
_STATES = ("_is_hf_initialized", "gradient_checkpointing", "training")


def draft_model(model: PreTrainedModel, anatomy: Anatomy, plan: LayerPlan) -> PreTrainedModel:
    """Returns the layers that a plan runs as an ordinary model with the same tensors; the whole one stays as it is."""
    if alone := sorted(plan.skipped_attention ^ plan.skipped_mlp):
        raise UnsupportedModelError(
            f"in layers {alone} of {anatomy.model_name} attention or the MLP is left out alone, which a checkpoint "
            "cannot express. Use this draft with generate(assistant=...), or export whole layers, as with "
            f"SkipLayers({alone}, {alone})."
        )
    if anatomy.kv_sources:
        raise UnsupportedModelError(
            f"layers of {anatomy.model_name} read keys and values of layers {sorted(anatomy.kv_sources)}, so none can "
            "be taken out of it. Use the draft with generate(assistant=...)."
        )
    check_plan(plan, anatomy)
    kept = [layer for layer in range(plan.num_layers) if layer not in plan.skipped_layers]
    # The name of the list of decoder layers, with a dot, in both models.
    prefix = next(name for name, module in model.named_modules() if module is anatomy.layers[0]).removesuffix("0")
    draft = _model_of_layers(model, kept, prefix)
    _check_same_layers(model, draft, kept, prefix)
    draft.generation_config = copy.deepcopy(model.generation_config)
    if hasattr(draft.generation_config, "assistant"):
        del draft.generation_config.assistant
    return draft


def _config_of_layers(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """The config of a model that consists of the ``kept`` layers."""
    depth, values = config.num_hidden_layers, config.to_dict()
    chosen = {name: _of_layers(name, value, kept, depth) for name, value in values.items()}
    depth_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if (step := values.get("decoder_sparse_step")) is not None:  # experts in every n-th layer (Qwen's MoE)
        dense = values.get("mlp_only_layers") or ()
        named = [place for place, layer in enumerate(kept) if layer in dense or (layer + 1) % step]
        chosen |= {"decoder_sparse_step": 1, "mlp_only_layers": named}
    chosen[depth_name] = len(kept)
    if "attention_types" in chosen:  # GPT-Neo's config holds the kinds of attention twice
        chosen["attention_types"] = [[list(chosen["attention_layers"]), 1]]
    if _MTP_LAYERS in chosen:
        chosen[_MTP_LAYERS] = 0
    config_of_layers = type(config).from_dict(chosen)
    copy_attention_implementation(config, config_of_layers)
    return config_of_layers


def _of_layers(name: str, value: Any, kept: Sequence[int], depth: int) -> Any:
    if name in _LAYER_NUMBERS and value is not None:
        return [place for place, layer in enumerate(kept) if layer in value]
    if name in _LEADING and value is not None:
        return sum(layer < value for layer in kept)
    if isinstance(value, (list, tuple)) and len(value) == depth and name not in _NO_LAYERS:
        return [value[layer] for layer in kept]
    return value


def _model_of_layers(model: PreTrainedModel, kept: Sequence[int], prefix: str) -> PreTrainedModel:
    """A model with the ``kept`` layers' own tensors."""
    try:
        with torch.device("meta"):
            draft = type(model)(_config_of_layers(model.config, kept))
    except _REFUSALS as error:
        raise UnsupportedModelError(
            f"no model of some of its layers can be made from the config of a {model.config.model_type} "
            f"({brief(error)}). Update transformers, or use the draft with generate(assistant=...)."
        ) from error

    def original(name: str) -> str:
        """The name in the whole model of a tensor or module of the new one."""
        if not name.startswith(prefix):
            return name
        layer, dot, path = name.removeprefix(prefix).partition(".")
        return f"{prefix}{kept[int(layer)]}{dot}{path}"

    whole = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    made: dict[int, nn.Parameter] = {}
    for name, empty in [*draft.named_parameters(remove_duplicate=False), *draft.named_buffers()]:
        old = whole.get(original(name))
        if old is None or empty.shape != old.shape:
            has = "has none" if old is None else f"has {list(old.shape)} there"
            raise UnsupportedModelError(
                f"a model of its config with {len(kept)} of its layers has {name} of {list(empty.shape)}, but "
                f"{type(model).__name__} {has}: a config of this type cannot express this choice of layers. Export "
                "an early exit, or a set that skips other layers."
            )
        path, _, attribute = name.rpartition(".")
        if isinstance(empty, nn.Parameter):
            frozen = made.setdefault(id(old), nn.Parameter(old.detach(), requires_grad=False))  # tied ones stay tied
            draft.get_submodule(path)._parameters[attribute] = frozen
        else:
            draft.get_submodule(path)._buffers[attribute] = old
    for name, module in draft.named_modules():
        for attribute, value in vars(module).items():  # tensors that are neither parameters nor buffers
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(module, attribute, getattr(model.get_submodule(original(name)), attribute))
    copy_file_layout(model, draft)
    return draft.eval()


def _check_same_layers(model: PreTrainedModel, draft: PreTrainedModel, kept: Sequence[int], prefix: str) -> None:
    """Checks that the layers are of the same kind: windows, positions, experts and all that depends on their index."""
    for place, layer in enumerate(kept):
        whole, part = (_settings(each.get_submodule(f"{prefix}{at}")) for each, at in ((model, layer), (draft, place)))
        for name in whole.keys() | part.keys():
            was, now = whole.get(name), part.get(name)
            if was != now and (was, now) != (layer, place):  # a layer's own index is expected to change
                raise UnsupportedModelError(
                    f"layer {layer} of {type(model).__name__} would differ as layer {place} of a checkpoint (its "
                    f"{name} is {was!r} and would be {now!r}): no config can express what depends on a layer's index. "
                    "Export an early exit, or a set that leaves these layers where they are."
                )


def _settings(layer: nn.Module) -> dict[str, Any]:
    """The classes and plain attributes of all modules of a layer, by their names."""
    return {
        f"{name}.{attribute}": value
        for name, module in layer.named_modules()
        for attribute, value in (("class", type(module).__name__), *vars(module).items())
        if isinstance(value, _PLAIN) and attribute not in _STATES
    }
