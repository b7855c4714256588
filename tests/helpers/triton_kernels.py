"""Prints as JSON how the kernels of leaves round in Triton's interpreter (``interpret``), or which are compiled for an
H200 (``compile``); a process of its own."""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction

from hf_selfspec.model.kernels import triton_leaves

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NORMS = (modeling_llama.LlamaRMSNorm, modeling_gpt_oss.GptOssRMSNorm, Gemma3RMSNorm)
ROTATIONS = {modeling_llama: True, modeling_qwen3: True, modeling_gpt_oss: False}


def results(dtype: torch.dtype, device: str = "cpu") -> dict[str, tuple[Any, Any]]:
    """What kernels give, and what transformers' code does."""

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).mul(3).to(device, dtype)

    random, found = torch.Generator().manual_seed(0), dict[str, tuple[Any, Any]]()
    for usual, norm_class in enumerate(NORMS):
        norm, x = norm_class(576).to(device, dtype), some(2, 3, 576)
        norm.weight.data = some(576)
        for form in triton_leaves.NORMS:
            name = f"norm {usual} as {form}"
            found[name] = triton_leaves.norm(norm.weight, 1e-6, form, x), norm(x)
    for file, has_two in ROTATIONS.items():
        for shape in ((2, 3), (1, 3), (2, 1)):  # angles of all rows or of each, one token or several
            q, k = (some(2, shape[1], heads, 16).transpose(1, 2) for heads in (9, 3))
            angles = some(*shape, 16 if has_two else 8)
            inputs = q, k, angles.cos(), angles.sin()
            own = file.apply_rotary_pos_emb(*inputs)
            for turned, expected, name in zip(triton_leaves.rotate(has_two, *inputs), own, "qk", strict=True):
                found[f"rotation of {name} in {file.__name__}, {shape}"] = turned, expected
    gate, up = some(2, 3, 2 * 1100).chunk(2, -1)
    for is_silu, own in (True, functional.silu(gate)), (False, functional.gelu(gate, approximate="tanh")):
        found["SiLU" if is_silu else "GELU"] = triton_leaves.activate(is_silu, gate, up), own * up
    return found


def rounding(before: Any) -> Any:
    """Triton's interpreter cuts numbers off in bfloat16, where devices round them."""

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (triton.language.float32, triton.language.bfloat16):
            return before(values, source, target, mode)
        return torch.from_numpy(np.array(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    return convert


def differences(device: str = "cpu") -> dict[str, Any]:
    """The share of results that are not equal, and how many roundings they are apart at most."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        for name, (values, own) in results(dtype, device).items():
            apart, size = (values.float() - own.float()).abs(), own.float().abs()
            roundings = apart / (torch.finfo(dtype).eps * size + 2.0**-22 * size.max())
            found[f"{name}, {dtype}"] = (values != own).float().mean().item(), roundings.max().item()
    return found


def interpreted() -> dict[str, Any]:
    with patch.object(interpreter, "_convert_float", rounding(interpreter._convert_float)):
        return differences()


def compiled() -> dict[str, Any]:
    """For each kernel that is launched its name, and whether it rounds some product and sum at once."""
    target, made, run = GPUTarget("cuda", 90, 32), dict[str, Any](), JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        made[kernel.hash] = self.__name__, "fma" in kernel.asm["ptx"]

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    with patch.object(JITFunction, "run", compile_only):
        for dtype in DTYPES:
            results(dtype)
    return made


if __name__ == "__main__":
    print(json.dumps((interpreted if sys.argv[1] == "interpret" else compiled)()))
