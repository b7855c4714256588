"""Peak memory of a generation, each way in a process of its own."""

from __future__ import annotations

import argparse
import json

from ..engine import peak_memory
from .engine import add_drafts, spec_of
from .figure import Figure, add_cases, add_random_models, peak_of, print_head, print_row, print_table_head, shapes

_WAYS = ("plain", "ours")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_random_models(parser)
    add_drafts(parser)
    add_cases(parser, (1,), (512,))
    parser.add_argument("--peak-of", choices=_WAYS, help=argparse.SUPPRESS)


def _run(args: argparse.Namespace) -> None:
    if args.peak_of is not None:  # memory does not depend on the agreement
        ((_, shape),) = shapes(args)
        spec = None if args.peak_of == "plain" else spec_of(args)
        print(json.dumps(peak_memory(shape.model(), spec, args.rows[0], args.prompt[0], args.tokens)))
        return
    print_head(args, f"{args.tokens} new tokens, greedy")
    print_table_head("case", "plain MiB", "ours MiB", "ours / plain")
    for width in args.width:
        for dtype in args.dtype:
            plain, ours = (peak_of(args, way, width=width, dtype=dtype) for way in _WAYS)
            print_row(f"width {width}, {dtype}", f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.3f}")


FIGURE = Figure("peak memory", _add_options, _run)
