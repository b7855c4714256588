"""The modules and hooks of a model, looked up anew in each call: users change models between calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.nn as nn

# Libraries whose hooks treat the rows of a batch alike.
ROW_BLIND = ("accelerate", "deepspeed", "hf_selfspec", "torch", "transformers")


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Returns what ``model.modules()`` yields, in its order, in a quarter of the time."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += reversed(module._modules.values())
    return list(found)


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters of a model's forward."""
    return _parameters(type(model).forward)


@functools.lru_cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def has_hooks(model: nn.Module, but_of: Collection[str]) -> bool:
    """Returns whether hooks, other than those of some libraries, see or change what goes through a model's modules."""
    return nn.modules.module._has_any_global_hook() or any(_library(hook) not in but_of for hook in hooks_of(model))


def hooks_of(model: nn.Module) -> Iterator[object]:
    """The hooks around the forwards of a model's modules, accelerate's included, which are attributes of modules."""
    for module in all_modules(model):
        yield from module._forward_pre_hooks.values()
        yield from module._forward_hooks.values()
        if (given := getattr(module, "_hf_hook", None)) is not None:
            yield from getattr(given, "hooks", (given,))


def _library(hook: object) -> str:
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def is_compiled(model: nn.Module) -> bool:
    """Returns whether a model, or a module in it, runs as a compiled graph."""
    if hasattr(model.forward, "_torchdynamo_orig_callable"):
        return True
    return any(module._compiled_call_impl is not None for module in all_modules(model))
