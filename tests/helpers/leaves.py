"""The kernels of leaves as operations of torch, which round where these do."""

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
