"""Tiny trainings with the stock Trainer; as a script, those that ``torchrun`` starts in several processes."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from helpers.models import SPECIAL_TOKENS
from hf_selfspec import EarlyExitLoss, LayerDropout, Rotational
from hf_selfspec.train import loss_scale

VOCABULARY, WIDTH, LAYERS = 61, 10, 4
Row = dict[str, torch.Tensor]

# The name that transformers 5.23 has for it, if this transformers knows it.
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)


def tiny(
    layers: int = LAYERS, tied: bool = False, seed: int = 0, kind: type[LlamaForCausalLM] = LlamaForCausalLM
) -> Any:
    """A Llama with more heads than layers, all of whose layers and exits say different things."""
    torch.manual_seed(seed)
    return kind(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.3,
            tie_word_embeddings=tied,
            **SPECIAL_TOKENS,
        )
    )


@contextmanager
def rows_put_back(layers: Iterable[torch.nn.Module], kept: np.ndarray) -> Iterator[None]:
    """Layers run on all rows, and the rows that they drop get their inputs back."""
    handles = []
    for index, layer in enumerate(layers):

        def hook(
            module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any, rows: np.ndarray = kept[:, index]
        ) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            mixed = torch.where(torch.from_numpy(rows)[:, None, None], after, before)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        # Before the hooks with which transformers collects hidden states.
        handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rows(count: int, seed: int = 0) -> list[Row]:
    """Samples with 0 to 8 labels that are ignored, so that their numbers of targets differ."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(2, VOCABULARY, (WIDTH,), generator=generator)
        labels = ids.clone()
        labels[: index * 5 % 9] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def trainer(
    model: Any, callbacks: Sequence[TrainerCallback], folder: Path, data: Any = None, settings: Any = (), **options: Any
) -> Trainer:
    """A stock Trainer on the CPU: plain gradient descent on rows in their order, logging each step.

    Args:
        settings: other arguments of ``Trainer``.
        options: arguments of ``TrainingArguments``.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(**(defaults | options))
    if args.fsdp:
        # Accelerate shards where there are accelerators: it takes the processes for such, and shards on the CPU.
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return Trainer(
        model=model,
        args=args,
        train_dataset=rows(16) if data is None else data,
        callbacks=list(callbacks),
        **dict(settings),
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class RowsSeen(TrainerCallback):
    """Counts the rows that the layers' MLPs run on.

    Attributes:
        steps: for each training step the rows of each layer.
        evaluations: for each evaluated batch the same.
    """

    def __init__(self, model: Any) -> None:
        self.steps: list[list[int]] = []
        self.evaluations: list[list[int]] = []
        for index, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(self._counter(index))
        self.model = model
        model.register_forward_pre_hook(self._start)

    def _start(self, module: Any, args: Any) -> None:
        (self.steps if module.training else self.evaluations).append([0] * len(self.model.model.layers))

    def _counter(self, index: int) -> Callable[..., None]:
        def count(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            (self.steps if module.training else self.evaluations)[-1][index] += args[0].shape[0]

        return count


def exits(every: int = 2) -> EarlyExitLoss:
    """LayerSkip's loss."""
    return EarlyExitLoss(1.0, Rotational(every), scale=loss_scale)


# What several processes do, and one does for comparison: callbacks, and arguments of TrainingArguments.
CASES: dict[str, tuple[Callable[[], list[TrainerCallback]], dict[str, Any]]] = {
    "exits": (lambda: [exits()], {}),
    "exits, accumulated": (lambda: [exits()], {"gradient_accumulation_steps": 2}),
    "exits, checkpointed": (lambda: [exits()], {CHECKPOINTING: True}),
    "dropout": (lambda: [LayerDropout(0.9)], {}),
    "both, checkpointed": (lambda: [LayerDropout(0.9), exits()], {CHECKPOINTING: True}),
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    },
}


def run_case(wrapper: str, case: str, folder: Path) -> None:
    """One training in this process and its siblings; leaves what it found in a file for each rank."""
    callbacks, options = CASES[case]
    model = tiny()
    seen = RowsSeen(model)
    with patch.dict(os.environ):  # in which TrainingArguments leave settings for accelerate
        run = trainer(
            model,
            [*callbacks(), seen],
            folder / "run",
            **({"per_device_train_batch_size": 2} | options | WRAPPERS[wrapper]),
        )
        assert run.args.world_size == 2
        run.train()
        found = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
            for name, value in run.accelerator.unwrap_model(run.model).named_parameters()
        }
    result = {
        "weights": found,
        "kind": type(run.model_wrapped).__name__,
        "rows": seen.steps,
        "logs": [entry for entry in run.state.log_history if "loss" in entry],
        "attributes": sorted(
            f"{name}.{key}"
            for name, module in run.model.named_modules()
            for key in module.__dict__
            if key in ("forward", "_loss_function")
        ),
    }
    torch.save(result, folder / f"{wrapper}-{case}-{run.args.process_index}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in WRAPPERS:
        for name in CASES:
            run_case(chosen, name, Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
