"""A model as it is when a call begins: users change models between calls."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from .forks import cached_property
from .internals import has_peft_layers
from .module_tools import all_modules, hooks_of, libraries_of


class ModelView:
    """One walk over a model's modules, and what all parts of a call read from it.

    Attributes:
        model: the model.
        modules: its modules in the order of ``model.modules()``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.modules = model, all_modules(model)

    @cached_property
    def classes(self) -> set[Any]:
        """The classes of the modules."""
        return set(map(type, self.modules))

    @cached_property
    def weights(self) -> dict[type, torch.Tensor]:
        """One of the weights of each class of weights."""
        weights: dict[type, torch.Tensor] = {}
        for module in self.modules:
            for weight in module.__dict__.get("_parameters", {}).values():
                weights[type(weight)] = weight
        weights.pop(type(None), None)
        return weights

    @cached_property
    def hooks(self) -> list[tuple[nn.Module, Any]]:
        """The hooks around forwards of single modules, each with its module."""
        return list(hooks_of(self.modules))

    def has_hooks(self, but_of: Collection[str]) -> bool:
        """Returns whether hooks, other than those of some libraries, see or change what goes through the modules."""
        return nn.modules.module._has_any_global_hook() or any(
            not set(but_of).issuperset(libraries_of(hook)) for _, hook in self.hooks
        )

    @cached_property
    def is_compiled(self) -> bool:
        """Whether the model, or a module in it, runs as a compiled graph."""
        is_whole = hasattr(self.model.forward, "_torchdynamo_orig_callable")
        return is_whole or any(module._compiled_call_impl is not None for module in self.modules)

    @cached_property
    def is_adapted(self) -> bool:
        """Whether adapters were added, by PEFT or by transformers."""
        return has_peft_layers(self.model, self.modules)
