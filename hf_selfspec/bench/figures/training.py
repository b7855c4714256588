"""Step time and peak memory of training, with early-exit loss and with layer dropout."""

from __future__ import annotations

import argparse
import itertools
import json

from ..training import VARIANTS, TrainingShape, peak_training_memory, step_seconds
from .figure import Figure, add_cases, add_random_models, peak_of, print_head, print_row, print_table_head


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_random_models(parser)
    add_cases(parser, (2,), (512,))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak-of", choices=tuple(VARIANTS), help=argparse.SUPPRESS)


def _run(args: argparse.Namespace) -> None:
    for width, dtype, rows, tokens in itertools.product(args.width, args.dtype, args.rows, args.prompt):
        shape = TrainingShape(
            width=width,
            layers=args.layers,
            intermediate=args.intermediate or width * 8 // 3 // 64 * 64,
            vocabulary=args.vocabulary,
            batch=rows,
            tokens=tokens,
            bf16=dtype == "bfloat16",
        )
        if args.peak_of is not None:
            print(json.dumps(peak_training_memory(shape, args.peak_of, args.device)))
            return
        changed = {"width": width, "dtype": dtype, "rows": rows, "prompt": tokens}
        _table(args, shape, {name: peak_of(args, name, **changed) for name in VARIANTS})


def _table(args: argparse.Namespace, shape: TrainingShape, memory: dict[str, float]) -> None:
    print_head(args, "stock Trainer, AdamW, random tokens", str(shape))
    print_table_head("callbacks", "s/step", "ratio", "peak MiB", "ratio")
    seconds = step_seconds(shape, args.repeats, args.device)
    for name in VARIANTS:
        ratios = seconds[name] / seconds["plain"], memory[name] / memory["plain"]
        print_row(name, f"{seconds[name]:.2f}", f"{ratios[0]:.2f}", f"{memory[name]:.0f}", f"{ratios[1]:.3f}")


FIGURE = Figure("step time and peak memory of training with EarlyExitLoss and LayerDropout", _add_options, _run)
