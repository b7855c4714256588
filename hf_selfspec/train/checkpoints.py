"""Checkpoints of fits, from which a fit that was stopped resumes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import SettingError
from ..learned.files import path_of, reported, written_whole

# Which fit the checkpoints in a folder belong to, as long as it has not ended.
_RECORD = "fit.json"
# Arguments of the Trainer that decide what is fitted.
_DECIDING = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "seed", "data_seed", "lr_scheduler_type", "warmup_steps", "weight_decay",
)  # fmt: skip


def checkpoints_of(output_dir: str | os.PathLike[str]) -> str:
    """The folder for the checkpoints of a fit, until its result is written to ``output_dir``."""
    return f"{os.path.normpath(path_of(output_dir))}-checkpoints"


def forget(args: TrainingArguments, output_dir: str | os.PathLike[str] | None) -> None:
    """Ends a fit, which the next one in that folder will not resume.

    The main process removes the checkpoints, but those that the user has asked for.
    """
    if PartialState().is_main_process:
        if args.output_dir is not None and args.save_strategy != "no":
            Path(args.output_dir, _RECORD).unlink(missing_ok=True)
        if output_dir is not None:
            shutil.rmtree(checkpoints_of(output_dir), ignore_errors=True)


def last_checkpoint(args: TrainingArguments, fit: str, rows: torch.Tensor) -> str | None:
    """Returns the checkpoint from which a fit resumes, ``None`` to begin; the first call records which fit it is.

    Raises if the folder holds another fit: of another module or model (``fit``), text, or with other arguments.
    """
    if args.save_strategy == "no" or args.output_dir is None:
        return None
    folder = Path(args.output_dir)
    wanted = {name: str(getattr(args, name)) for name in _DECIDING}
    wanted |= {"part": fit, "text": hashlib.sha256(rows.numpy().tobytes()).hexdigest()}
    record = folder / _RECORD
    with reported(folder), PartialState().main_process_first():
        if not record.exists():
            with written_whole(record) as beside:
                beside.write_text(json.dumps(wanted | {"earlier": _states(folder)}), encoding="utf-8")
            return None
    found = json.loads(record.read_text(encoding="utf-8"))
    earlier = found.pop("earlier", {})
    other = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if other:
        raise SettingError(
            f"{folder} holds a fit that was stopped, with another {', '.join(other)}. Repeat its settings to "
            "resume it, remove that folder to start again, or write to another folder."
        )
    own = [folder / name for name, state in _states(folder).items() if earlier.get(name) != state]
    return str(max(own, key=lambda path: (path / TRAINER_STATE_NAME).stat().st_mtime_ns)) if own else None


def _states(folder: Path) -> dict[str, str]:
    """The checkpoints in a folder, each with what its state hashes to."""
    states = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    return {state.parent.name: hashlib.sha256(state.read_bytes()).hexdigest() for state in states}
