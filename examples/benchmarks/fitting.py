"""What the figures of fitted parts share: parts are fitted once, and methods are timed on prompts of several kinds.

Parts are fitted to the first files of the standard library's training part, in rows of 256 tokens, for one epoch, and
saved in ``--out``; another run reuses what is there. Prompts are 64 tokens of the texts of ``--data`` and of held-out
files, in float32; every method is timed on each prompt in turn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from corpus import held_out_texts, standard_library
from timing import Table, Way, add_numbers, add_trained, compare, load, parsed, print_head, prompts_of
from transformers import TrainingArguments

from hf_selfspec import SelfSpec
from hf_selfspec.train.loading import read_prompts

COLUMNS = ("method", "speed-up", "mean over prompts, 95 %", "α", "M", "mean exit layer", "discarded", "same ids")


def trainer_arguments(out: Path, batch_size: int, **options: Any) -> TrainingArguments:
    """Of a fit on the CPU that saves and prints nothing but its part."""
    options |= {"lr_scheduler_type": "cosine", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return TrainingArguments(f"{out}-trainer", per_device_train_batch_size=batch_size, use_cpu=True, **options)


class Experiment:
    """A model, prompts and a folder of fitted parts, by the options of the command line."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        add_trained(parser, 10)
        add_numbers(parser, exit_layer=3, repeats=3)
        parser.add_argument("--files", type=int, default=250, help="number of files to fit on")
        parser.add_argument("--learning-rate", type=float, default=3e-3)
        parser.add_argument("--out", type=Path, default=Path("fitted"), help="folder for the fitted parts")
        self.args = args = parsed(parser)
        self.model, self.tokenizer = load(args.model)
        sources = [*map(read_prompts, args.data), held_out_texts()]
        prompts = [prompts_of(texts, self.tokenizer, args.prompts) for texts in sources]
        self.prompts = list(chain(*zip(*prompts, strict=True)))
        self.options: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False}
        print_head("cpu", "float32", f"{len(self.prompts)} prompts", f"{args.tokens} new tokens")

    def fitted(self, fit: Callable[..., Any], part_class: Any, name: str, **options: Any) -> Any:
        """Returns the part of that name, fitted now or in an earlier run, and prints its recipe and figures."""
        out = self.args.out / name
        if not (out / "model.safetensors").exists():
            rate = self.args.learning_rate
            arguments = trainer_arguments(out, 8, num_train_epochs=1, learning_rate=rate, warmup_steps=20)
            texts = standard_library().training[: self.args.files]
            fit(self.model, self.tokenizer, texts, args=arguments, output_dir=out, **options)
        part = part_class.from_pretrained(out)
        about = {**part.about["recipe"], **part.about["figures"]}
        print(f"{name}: {part.num_parameters:,} parameters; " + ", ".join(f"{k} {v}" for k, v in about.items()))
        return part

    def table(self, specs: dict[str, SelfSpec]) -> None:
        """Times the methods beside plain generate and prints a row for each."""
        ways: dict[str, Way] = {"plain": {}, **specs}
        speeds = compare(self.model, ways, self.prompts, self.options, self.args.repeats)
        plain = speeds.pop("plain")
        print()
        table = Table(*COLUMNS)
        for name, speed in speeds.items():
            ratios = [p / s for p, s in zip(plain.seconds, speed.seconds, strict=True)]
            spread = 1.96 * stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
            taken = [(layer, count) for run in speed.runs for layer, count in run.exit_layers.items()]
            depth = sum(layer * count for layer, count in taken) / max(sum(count for _, count in taken), 1)
            cells = [f"{plain.ms / speed.ms:.3f}", f"{mean(ratios):.3f} ± {spread:.3f}", f"{speed.alpha:.2f}"]
            cells += [f"{speed.length:.2f}", f"{depth:.1f}", str(sum(run.drafted - run.accepted for run in speed.runs))]
            table.row(name, *cells, f"{sum(speed.same)}/{len(speed.same)}")
