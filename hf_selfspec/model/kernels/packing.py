"""Linear layers in four bits: how their weights are rounded and packed, and what multiplies with them.

One thread of an AMD EPYC (AVX-512 BF16), bfloat16, torch 2.13, one token: a 4096 x 4096 layer takes 2.94 ms, and 0.89
in four bits; 2.76 and 1.59 for four tokens. A head of 49,152 tokens and width 576: 7.0 and 1.8; 8.1 and 3.0. In float16
and float32 torch's kernels of a CPU are references, which take 7 to 20 times as long as the layer itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..anatomy import Anatomy
from ..fingerprint import samples
from ..forks import new_lock
from ..head import output_head
from ..linear import linear_layers
from ..plan import Substitutes

# Rounded weights: numbers from 0 to 15, two in a byte [n, k / 2], and for each group its scale and the value of its
# number 8 [k / GROUP_SIZE, n, 2].
Rounded = tuple[torch.Tensor, torch.Tensor]
# How many numbers are rounded at once, so that large layers take no more memory for it than small ones.
_PIECE = 2**20
# The shares of a group's range that 16 values cover at first, and how often they are fitted to it then. With one share
# and six turns SmolLM2 agrees with itself less (0.730 of 8,192 tokens of WikiText-2 for 0.740, weights dithered as in
# RESULTS), with 1.0, 0.9 and 0.8 no more (0.739).
_CLIPS, _TURNS = (1.0, 0.85), 3
# Values of a row with one scale, which kernels take from 32 on; with 64 SmolLM2 agreed with itself in 0.842 for 0.874.
GROUP_SIZE = 32
# The smallest share of the numbers in layers that is packed: with less, drafts are hardly faster than the model.
_LEAST = 0.5


class Kernel(NamedTuple):
    """What multiplies with packed weights on one kind of device."""

    pack: Callable[[torch.Tensor], torch.Tensor]  # maps rounded numbers to the layout that it reads
    multiply: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], torch.Tensor]  # maps [t, k] to [t, n]
    most: int  # tokens up to which it is faster than the layer itself


def _tiles(numbers: torch.Tensor) -> torch.Tensor:
    """The layout of CUDA's kernel: tiles that are as wide as the rows allow."""
    inner = next(count for count in (8, 4, 2) if numbers.shape[1] % (8 * count) == 0)
    return torch._convert_weight_to_int4pack(numbers, inner)


def one_a_byte(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits ``[n, k]`` from two in a byte ``[n, k / 2]``."""
    return torch.stack([numbers >> 4, numbers & 15], dim=-1).flatten(1)


_KERNELS = {
    "cpu": Kernel(
        lambda numbers: torch._convert_weight_to_int4pack_for_cpu(one_a_byte(numbers).int(), 1),
        torch._weight_int4pack_mm_for_cpu,
        most=8,
    ),
    "cuda": Kernel(_tiles, torch._weight_int4pack_mm, most=16),
}


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Returns what multiplies with packed weights on a device, ``None`` where nothing is faster than the layer."""
    if dtype is not torch.bfloat16 or (device.type == "cuda" and torch.version.hip is not None):
        return None  # which AMD GPUs torch's kernel runs on is not told by their capability
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return None  # the model takes nearly as long to verify bfloat16 tokens together as one after the other
    is_served = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    return _KERNELS.get(device.type) if is_served else None


def fits(module: nn.Module) -> bool:
    """Returns whether the weight of a linear layer can be packed, and is multiplied faster then."""
    weight: Any = module.weight
    is_plain = type(weight) is nn.Parameter and weight.dim() == 2
    return is_plain and kernel_for(weight.device, weight.dtype) is not None and has_widths(module)


def has_widths(module: nn.Module) -> bool:
    """Returns whether kernels take a linear layer's rows and columns."""
    rows, width = _weight(module).shape
    return width % GROUP_SIZE == 0 and rows % 16 == 0


def to_pack(anatomy: Anatomy, model: PreTrainedModel) -> list[nn.Module]:
    """Returns the linear layers that drafts in four bits pack, with the output head."""
    modules = [module for _, module in linear_layers(dict(enumerate(anatomy.layers))) if fits(module)]
    head = output_head(model)
    return [*modules, head] if type(head) is nn.Linear and fits(head) else modules


def why_not(anatomy: Anatomy, fits: Callable[[nn.Module], bool] = fits) -> str:
    """Returns why drafts would not be faster with packed weights, and what to do; empty if they are."""
    if (config := getattr(getattr(anatomy.decoder, "config", None), "quantization_config", None)) is not None:
        method = (config if isinstance(config, dict) else config.to_dict()).get("quant_method")
        return f"its weights are quantised already ({getattr(method, 'value', method)}). Load it in bfloat16."
    unpacked = {weight for layer in anatomy.layers for weight in layer.parameters()}
    total = sum(weight.numel() for weight in unpacked)
    unpacked -= {module.weight for _, module in linear_layers(dict(enumerate(anatomy.layers))) if fits(module)}
    if sum(weight.numel() for weight in unpacked) <= (1 - _LEAST) * total:
        return ""
    weight = max(unpacked, key=torch.Tensor.numel)
    if hasattr(weight, "device_mesh") or weight.device.type == "meta":
        return "its weights are spread over processes or offloaded. Load it on one device of one process."
    if type(weight) is not nn.Parameter or weight.element_size() < 2:
        return "its weights are quantised already. Load it in bfloat16."
    if kernel_for(weight.device, weight.dtype) is None:
        return (
            f"torch has no kernel for four bits that is faster than its layers in {weight.dtype} on this "
            f"{weight.device.type}. Load it in bfloat16, on a CPU with AVX-512 or a GPU of compute capability 8.0 or "
            "more."
        )
    return (
        f"most of its weights, as one of {list(weight.shape)}, are not in linear layers (experts?) or not of widths "
        "that kernels take. Leave Quantized out."
    )


def _weight(module: nn.Module) -> torch.Tensor:
    """The weight ``[n, k]`` of a linear layer."""
    weight: Any = module.weight
    return weight.detach().t() if isinstance(module, Conv1D) else weight.detach()


def _by_groups(weight: torch.Tensor) -> Rounded:
    """16 evenly spaced values for each group, by least squares: numbers and the line through them in turn, from
    several first lines."""
    values = weight.float().unflatten(1, (-1, GROUP_SIZE))  # [n, k / GROUP_SIZE, GROUP_SIZE]
    low, high = values.aminmax(dim=-1, keepdim=True)
    least, best = torch.full_like(low, torch.inf), [torch.empty_like(values), low, low]
    for clip in _CLIPS:
        scale = ((high - low) * clip / 15).clamp(min=1e-8)
        middle = (high + low + scale) / 2
        for _ in range(_TURNS):
            numbers = ((values - middle) / scale + 8).round_().clamp_(0, 15)
            mean = numbers.mean(-1, keepdim=True)
            numbers -= mean
            spread = numbers.square().sum(-1, keepdim=True).clamp(min=1e-8)
            scale = (numbers.mul_(values).sum(-1, keepdim=True) / spread).clamp(min=1e-8)
            middle = values.mean(-1, keepdim=True) + scale * (8 - mean)
        scale, middle = (value.to(weight.dtype).float() for value in (scale, middle))  # as the kernel reads them
        numbers = ((values - middle) / scale + 8).round_().clamp_(0, 15)
        error = ((numbers - 8) * scale + middle).sub_(values).square_().sum(-1, keepdim=True)
        best = [torch.where(error < least, new, old) for new, old in zip((numbers, scale, middle), best, strict=True)]
        least = least.minimum(error)
    numbers, scales = best[0].flatten(1).to(torch.uint8), torch.cat(best[1:], dim=-1)
    return numbers[:, ::2] << 4 | numbers[:, 1::2], scales.transpose(0, 1).to(weight.dtype)


def rounded(module: nn.Module) -> Rounded:
    """Rounds the weight of a linear layer."""
    weight = _weight(module)
    numbers, scales = zip(*map(_by_groups, weight.split(max(1, _PIECE // weight.shape[1]))), strict=True)
    return torch.cat(numbers), torch.cat(scales, dim=1)


class PackedLinear:
    """A linear layer with a packed weight, as a :class:`~.plan.Substitutes` has it."""

    def __init__(self, module: nn.Module) -> None:
        weight: Any = module.weight
        kernel = kernel_for(weight.device, weight.dtype)
        assert kernel is not None
        self.state = _states([module])[0]
        self._parameters, self._kernel = module._parameters, kernel
        numbers, self.scales = rounded(module)
        self.weight = kernel.pack(numbers)

    def __call__(self, forward: Callable[..., Any], input: torch.Tensor) -> Any:
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        if len(rows) > self._kernel.most or rows.dtype is not self.scales.dtype:  # as in autocast
            return forward(input)
        product = self._kernel.multiply(rows, self.weight, GROUP_SIZE, self.scales)
        product = product.view(*input.shape[:-1], product.shape[-1])
        bias = self._parameters["bias"]
        return product if bias is None else product + bias

    def follow(self, changed: Rounded, state: State) -> None:
        """Takes over changed numbers in place, so that graphs with this layer stay."""
        self.weight.copy_(self._kernel.pack(changed[0]))
        self.scales.copy_(changed[1])
        self.state = state


# Shape, device and dtype of a weight, and what changes with its values.
State = tuple[object, ...]


def _states(modules: Iterable[nn.Module]) -> list[State]:
    """Optimizers count their changes of a weight; those of ``weight.data``, which are not counted, show in values."""
    weights: list[Any] = [module.weight for module in modules]
    counts = [None if weight.is_inference() else weight._version for weight in weights]
    values = samples(weights).view(len(weights), -1).tolist()
    return [
        (*_layout(weight), count, weight.data_ptr(), *numbers)
        for weight, count, numbers in zip(weights, counts, values, strict=True)
    ]


def _layout(weight: Any) -> tuple[object, ...]:
    return weight.shape, weight.device, weight.dtype


_models: weakref.WeakKeyDictionary[PreTrainedModel, Substitutes] = weakref.WeakKeyDictionary()
_lock = new_lock()


def packed(model: PreTrainedModel, wanted: Sequence[nn.Module]) -> Substitutes:
    """Returns layers of a model with packed weights, made once, shared by threads, and freed with the model; those
    whose weights have changed since are packed again."""
    with _lock, torch.inference_mode(False), torch.no_grad():  # other calls could not write to inference tensors
        before = _models.get(model)
        earlier: Any = {} if before is None else before.of
        layers = {module: layer for module, layer in earlier.items() if layer.state[:3] == _layout(module.weight)}
        for module, state in zip(wanted, _states(wanted), strict=True):
            if module not in layers:
                layers[module] = PackedLinear(module)
            elif layers[module].state != state:
                layers[module].follow(rounded(module), state)
        of = {module: layers[module] for module in wanted}
        if before is None or before.of != of:
            before = _models[model] = Substitutes(of)
        return before
