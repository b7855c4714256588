"""Figures of the engine itself, each a file: ``hf-selfspec measure FIGURE`` or ``python -m hf_selfspec.bench FIGURE``.

``hf-selfspec bench`` shows whether it pays with a model and prompts; these figures show where time and memory go.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

import torch

from ...errors import SettingError
from . import (
    batch,
    compiled,
    context,
    engine,
    exits,
    fitted,
    forward,
    grammar,
    known_answer,
    memory,
    searches,
    training,
)
from .figure import Figure

FIGURES: dict[str, Figure] = {
    "engine": engine.FIGURE,
    "context": context.FIGURE,
    "batch": batch.FIGURE,
    "memory": memory.FIGURE,
    "training": training.FIGURE,
    "known-answer": known_answer.FIGURE,
    "forward": forward.FIGURE,
    "compiled": compiled.FIGURE,
    "exits": exits.FIGURE,
    "searches": searches.FIGURE,
    "fitted": fitted.FIGURE,
    "grammar": grammar.FIGURE,
}
PROGRAM = "python -m hf_selfspec.bench"
GPU = "gpu"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}. See `{self.prog} --help`.")


def parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The command line: a figure, and its own options."""
    found = _Parser(
        prog=program,
        allow_abbrev=False,
        description="Figures of the engine itself.",
        epilog=f"`{GPU}` in place of a figure checks and times an accelerator; it has options of its own.",
    )
    choices = found.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    for name, figure in FIGURES.items():
        one = choices.add_parser(name, help=figure.help, description=figure.description or figure.help)
        figure.add_options(one)
        one.add_argument("--threads", type=int, default=1)
    return found


def main(words: Sequence[str], program: str = PROGRAM) -> int:
    """Measures one figure and prints it as Markdown tables; returns the exit code."""
    if list(words[:1]) == [GPU]:
        from ..gpu.command import main as gpu

        return gpu(words[1:])
    args = parser(program).parse_args(words)
    if args.threads < 1:
        raise SettingError(f"--threads must be at least 1, got {args.threads}.")
    torch.set_num_threads(args.threads)
    args.command, args.words = f"{program} {' '.join(words)}", list(words)
    FIGURES[args.figure].run(args)
    return 0
