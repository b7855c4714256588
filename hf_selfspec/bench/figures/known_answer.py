"""How well searches find the half of the blocks that hardly matters."""

from __future__ import annotations

import argparse

from .. import known_answer
from ..synthetic import known_skips_llama
from .figure import Figure, add_random_models, print_head, shapes

_AGREEMENT, _RATIO = 0.95, 0.5


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_random_models(parser)
    parser.add_argument("--agreement", type=float, default=_AGREEMENT, help="how often the known set agrees")
    parser.add_argument("--steps", type=int, default=552, help="number of sets that each search tries")
    parser.add_argument("--plot", help="file for a plot")


def _run(args: argparse.Namespace) -> None:
    """Runs all searches on the first model."""
    _, shape = next(shapes(args))
    model, known, agreement = known_skips_llama(shape, agreement=args.agreement)
    print_head(args, f"synthetic acceptance, the known set agrees on {agreement:.2f}", str(shape))
    print(known_answer.HEAD)
    courses = {}
    for name, settings in known_answer.proposers(args.steps).items():
        courses[name] = known_answer.follow(model, known, _RATIO, settings)
        print(courses[name].row(name), flush=True)
    if args.plot is not None:
        known_answer.plot(courses, f"{args.layers} layers of width {args.width[0]}", args.plot)


FIGURE = Figure("how well searches find the half of the blocks that hardly matters", _add_options, _run)
