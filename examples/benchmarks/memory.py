"""Peak memory of a generation, plain and with drafts, each in a process of its own."""

from __future__ import annotations

import argparse

from synthetic import add_random_models, random_prompt, shapes
from timing import Table, load, parsed, parser_with, peak_mib, peak_of, print_head

from hf_selfspec import EarlyExit, FixedLength, SelfSpec

WAYS = ("plain", "ours")


def main() -> None:
    parser = parser_with(__doc__, rows=1, prompt=512, exit_layer=4, num_draft=4, tokens=96)
    add_random_models(parser)
    parser.add_argument("--model", help="folder or name of a model, which drafts by SelfSpec(); by default random ones")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parsed(parser)
    if args.peak_of is not None:  # memory does not depend on the agreement
        model = next(shapes(args))[1].model() if args.model is None else load(args.model)[0]
        exit_draft = EarlyExit(args.exit_layer), FixedLength(args.num_draft)
        spec = SelfSpec(*exit_draft) if args.model is None else SelfSpec()
        options = {} if args.peak_of == "plain" else {"assistant": spec}
        prompt = random_prompt(model, args.rows, args.prompt)
        model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0, **options)
        print(peak_mib(model.device))
        return
    print_head(args.device, f"{args.tokens} new tokens, greedy")
    table = Table("case", "plain MiB", "ours MiB", "ours / plain")
    random = [(width, dtype) for width in args.width for dtype in args.dtype]
    cases = {f"width {width}, {dtype}": ["--width", str(width), "--dtype", dtype] for width, dtype in random}
    for name, words in cases.items() if args.model is None else [(f"{args.model}, float32", [])]:
        plain, ours = (peak_of(way, *words) for way in WAYS)
        table.row(name, f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.3f}")


if __name__ == "__main__":
    main()
