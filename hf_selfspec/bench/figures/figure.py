"""The type of a figure, and options that several figures share."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..measure import machine
from ..synthetic import LlamaShape

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        help: what it shows, in one line.
        add_options: declares its options.
        run: measures and prints Markdown.
        description: how it is measured, if one line is not enough.
    """

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    description: str = ""


def add_random_models(parser: argparse.ArgumentParser) -> None:
    """Declares options of random models."""
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024], help="hidden sizes")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=_DTYPES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--intermediate", type=int, help="MLP width, 8/3 of the hidden size by default")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--device", default="cpu")


def add_cases(parser: argparse.ArgumentParser, rows: Sequence[int], prompts: Sequence[int]) -> None:
    """Declares options of batch sizes and prompt lengths, with their defaults."""
    parser.add_argument("--rows", type=int, nargs="+", default=list(rows), help="batch sizes")
    parser.add_argument("--prompt", type=int, nargs="+", default=list(prompts), help="prompt lengths")


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, LlamaShape]]:
    """Yields the random models, with their names in tables."""
    for width in args.width:
        for name in args.dtype:
            dtype = getattr(torch, name)
            shape = LlamaShape(width, args.layers, args.intermediate, args.vocabulary, dtype=dtype, device=args.device)
            yield f"width {width}, {name}", shape


def print_head(args: argparse.Namespace, *about: str) -> None:
    """Prints the machine, the conditions and the command of the figures."""
    print("; ".join([machine(torch.device(getattr(args, "device", "cpu"))), *about]))
    print(f"\n`{args.command}`\n", flush=True)


def peak_of(args: argparse.Namespace, variant: str, **changed: object) -> float:
    """Runs the same figure for one variant in a process of its own, which prints one number.

    Args:
        args: the given options.
        variant: name of the variant.
        changed: options with other values, by name.

    Returns:
        The number, the peak memory in MiB.
    """
    words = [*args.words, "--peak-of", variant]
    for name, value in changed.items():
        words += [f"--{name}", str(value)]
    command = [sys.executable, "-m", "hf_selfspec.bench", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def print_row(*cells: str) -> None:
    """Prints a row of a table, without buffering."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_table_head(*names: str) -> None:
    """Prints the first lines of a table."""
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|", flush=True)
