"""Step time and peak memory of training by the stock ``Trainer``, with early-exit loss and with layer dropout."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from synthetic import LlamaShape, add_random_models
from timing import peak_mib, peak_of, print_head, print_row, print_table_head
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_selfspec import EarlyExitLoss, LayerDropout, Rotational
from hf_selfspec.model.transfer import wait_for
from hf_selfspec.train import loss_scale

Callbacks = Callable[[], list[TrainerCallback]]
STEPS = 8

VARIANTS: dict[str, Callbacks] = {
    "plain": list,
    "exits, R = 8": lambda: [EarlyExitLoss(1.0, Rotational(8), scale=loss_scale)],
    "exits, R = 4": lambda: [EarlyExitLoss(1.0, Rotational(4), scale=loss_scale)],
    "dropout 0.2": lambda: [LayerDropout(0.2)],
}


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, vocabulary: int, rows: int, tokens: int) -> None:
        generator = torch.Generator("cpu").manual_seed(1)
        self.ids = torch.randint(vocabulary, (rows, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class StepClock(TrainerCallback):
    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.begun = device, [], 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        wait_for(self.device)
        self.begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wait_for(self.device)
        self.seconds.append(time.perf_counter() - self.begun)


def train(
    model: LlamaForCausalLM, callbacks: Callbacks, rows: int, tokens: int, bf16: bool, device: str, steps: int = STEPS
) -> list[float]:
    """Trains by the stock ``Trainer`` and returns the seconds of each step."""
    clock = StepClock(torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            bf16=bf16,
            use_cpu=device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            learning_rate=1e-5,
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # the first one is measured, and copies of a model are refused by our callbacks
        data = RandomTokens(model.config.vocab_size, rows * steps, tokens)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[*callbacks(), clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds


def step_seconds(model: LlamaForCausalLM, cycles: int, *given: Any) -> dict[str, float]:
    """Seconds per step of each variant: medians of ``cycles`` means of 8 steps (one rotation of the exits), in turn."""
    train(model, VARIANTS["plain"], *given, steps=1)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(cycles):
        for name, callbacks in VARIANTS.items():
            found[name].append(statistics.fmean(train(model, callbacks, *given)))
    return {name: statistics.median(means) for name, means in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_random_models(parser)
    parser.add_argument("--rows", type=int, default=2, help="sequences in a step")
    parser.add_argument("--prompt", type=int, default=512, help="their length")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak-of", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for width in args.width:
        for dtype in args.dtype:  # the weights are float32, with autocast for bfloat16
            shape = LlamaShape(width, args.layers, args.intermediate, args.vocabulary, args.prompt)
            given = args.rows, args.prompt, dtype == "bfloat16", args.device
            if args.peak_of is not None:
                train(shape.model(), VARIANTS[args.peak_of], *given)
                print(peak_mib(torch.device(args.device)))
                return
            memory = {name: peak_of(name, "--width", str(width), "--dtype", dtype) for name in VARIANTS}
            seconds = step_seconds(shape.model(), args.repeats, *given)
            print_head(args.device, "stock Trainer, AdamW, random tokens", f"{shape}, {dtype}")
            print_table_head("callbacks", "s/step", "ratio", "peak MiB", "ratio")
            for name in VARIANTS:
                ratios = seconds[name] / seconds["plain"], memory[name] / memory["plain"]
                print_row(name, f"{seconds[name]:.2f}", f"{ratios[0]:.2f}", f"{memory[name]:.0f}", f"{ratios[1]:.3f}")


if __name__ == "__main__":
    main()
