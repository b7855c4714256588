"""Measures the cost of early-exit loss and layer dropout in a training step of the stock ``Trainer``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ..train import EarlyExitLoss, LayerDropout, Rotational
from ..transfer import wait_for
from .resident import peak_resident_bytes

Callbacks = Callable[[], list[TrainerCallback]]

VARIANTS: dict[str, Callbacks] = {
    "plain": list,
    "exits, R = 8": lambda: [EarlyExitLoss(1.0, Rotational(8))],
    "exits, R = 4": lambda: [EarlyExitLoss(1.0, Rotational(4))],
    "dropout 0.2": lambda: [LayerDropout(0.2)],
}


@dataclass(frozen=True)
class TrainingShape:
    """A training of a random Llama on random tokens.

    Attributes:
        width, layers, intermediate, vocabulary: sizes of the model.
        batch, tokens: number of sequences in a step, and their length.
        bf16: bfloat16 autocast over float32 weights.
    """

    width: int
    layers: int
    intermediate: int
    vocabulary: int
    batch: int
    tokens: int
    bf16: bool

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=max(1, self.width // 128),
            max_position_embeddings=self.tokens,
        )
        return LlamaForCausalLM(config)


class _RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, shape: TrainingShape, length: int) -> None:
        generator = torch.Generator("cpu").manual_seed(1)
        self.ids = torch.randint(shape.vocabulary, (length, shape.tokens), generator=generator, device="cpu")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class _StepClock(TrainerCallback):
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        wait_for(self.device)
        self._begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wait_for(self.device)
        self.seconds.append(time.perf_counter() - self._begun)


@dataclass(frozen=True)
class Trained:
    """The result of a short training.

    Attributes:
        seconds: time of each step.
        loss: mean over the steps.
    """

    seconds: list[float]
    loss: float


def train(model: LlamaForCausalLM, shape: TrainingShape, callbacks: Callbacks, steps: int, device: str) -> Trained:
    """Trains for ``steps`` steps with the stock ``Trainer``."""
    clock = _StepClock(torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=shape.batch,
            bf16=shape.bf16,
            use_cpu=device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            learning_rate=1e-5,
        )
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # the first one is measured, and copies of a model are refused by our callbacks
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=_RandomTokens(shape, shape.batch * steps),
            callbacks=[*callbacks(), clock],
        )
        loss = trainer.train().training_loss
    return Trained(clock.seconds, loss)


def step_seconds(shape: TrainingShape, cycles: int, device: str) -> dict[str, float]:
    """Seconds per step of each variant: medians of ``cycles`` means of 8 steps (one rotation of the exits), in turn."""
    model = shape.model()
    train(model, shape, VARIANTS["plain"], 1, device)
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(cycles):
        for name, callbacks in VARIANTS.items():
            found[name].append(statistics.fmean(train(model, shape, callbacks, 8, device).seconds))
    return {name: statistics.median(means) for name, means in found.items()}


def peak_training_memory(shape: TrainingShape, variant: str, device: str) -> float:
    """Peak memory in MiB of 8 training steps; on a CPU each variant needs a process of its own.

    Resident memory on a CPU, allocated memory on a GPU.
    """
    train(shape.model(), shape, VARIANTS[variant], 8, device)
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_resident_bytes() / 2**20
