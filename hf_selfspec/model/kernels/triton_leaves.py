"""Three Triton kernels that round where torch's operations do. Importing this imports Triton.

``enable_fp_fusion=False`` keeps compilers from rounding a product and a sum at once. Only the order in which squares
are summed up may be another one, and the last bits of an exponential. Inputs of other shapes raise errors.
"""

import torch
import triton
import triton.language as tl

# Normed values are rounded before the product with the weight (Llama), or only after it (GPT-OSS), or after one with a
# number that is greater by one (Gemma).
NORMS = (0, 1, 2)
# Arguments of kernels are pointers and numbers of Triton's, which have no types: so mypy is told to ignore them.
# How many numbers of a row a program multiplies.
_BLOCK = 1024


@triton.jit(do_not_specialize=["form"])  # else each is compiled, which takes 0.14 s
def _norm(out, x, weight, n, share, epsilon, form, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row, lanes = tl.program_id(0).to(tl.int64) * n, tl.arange(0, block)
    dtype = out.dtype.element_ty
    values = tl.load(x + row + lanes, lanes < n, 0.0).to(tl.float32)
    factor = tl.load(weight + lanes, lanes < n, 0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) * share + epsilon)
    normed = tl.where(form == 0, normed.to(dtype).to(tl.float32), normed)
    factor += tl.where(form == 2, 1.0, 0.0)
    tl.store(out + row + lanes, (normed * factor).to(dtype), lanes < n)


def norm(weight: torch.Tensor, epsilon: float, form: int, x: torch.Tensor) -> torch.Tensor:
    """The RMSNorm of ``x`` ``[..., d]`` with a ``weight`` ``[d]`` in one of the :data:`NORMS`."""
    x, n = x.contiguous(), x.shape[-1]
    out, block = torch.empty_like(x), triton.next_power_of_2(n)
    options = {"num_warps": min(max(block // 512, 1), 16), "enable_fp_fusion": False}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _norm[(x.numel() // n,)](out, x, weight.view(n).contiguous(), n, 1 / n, epsilon, form, block, **options)
    return out


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    q_out, k_out, q, k, cos, sin, q_token, q_head, k_token, k_head, heads, second, half, block: tl.constexpr
):
    token, head, lanes = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, block)
    head_k, heads_k = head - heads, tl.num_programs(1) - heads
    x = tl.where(head < heads, q + token * q_token + head * q_head, k + token * k_token + head_k * k_head)
    q_out, k_out = q_out + (token * heads + head) * 2 * half, k_out + (token * heads_k + head_k) * 2 * half
    out, inside, angles = tl.where(head < heads, q_out, k_out), lanes < half, token * (half + second) + lanes
    dtype = q.dtype.element_ty
    x_1, x_2 = tl.load(x + lanes, inside).to(tl.float32), tl.load(x + half + lanes, inside).to(tl.float32)
    c_1, c_2 = tl.load(cos + angles, inside).to(tl.float32), tl.load(cos + second + angles, inside).to(tl.float32)
    s_1, s_2 = tl.load(sin + angles, inside).to(tl.float32), tl.load(sin + second + angles, inside).to(tl.float32)
    turned_1 = (x_1 * c_1).to(dtype).to(tl.float32) - (x_2 * s_1).to(dtype).to(tl.float32)
    turned_2 = (x_2 * c_2).to(dtype).to(tl.float32) + (x_1 * s_2).to(dtype).to(tl.float32)
    tl.store(out + lanes, turned_1.to(dtype), inside)
    tl.store(out + half + lanes, turned_2.to(dtype), inside)


def rotate(
    has_two: bool, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys ``[b, k, s, h]`` turned by angles ``[b, s, h]``, those of each half, or ``[b, s, h / 2]``, those
    of both."""
    (b, heads, s, width), half = q.shape, q.shape[3] // 2
    outs = [x.new_empty(b, s, x.shape[1], width).transpose(1, 2) for x in (q, k)]
    q, k = (x.transpose(1, 2).reshape(b * s, -1, width) for x in (q, k))  # as most are laid out
    cos, sin = (x.expand(b, s, width if has_two else half).contiguous() for x in (cos, sin))
    strides, second, block = (*q.stride()[:2], *k.stride()[:2]), half if has_two else 0, triton.next_power_of_2(half)
    with torch.cuda.device_of(q):
        _rotate[b * s, heads + k.shape[1]](
            *outs, q, k, cos, sin, *strides, heads, second, half, block, num_warps=1, enable_fp_fusion=False
        )
    return outs[0], outs[1]


@triton.jit
def _activate(out, gate, up, gate_row, up_row, n, is_silu: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row, lanes = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    dtype = out.dtype.element_ty
    x = tl.load(gate + row * gate_row + lanes, lanes < n, 0.0).to(tl.float32)
    if is_silu:
        active = tl.div_rn(x, 1.0 + tl.exp(-x))
    else:  # where numbers below zero cancel each other, as they do in torch's
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        tanh = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.abs(inner)) + 1.0)
        active = 0.5 * x * (1.0 + tl.where(inner < 0, -tanh, tanh))
    values = active.to(dtype).to(tl.float32) * tl.load(up + row * up_row + lanes, lanes < n, 0.0).to(tl.float32)
    tl.store(out + row * n + lanes, values.to(dtype), lanes < n)


def activate(is_silu: bool, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU, or GELU by tanh, of ``gate`` ``[..., n]``, times ``up`` ``[..., n]``."""
    out, n = gate.new_empty(gate.shape), gate.shape[-1]
    gate, up = gate.reshape(-1, n), up.view(gate.shape).reshape(-1, n)
    grid = len(gate), triton.cdiv(n, _BLOCK)
    with torch.cuda.device_of(gate):
        _activate[grid](out, gate, up, gate.stride(0), up.stride(0), n, is_silu, _BLOCK, enable_fp_fusion=False)
    return out
