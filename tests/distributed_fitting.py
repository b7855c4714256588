"""A fit in several processes, which ``torchrun`` starts."""

import sys
from pathlib import Path

import torch
from conftest import tiny_llama
from test_fitting import EXIT, rows

from hf_selfspec import fit_adapter
from hf_selfspec.train.fitting import training_arguments


def main(folder: Path) -> None:
    """Fits an adapter on all processes; rank 0 keeps it, every rank its weights."""
    torch.set_num_threads(1)
    model = tiny_llama(factor=2.0)
    args = training_arguments(
        str(folder / "trash"), torch.device("cpu"), disable_tqdm=True, logging_steps=1, warmup_steps=0,
        per_device_train_batch_size=4, max_steps=5, learning_rate=1e-2, seed=3,
    )  # fmt: skip
    adapter = fit_adapter(
        model, None, rows(43), exit_layer=EXIT, block_size=32, args=args, output_dir=folder / "adapter"
    )
    torch.save(adapter.state_dict(), folder / f"{args.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
