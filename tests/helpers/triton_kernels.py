"""Prints as JSON how kernels of leaves round in Triton's interpreter (``interpret``), or which are compiled for an H200
(``compile``); a process of its own."""

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from triton.backends.compiler import GPUTarget
from triton.language import bfloat16, float32
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction

from hf_selfspec.model.kernels import triton_leaves

NORMS = (modeling_llama.LlamaRMSNorm, modeling_gpt_oss.GptOssRMSNorm, Gemma3RMSNorm)
ROTATIONS = {modeling_llama: True, modeling_qwen3: True, modeling_gpt_oss: False}


def differences(device: str = "cpu") -> dict[str, Any]:
    """The share of a kernel's results that are not those of transformers' code, and by how many roundings at most."""
    return {
        f"{name}, {dtype}": difference
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for name, difference in _differences(dtype, device).items()
    }


def _differences(dtype: torch.dtype, device: str) -> dict[str, Any]:
    random, found = torch.Generator().manual_seed(0), dict[str, Any]()

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).mul(3).to(device, dtype)

    def compare(name: str, values: torch.Tensor, own: torch.Tensor) -> None:
        apart, size = (values.float() - own.float()).abs(), own.float().abs()
        roundings = apart / (torch.finfo(dtype).eps * size + 2.0**-22 * size.max())
        found[name] = (values != own).float().mean().item(), roundings.max().item()

    for usual, norm_class in enumerate(NORMS):
        norm, x = norm_class(576).to(device, dtype), some(2, 3, 576)
        norm.weight.data = some(576)
        for form in triton_leaves.NORMS:
            compare(f"norm {usual} as {form}", triton_leaves.norm(norm.weight, 1e-6, form, x), norm(x))
    for file, has_two in ROTATIONS.items():
        for shape in ((2, 3), (1, 3), (2, 1)):  # angles of each row or of all, several tokens or one
            angles = some(*shape, 16 if has_two else 8)
            q, k = (some(2, shape[1], heads, 16).transpose(1, 2) for heads in (9, 3))
            own = file.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
            turned = triton_leaves.rotate(has_two, q, k, angles.cos(), angles.sin())
            for place in range(2):
                compare(f"rotation {place} of {file.__name__}, {shape}", turned[place], own[place])
    gate, up = some(2, 3, 2 * 1100).chunk(2, -1)
    compare("silu", triton_leaves.activate(True, gate, up), functional.silu(gate) * up)
    compare("gelu", triton_leaves.activate(False, gate, up), functional.gelu(gate, approximate="tanh") * up)
    return found


def interpreted() -> dict[str, Any]:
    """Triton's interpreter cuts numbers off in bfloat16, where devices round them."""
    before = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (float32, bfloat16):
            return before(values, source, target, mode)
        return torch.from_numpy(np.array(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    with patch.object(interpreter, "_convert_float", convert):
        return differences()


def compiled() -> dict[str, Any]:
    """For each kernel that is launched its name, and whether it rounds some product and sum at once."""
    target, made, run = GPUTarget("cuda", 90, 32), dict[str, Any](), JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        made[kernel.hash] = self.__name__, "fma" in kernel.asm["ptx"]

    asked = {"get_current_device": 0, "get_current_target": target}
    device = {name: lambda value=value: value for name, value in asked.items()}
    driver.set_active(SimpleNamespace(get_current_stream=lambda device: 0, **device))
    with patch.object(JITFunction, "run", compile_only):
        differences()
    return made


if __name__ == "__main__":
    print(json.dumps((interpreted if sys.argv[1] == "interpret" else compiled)()))
