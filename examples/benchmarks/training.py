"""Step time and peak memory of training by the stock ``Trainer``, with early-exit loss and with layer dropout."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from synthetic import LlamaShape, add_random_models, random_prompt
from timing import Table, now, parsed, parser_with, peak_mib, peak_of, print_head
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_selfspec import EarlyExitLoss, LayerDropout, Rotational
from hf_selfspec.train import loss_scale

Callbacks = Callable[[], list[TrainerCallback]]
STEPS = 8

VARIANTS: dict[str, Callbacks] = {
    "plain": list,
    "exits, R = 8": lambda: [EarlyExitLoss(1.0, Rotational(8), scale=loss_scale)],
    "exits, R = 4": lambda: [EarlyExitLoss(1.0, Rotational(4), scale=loss_scale)],
    "dropout 0.2": lambda: [LayerDropout(0.2)],
}


class StepClock(TrainerCallback):
    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.begun = torch.device(device), [], 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = now(self.device)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(now(self.device) - self.begun)


def train(model: LlamaForCausalLM, callbacks: Callbacks, args: argparse.Namespace, bf16: bool, steps: int) -> float:
    """Trains by the stock ``Trainer`` and returns the mean seconds of a step."""
    clock = StepClock(args.device)
    rows = random_prompt(model, args.rows * steps, args.prompt)["input_ids"].cpu()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=args.rows,
            bf16=bf16,
            use_cpu=args.device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            learning_rate=1e-5,
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # the first one is measured, and copies of a model are refused by our callbacks
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[*callbacks(), clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return statistics.fmean(clock.seconds)


def main() -> None:
    parser = parser_with(__doc__, rows=2, prompt=512, repeats=7)
    add_random_models(parser)
    parser.add_argument("--peak-of", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    args = parsed(parser)
    for width in args.width:
        for dtype in args.dtype:  # the weights are float32, with autocast for bfloat16
            shape, bf16 = LlamaShape(width, args.layers, args.intermediate, args.vocabulary), dtype == "bfloat16"
            model = shape.model()
            if args.peak_of is not None:
                train(model, VARIANTS[args.peak_of], args, bf16, STEPS)
                print(peak_mib(torch.device(args.device)))
                return
            memory = {name: peak_of(name, "--width", str(width), "--dtype", dtype) for name in VARIANTS}
            train(model, VARIANTS["plain"], args, bf16, 1)
            # medians of means of 8 steps, one rotation of the exits
            turns = [
                [train(model, callbacks, args, bf16, STEPS) for callbacks in VARIANTS.values()]
                for _ in range(args.repeats)
            ]
            seconds = dict(zip(VARIANTS, map(statistics.median, zip(*turns, strict=True)), strict=True))
            print_head(args.device, "stock Trainer, AdamW, random tokens", f"{shape}, {dtype}")
            table = Table("callbacks", "s/step", "ratio", "peak MiB", "ratio")
            for name in VARIANTS:
                ratios = seconds[name] / seconds["plain"], memory[name] / memory["plain"]
                table.row(name, f"{seconds[name]:.2f}", f"{ratios[0]:.2f}", f"{memory[name]:.0f}", f"{ratios[1]:.3f}")


if __name__ == "__main__":
    main()
