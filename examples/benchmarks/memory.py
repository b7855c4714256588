"""Peak memory of a generation, plain and with drafts, each in a process of its own."""

from __future__ import annotations

import argparse

import torch
from engine import add_drafts, spec_of
from synthetic import add_random_models, random_prompt, shapes
from timing import load, peak_mib, peak_of, print_head, print_row, print_table_head

from hf_selfspec import SelfSpec

WAYS = ("plain", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_random_models(parser)
    add_drafts(parser)
    parser.add_argument("--model", help="folder or name of a model, which drafts by SelfSpec(); by default random ones")
    parser.add_argument("--rows", type=int, default=1, help="batch size")
    parser.add_argument("--prompt", type=int, default=512, help="prompt length")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of is not None:  # memory does not depend on the agreement
        model = next(shapes(args))[1].model() if args.model is None else load(args.model)[0]
        spec = spec_of(args) if args.model is None else SelfSpec()
        options = {} if args.peak_of == "plain" else {"assistant": spec}
        prompt = random_prompt(model, args.rows, args.prompt)
        model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0, **options)
        print(peak_mib(model.device))
        return
    print_head(args.device, f"{args.tokens} new tokens, greedy")
    print_table_head("case", "plain MiB", "ours MiB", "ours / plain")
    random = [(width, dtype) for width in args.width for dtype in args.dtype]
    cases = {f"width {width}, {dtype}": ["--width", str(width), "--dtype", dtype] for width, dtype in random}
    for name, words in cases.items() if args.model is None else [(f"{args.model}, float32", [])]:
        plain, ours = (peak_of(way, *words) for way in WAYS)
        print_row(name, f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.3f}")


if __name__ == "__main__":
    main()
