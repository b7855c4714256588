"""Whether several tokens have the results of single ones, bit for bit, and what that costs, by layer and kernel."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from gpu import SHAPES, shape_of
from synthetic import DTYPES, LlamaShape
from timing import print_head, print_row, print_table_head
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.exact import MOST_TOKENS, are_alike
from hf_selfspec.model.invariance import differing_part, price_of

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
KEYS, QUERIES = 1024, 8


def linears(name: str, model: torch.nn.Module) -> None:
    known = {module.weight.shape: module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    for size, module in known.items():
        states = module.weight.new_zeros(1, MOST_TOKENS, size[1])
        counts = [count for count in range(2, MOST_TOKENS + 1) if not are_alike(states[:, :count], 1, module)]
        print_row(name, f"linear layer, {size[0]} x {size[1]}", f"other results for {counts}" if counts else "alike")


def attention(shape: LlamaShape, kernel: str) -> str:
    size = shape.width // shape.heads
    of = {"device": shape.device, "dtype": shape.dtype}
    query = torch.randn(1, shape.heads, QUERIES, size, **of)
    key, value = torch.randn(2, 1, shape.heads, KEYS, size, **of)
    try:
        with sdpa_kernel(KERNELS[kernel]):
            alone = [scaled_dot_product_attention(one, key, value) for one in query.split(1, dim=2)]
            together = scaled_dot_product_attention(query, key, value)
    except RuntimeError as error:
        return f"not here ({str(error).splitlines()[0]})"
    return "alike" if torch.equal(together, torch.cat(alone, dim=2)) else "other results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b", "13b"], choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    print_head(args.device, f"{args.dtype}, 2 to {MOST_TOKENS} tokens")
    print_table_head("model", "what", "several tokens together")
    for name in args.shapes:
        shape = replace(shape_of(args, name, args.dtype), layers=args.layers)
        model = shape.model()
        linears(name, model)
        for kernel in KERNELS:
            print_row(name, f"{kernel} attention, {QUERIES} queries over {KEYS} keys", attention(shape, kernel))
        part, price = differing_part(model, anatomy := Anatomy.of(model)), price_of(model, anatomy)
        print_row(
            name, f"{args.layers} layers, exact", f"{part or 'all'} {'differs' if part else 'alike'}, {price:+.0%}"
        )


if __name__ == "__main__":
    main()
