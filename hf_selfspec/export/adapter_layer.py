"""Turns an adapter (Kangaroo) into one more decoder layer, with an MLP that adds nothing."""

import copy
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import SettingError, UnsupportedModelError, UnsupportedOptionError
from ..model.anatomy import Anatomy
from ..modules.adapter import Adapter

_KEYS_AND_VALUES = ("k_proj", "v_proj")
_PROJECTIONS = ("q_proj", *_KEYS_AND_VALUES, "o_proj")
# The norm before a layer's attention.
_NORM = "input_layernorm"
# Norms are compared on states of this size, small enough for their epsilons to matter, with this tolerance.
_SMALL, _CLOSE = 0.05, 1e-4


def adapter_layer(
    model: PreTrainedModel, anatomy: Anatomy, adapter: Adapter, prefix: str
) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
    """The adapter as a decoder layer after its exit layer: the model's layer on which it is modelled, tensors by their
    names in the checkpoint (keys and values that heads share are repeated in all layers), and changes to the config."""
    if not adapter.attention or adapter.mlp is not None:
        raise UnsupportedOptionError(
            "only an adapter with attention alone can be exported: no layer of a model has an MLP like the adapter's. "
            'Fit one with blocks=("attention",), or export EarlyExit(layer).'
        )
    config = model.config
    _check_positions(config, adapter, anatomy)
    twin = _layer_like_it(config, adapter, anatomy)
    attention: Any = anatomy.attention[twin]
    if attention is None or not all(isinstance(getattr(attention, name, None), nn.Linear) for name in _PROJECTIONS):
        raise _unlike(anatomy, f"its attention has no linear {', '.join(_PROJECTIONS)}")
    query, heads, width = attention.q_proj, config.num_attention_heads, adapter.num_heads * adapter.head_width
    if heads != adapter.num_heads or tuple(query.weight.shape) != (width, width):
        raise _unlike(
            anatomy,
            f"it has {heads} heads and queries of {list(query.weight.shape)}, the adapter {adapter.num_heads} heads "
            f"and a width of {width}",
        )
    new = _layer_tensors(adapter, anatomy, twin, attention)
    replaced = {f"{prefix}{adapter.exit_layer}.{name}": tensor for name, tensor in new.items()}
    replaced |= _final_norm(model, anatomy, adapter)
    settings: dict[str, Any] = {}
    if adapter.head is not None:
        head: Any = model.get_output_embeddings()
        if head is None or head.bias is not None or head.weight.shape != adapter.head.weight.shape:
            raise _unlike(anatomy, "its output head is not a matrix of the shape of the adapter's head")
        name = next(name for name, module in model.named_modules() if module is head)
        replaced[f"{name}.weight"] = adapter.head.weight
        settings["tie_word_embeddings"] = False
    groups = config.num_attention_heads // config.num_key_value_heads
    if groups > 1:
        settings["num_key_value_heads"] = config.num_attention_heads
        for index in range(adapter.exit_layer):
            replaced |= _written_out(anatomy, index, f"{prefix}{index}", groups, adapter.head_width)
    return twin, replaced, settings


def _unlike(anatomy: Anatomy, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the adapter cannot become a layer of {anatomy.model_name}: {why}. Export EarlyExit(layer) or "
        "SkipLayers(attention=[...], mlp=[...]), or use the adapter with generate(assistant=SelfSpec.kangaroo(...))."
    )


def _check_positions(config: Any, adapter: Adapter, anatomy: Anatomy) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unlike(anatomy, f"its positions are {rope or 'no rotary ones'}, the adapter's are plain rotary ones")
    if rope["rope_theta"] != adapter.rope_theta:
        raise SettingError(
            f"the adapter has rope_theta={adapter.rope_theta:g}, but all layers of a checkpoint have that of "
            f"{anatomy.model_name}, {rope['rope_theta']:g}. Fit it again: fit_adapter uses the model's rope_theta."
        )


def _layer_like_it(config: Any, adapter: Adapter, anatomy: Anatomy) -> int:
    """The index of the last layer that, like the adapter, attends to the whole text and uses positions."""
    depth = anatomy.num_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * depth
    rotary = getattr(config, "no_rope_layers", None) or [True] * depth  # 1 where there are positions
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        raise _unlike(anatomy, f"all its layers see {config.sliding_window} tokens, the adapter sees the whole text")
    alike = [layer for layer in range(depth) if kinds[layer] == "full_attention" and rotary[layer]]
    if not alike:
        raise _unlike(anatomy, "none of its layers sees the whole text with positions, as the adapter does")
    return alike[-1]


def _layer_tensors(adapter: Adapter, anatomy: Anatomy, twin: int, attention: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of the new layer by their names in it; those of its MLP, and others unknown to the adapter, are 0."""
    layer = anatomy.layers[twin]
    inside = next(name for name, module in layer.named_modules() if module is attention)
    norm = getattr(layer, _NORM, None)
    if norm is None:
        raise _unlike(anatomy, f"its layers have no {_NORM} before their attention")
    query, key, value = adapter.qkv.weight.chunk(3)
    projections = zip(_PROJECTIONS, (query, key, value, adapter.output.weight), strict=True)
    known = {f"{inside}.{name}.weight": weight for name, weight in projections}
    known[f"{_NORM}.weight"] = _norm_weight(norm, adapter.input_norm, anatomy)
    known |= {name.replace("weight", "bias"): weight.new_zeros(len(weight)) for name, weight in known.items()}
    names = dict(layer.named_parameters())
    odd = [name for name in names if name.startswith(f"{inside}.") and name not in known]
    if odd:
        raise _unlike(anatomy, f"its attention has {odd[0]}, which the adapter does not have")
    return {name: known.get(name, torch.zeros_like(parameter)) for name, parameter in names.items()}


def _norm_weight(module: nn.Module, norm: nn.RMSNorm, anatomy: Anatomy) -> torch.Tensor:
    """The weight with which a norm of the model computes the same as the adapter's norm (some add 1 to theirs)."""
    twin = copy.deepcopy(module).float().cpu()
    weights = list(twin.parameters())
    generator = torch.Generator("cpu").manual_seed(0)
    wanted = norm.weight.detach().float().cpu()
    states = _SMALL * torch.randn(4, len(wanted), generator=generator, device="cpu", dtype=torch.float32)
    if len(weights) == 1 and weights[0].shape == wanted.shape:
        reference = copy.deepcopy(norm).float().cpu()
        with torch.no_grad():
            for weight in (wanted, wanted - 1.0):
                weights[0].copy_(weight)
                if torch.allclose(twin(states), reference(states), rtol=_CLOSE, atol=_CLOSE):
                    return weight
    raise _unlike(anatomy, f"its {type(module).__name__} does not compute the same as the adapter's {norm!r}")


def _final_norm(model: nn.Module, anatomy: Anatomy, adapter: Adapter) -> dict[str, torch.Tensor]:
    path = next(name for name, module in model.named_modules() if module is anatomy.stack)
    norms = [
        (name, module)
        for name, module in anatomy.stack.named_children()
        if getattr(getattr(module, "weight", None), "shape", None) == adapter.norm.weight.shape
    ]
    if len(norms) != 1:
        raise _unlike(anatomy, f"it has {len(norms)} norms after its layers")
    name, module = norms[0]
    return {".".join(filter(None, (path, name, "weight"))): _norm_weight(module, adapter.norm, anatomy)}


def _written_out(anatomy: Anatomy, index: int, path: str, groups: int, width: int) -> dict[str, torch.Tensor]:
    """Key and value projections of a layer, repeated for each head that shares them."""
    attention = anatomy.attention[index]
    inside = next(name for name, module in anatomy.layers[index].named_modules() if module is attention)
    found = {}
    for name in _KEYS_AND_VALUES:
        for kind, tensor in getattr(attention, name).named_parameters():
            heads = tensor.detach().unflatten(0, (-1, width))
            found[f"{path}.{inside}.{name}.{kind}"] = heads.repeat_interleave(groups, 0).flatten(0, 1)
    return found
