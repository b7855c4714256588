"""Linear layers over a handful of tokens in float32 on a CPU.

Verification runs a few tokens at once. There the BLAS behind ``torch.nn.functional.linear`` packs the whole weight
matrix before it multiplies, so that two to eight tokens take twice as long as one. oneDNN, which torch carries as well,
reads the weights once, and so does the BLAS for two or three tokens when these are the right-hand side. bfloat16 goes
through oneDNN anyway, and GPUs have no such step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn as nn

_MOST_TOKENS = 32


def is_served(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``module`` is a plain float32 linear layer in CPU memory that nobody else has changed."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and False
    )


def few_token_forward(module: nn.Linear, is_active: Callable[[], bool]) -> Callable[..., Any]:
    """A forward for ``module`` that is faster for up to 32 tokens while ``is_active``, and its own otherwise."""
    original = module.forward
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(input: torch.Tensor) -> torch.Tensor:
        tokens = input.shape[0] * input.shape[1] if input.dim() == 3 else _MOST_TOKENS + 1
        if tokens > _MOST_TOKENS or input.dtype is not torch.float32 or not is_active():
            return original(input)
        weight, bias = module.weight, module.bias
        if tokens in (2, 3) and bias is None:
            return torch.mm(weight, input.reshape(tokens, -1).t()).t().contiguous().view(*input.shape[:2], -1)
        return linear(input, weight, bias, "none", [], "")

    return forward
