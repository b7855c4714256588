"""Fits in several processes, which ``torchrun`` starts."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from helpers.fitted import EXIT, rows
from helpers.models import tiny_llama
from hf_selfspec import fit_adapter, fit_exit_heads, fit_probe
from hf_selfspec.modules.draft_module import DraftModule
from hf_selfspec.train.fit_trainer import training_arguments


def fit_all(args: TrainingArguments, folder: Path | None = None) -> dict[str, DraftModule]:
    """An adapter, heads and a probe, fitted to the same model."""
    model = tiny_llama(factor=2.0)
    found: dict[str, DraftModule] = {}
    for name, fit, options in (
        ("adapter", fit_adapter, {"exit_layer": EXIT}),
        ("heads", fit_exit_heads, {"num_heads": 2}),
        ("probe", fit_probe, {"exit_layer": EXIT}),
    ):
        out = None if folder is None else folder / name
        given: dict[str, Any] = {"block_size": 32, "args": args, "output_dir": out, **options}
        found[name] = fit(model, None, rows(43), **given)
    return found


def main(folder: Path) -> None:
    """Fits on all processes; rank 0 keeps what was fitted, every rank its weights."""
    torch.set_num_threads(1)
    args = training_arguments(
        str(folder / "trash"), torch.device("cpu"), disable_tqdm=True, logging_steps=1, warmup_steps=0,
        per_device_train_batch_size=4, max_steps=5, learning_rate=1e-2, seed=3,
    )  # fmt: skip
    weights = {name: part.state_dict() for name, part in fit_all(args, folder).items()}
    torch.save(weights, folder / f"{args.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
