"""Forwards over several tokens with the results of one token after another, bit for bit, in bfloat16 too.

Kernels may round a token's results differently when others go through with it: attention over several queries does, and
some linear layers, depending on processor, shape and number of tokens. Here each query has the call that ``generate``
makes for it, and linear layers take no more tokens at once than leave the results of each as they are alone.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.nn.functional import linear, pad

from .modules import all_modules
from .patching import Forward, InstanceForwards, SharedChange

# Whether rows have the results of each alone, by the shapes of input and weight, dtype, device, bias and threads.
_alike: dict[tuple[Any, ...], bool] = {}
_installed = SharedChange()


def exact_linears(model: nn.Module, is_active: Callable[[], bool]) -> AbstractContextManager[None]:
    """Returns a context in which linear layers treat each token as if it were alone while ``is_active``."""

    def install(forwards: InstanceForwards) -> None:
        for module in all_modules(model):
            if type(module) is nn.Linear and "forward" not in module.__dict__:
                forwards.replace(module, partial(_linear, module, module.forward, is_active))

    return _installed.of(model, install)


def _linear(module: nn.Linear, original: Forward, is_active: Callable[[], bool], input: torch.Tensor) -> torch.Tensor:
    return _in_pieces(module, original, input) if is_active() else original(input)


def _in_pieces(module: nn.Linear, original: Forward, input: torch.Tensor) -> torch.Tensor:
    """The layer's results for ``[..., s, i]``, in as few pieces as leave those of each row as they are alone."""
    count = input.shape[-2]
    if count == 1 or _are_alike(input.shape, module.weight, module.bias):
        return original(input)
    halves = input.split(-(-count // 2), dim=-2)
    return torch.cat([_in_pieces(module, original, half) for half in halves], dim=-2)


def _are_alike(shape: torch.Size, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a layer over an input of this shape has the results of each row alone."""
    key = shape, weight.shape, weight.dtype, weight.device, bias is None, torch.get_num_threads()
    if key not in _alike:
        # Products that cancel each other leave nothing but what rounding has added, in the order of the additions.
        half, rest = divmod(shape[-1], 2)
        drawn = torch.Generator("cpu").manual_seed(0)
        columns = torch.randn(len(weight), half, generator=drawn, device="cpu")
        row = torch.randn(*shape[:-1], half, generator=drawn, device="cpu")
        other = pad(torch.cat([columns, columns], dim=-1), (0, rest)).to(weight)
        input = pad(torch.cat([row, -row], dim=-1), (0, rest)).to(weight)
        added = None if bias is None else torch.zeros_like(bias)
        alone = [linear(one, other, added) for one in input.split(1, dim=-2)]
        _alike[key] = torch.equal(linear(input, other, added), torch.cat(alone, dim=-2))
    return _alike[key]


def attention_of_each(
    original: Callable[..., Any],
    keys_of: Callable[[torch.Tensor | None], Sequence[slice | torch.Tensor]],  # that each query sees by a mask
    module: nn.Module,
    query: torch.Tensor,  # [1, k*g, s, h]
    key: torch.Tensor,  # [1, k, n, h], as the values
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one token after another by transformers' ``original`` function. (Heads laid out as queries of
    their key head take a sixth of its time in bfloat16 on a CPU, but round differently over 200 keys and more.)"""
    found = []
    for index, keys in enumerate(keys_of(attention_mask)):
        mask = attention_mask
        if mask is not None:
            # Masks that add numbers may add others than zeros, such as ALiBi's.
            mask = None if mask.dtype is torch.bool else mask[:, :, index : index + 1, keys]
        one = query[:, :, index : index + 1], key[:, :, keys], value[:, :, keys]
        found.append(original(module, *one, mask, *args, **kwargs)[0])
    return torch.cat(found, dim=1), None
