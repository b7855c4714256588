"""The kernels of leaves as operations of torch, which round where these do."""

from typing import Any

import torch
from torch.nn import functional

NORMS = (0, 1, 2)


def norm(weight: torch.Tensor, epsilon: float, form: int, x: torch.Tensor) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    if form == 0:
        normed = normed.to(x.dtype).float()
    return (normed * (weight.float() + (form == 2))).to(x.dtype)


def rotate(
    has_two: bool, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    half = q.shape[-1] // 2
    cos, sin = (x.expand(len(q), -1, half * (1 + has_two)).repeat(1, 1, 2 - has_two)[:, None] for x in (cos, sin))
    turned = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in turned)


def activate(is_silu: bool, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")) * up


def check_differences(cases: dict[str, Any]) -> None:
    """Rotations are the same bit for bit; the order of a sum, or an exponential, decides ties. A norm has one form."""
    assert len(cases) == 3 * (9 + 18 + 2)
    for name, (share, roundings) in cases.items():
        kind, *of, dtype = name.split()
        if kind == "rotation":
            assert share == 0, name
        elif kind == "norm" and of[0] != of[2].strip(",") and (dtype != "torch.float32" or "2" in name[:12]):
            assert share > 0.2, name
        else:
            assert roundings <= (4 if dtype == "torch.float32" else 1), name
            assert share <= 0.01 or dtype == "torch.float32", name
