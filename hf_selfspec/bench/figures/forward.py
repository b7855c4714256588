"""Our forwards over 1 to 32 tokens, in units of transformers' own over one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ...loading import NamedModel
from ..forward import COUNTS, forward_seconds
from .figure import Figure, add_random_models, print_head, print_row, print_table_head, shapes


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_random_models(parser)
    parser.add_argument("--model", help="folder or name of the model; random models by default")
    parser.add_argument("--prompt", type=int, default=300, help="number of tokens before")
    parser.add_argument("--repeats", type=int, default=7)


def _models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel]]:
    if args.model is None:
        for name, shape in shapes(args):
            yield name, shape.model()
        return
    named = NamedModel.find(args.model)
    for dtype in args.dtype:
        yield f"{args.model}, {dtype}", named.model(dtype, torch.device(args.device))


def _run(args: argparse.Namespace) -> None:
    print_head(args, f"{args.prompt} tokens before", f"medians of {args.repeats}")
    print_table_head("forward, in transformers' over one token", *map(str, COUNTS))
    for name, model in _models(args):
        theirs, ours = forward_seconds(model, args.prompt, args.repeats)
        for whose, seconds in (("transformers", theirs), ("ours", ours)):
            print_row(f"{name}, {whose}", *(f"{seconds[count] / theirs[1]:.2f}" for count in COUNTS))


FIGURE = Figure("our forwards over 1 to 32 tokens relative to transformers' own over one", _add_options, _run)
