"""Fits in several processes, which ``torchrun`` starts."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from helpers.fitted import EXIT, arguments, rows
from helpers.models import character_tokenizer, tiny_llama
from hf_selfspec import fit_adapter, fit_exit_heads, fit_mtp, fit_probe
from hf_selfspec.modules.draft_module import DraftModule


def fit_all(args: TrainingArguments, folder: Path | None = None) -> dict[str, DraftModule]:
    """An adapter, heads, a probe and an MTP head, fitted to the same model."""
    model, tokenizer = tiny_llama(factor=2.0), character_tokenizer()
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adapter": (fit_adapter, {"exit_layer": EXIT}),
        "heads": (fit_exit_heads, {"num_heads": 2}),
        "probe": (fit_probe, {"exit_layer": EXIT}),
        "mtp": (fit_mtp, {"steps": 2}),
    }
    found: dict[str, DraftModule] = {}
    for name, (fit, options) in kinds.items():
        out = None if folder is None else folder / name
        found[name] = fit(model, tokenizer, rows(43), block_size=32, args=args, output_dir=out, **options)
    return found


if __name__ == "__main__":  # rank 0 keeps what was fitted, every rank its weights
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    args = arguments(place / "trash", per_device_train_batch_size=4, max_steps=5, learning_rate=1e-2, seed=3)
    weights = {name: part.state_dict() for name, part in fit_all(args, place).items()}
    torch.save(weights, place / f"{args.process_index}.pt")
