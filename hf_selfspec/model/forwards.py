"""Forwards of single modules, replaced for a while and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

Forward = Callable[..., Any]
_MISSING = object()


class InstanceForwards:
    """Remembers what each module had before, so that :meth:`restore` leaves no trace.

    An instance ``forward`` that was there already (accelerate puts one) comes back as it was.
    """

    def __init__(self) -> None:
        self.saved: list[tuple[nn.Module, Any]] = []

    def replace(self, module: nn.Module, forward: Forward) -> None:
        """Makes ``forward`` what ``module(...)`` calls."""
        self.saved.append((module, module.__dict__.get("forward", _MISSING)))
        module.__dict__["forward"] = forward

    def restore(self) -> None:
        """Puts everything back, last change first."""
        for module, forward in reversed(self.saved):
            if forward is _MISSING:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
        self.saved.clear()


def states_of(output: Any) -> torch.Tensor:
    """``[b, s, d]`` the states in what a stack of layers returns."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return states


def with_states(output: Any, states: torch.Tensor) -> Any:
    """What a stack of layers returns, with other states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return type(output)(**{**output, "last_hidden_state": states})
