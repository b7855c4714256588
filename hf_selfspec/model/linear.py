"""Linear layers over a handful of tokens in float32 on a CPU.

Verification runs a few tokens at once. There the BLAS behind ``torch.nn.functional.linear`` packs the whole weight
matrix before it multiplies, so that two to eight tokens take several times as long as one. oneDNN, which torch carries
as well, streams large weights once. (One core of an AMD EPYC, 2752 x 1024 weights: 1156 µs -> 669 µs for 5 tokens,
212 µs -> 191 µs for one; weights of less than two megabytes are better off with BLAS.)
bfloat16 goes through oneDNN anyway, and GPUs have no such step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn as nn

_MOST_TOKENS = 32
_LARGE = 2**19


def is_served(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``module`` is a large float32 linear layer in CPU memory that nobody else has changed."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight) is nn.Parameter
        and _is_large(module.weight)
    )


def few_token_forward(module: nn.Linear, is_active: Callable[[], bool]) -> Callable[..., Any]:
    """A forward for ``module`` that is faster for up to 32 tokens while ``is_active``, and its own otherwise."""
    original = module.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        if input.dim() == 3 and is_active() and _are_few(input, module.weight):
            return _of_few(input, module)
        return original(input)

    return forward


class FewTokenLinear(nn.Linear):
    """A linear layer that is faster over few tokens where no gradients are wanted."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., v]`` of ``[..., d]``."""
        weight = self.weight
        if not torch.is_grad_enabled() and _is_large(weight) and _are_few(input, weight):
            return _of_few(input, self)
        return super().forward(input)


def _is_large(weight: torch.Tensor) -> bool:
    cpu = weight.is_cpu and weight.dtype is torch.float32
    return cpu and weight.numel() >= _LARGE and torch.backends.mkldnn.is_available()


def _are_few(input: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = input.numel() <= _MOST_TOKENS * weight.shape[1] and input.dtype is torch.float32
    return fits and weight.is_cpu and input.is_cpu and not torch.is_autocast_enabled("cpu")


def _of_few(input: torch.Tensor, module: nn.Linear) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, module.weight, module.bias, "none", [], "")
    return found
