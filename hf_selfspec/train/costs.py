"""What a fit takes, told before it begins."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from .blocks import Blocks

if TYPE_CHECKING:
    from .fitting import Fitting

# A weight, its gradient and the two moments of Adam, in float32.
_BYTES_OF_A_PARAMETER = 16
# Seconds from which on a time is told in minutes.
_MINUTES = 100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitCosts:
    """What a fit takes.

    Attributes:
        parameters: that are trained.
        steps: of the optimiser.
        seconds: about how long training takes, from the time of one batch.
        memory: bytes of weights, gradients and moments, beside the model and what one batch needs.
        disk: bytes of states that are added to ``cache_dir``.
    """

    parameters: int
    steps: int
    seconds: float
    memory: int
    disk: int

    @classmethod
    def of(cls, fitting: Fitting, blocks: Blocks, args: TrainingArguments) -> FitCosts:
        """Costs of a fit, from the time of one batch, which changes nothing.

        Args:
            fitting: what is trained.
            blocks: the text.
            args: of the Trainer.
        """
        parameters = sum(parameter.numel() for parameter in fitting.parameters())
        batches = args.gradient_accumulation_steps
        epoch = math.ceil(len(blocks) / (args.train_batch_size * batches * args.world_size))
        steps = args.max_steps if args.max_steps > 0 else math.ceil(epoch * args.num_train_epochs)
        disk, known, kept = fitting.backbone.room_for(blocks.rows)
        with torch.random.fork_rng():
            fitting.seconds(blocks.rows[:1], known < 1)  # kernels are chosen, and devices begin
            looking, learning = fitting.seconds(blocks.rows[: args.train_batch_size], known < 1)
        first = min(steps, epoch)
        looks = (1 - known) * first + (1 - kept) * (steps - first)
        return cls(
            parameters=parameters,
            steps=steps,
            seconds=batches * (looks * looking + steps * learning),
            memory=_BYTES_OF_A_PARAMETER * parameters,
            disk=disk,
        )

    def __str__(self) -> str:
        disk = f", {_size(self.disk)} of states on disk" if self.disk else ""
        return (
            f"{self.parameters:,} parameters, {self.steps:,} steps, about {_duration(self.seconds)} of training, "
            f"{_size(self.memory)} of memory beside the model and a batch{disk}"
        )


def _size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:,.0f} min" if seconds >= _MINUTES else f"{seconds:,.0f} s"


def tell(costs: FitCosts, name: str) -> None:
    """Tells what a fit takes, once for all processes."""
    if PartialState().is_main_process:
        _logger.warning(f"{name}: {costs}.")
