"""Hooks on a model's modules, told apart by the library that defines them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.nn as nn

from .modules import all_modules

# Libraries whose hooks treat the rows of a batch alike.
ROW_BLIND = ("accelerate", "deepspeed", "hf_selfspec", "torch", "transformers")


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
