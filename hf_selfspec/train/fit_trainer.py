"""The stock ``transformers.Trainer`` for a small module beside a frozen model."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import PartialState
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalPrediction, IntervalStrategy, SaveStrategy

from ..errors import SettingError
from ..learned.files import path_of, reported, written_whole
from ..model.fingerprint import Fingerprint
from ..modules.draft_module import DraftModule
from .frozen_model import FrozenModel, HiddenStates
from .packing import PackedDataset
from .speedup import SpeedupEvaluator

# Which fit the checkpoints in a folder belong to, as long as it has not ended.
_RECORD = "fit.json"
# Arguments of the Trainer that decide what is fitted.
_DECIDING = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "seed", "data_seed", "lr_scheduler_type", "warmup_steps", "weight_decay",
)  # fmt: skip
# Steps between two checkpoints of a fit with the usual arguments.
SAVE_STEPS = 100
# Steps between two measurements with `patience`, unless the Trainer's arguments say, and their least number.
_EVERY, _LOOKS = 100, 10
# A smaller gain in speed may be chance.
_GAIN = 0.02


class FitModule(nn.Module):
    """What the Trainer trains: only the small module. The frozen model is not a submodule: it is not moved or saved."""

    def __init__(
        self,
        module: DraftModule,
        frozen: FrozenModel,
        loss: Callable[[Any, FrozenModel, HiddenStates], torch.Tensor],
        metrics: Callable[[Any, FrozenModel, HiddenStates], dict[str, torch.Tensor]],
        recipe: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.part = module  # the name in checkpoints
        self.description = f"{module.kind} {dict(recipe)} of {Fingerprint.of_decoder(frozen.model)}"
        self.names: tuple[str, ...] = ()
        self._seen = (frozen, loss, metrics)  # in a tuple, so that they do not become submodules

    def forward(self, input_ids: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        """Returns the loss for ids ``[b, s]``, and in evaluations the metrics ``[b, s, metrics]``; needs no labels."""
        frozen, loss, metrics = self._seen
        states = frozen.hidden_states(input_ids).to(next(self.part.parameters()).device)
        output = {"loss": loss(self.part, frozen, states)}
        if not self.training:
            found = metrics(self.part, frozen, states)
            self.names = tuple(found)
            output["metrics"] = torch.stack([values.view(input_ids.shape) for values in found.values()], -1)
        return output

    def means(self, evaluated: EvalPrediction) -> dict[str, float]:
        """The mean of each metric over all tokens."""
        means = evaluated.predictions.mean((0, 1))
        return {name: round(float(mean), 4) for name, mean in zip(self.names, means, strict=True)}


class FitTrainer(Trainer):
    """The stock Trainer, whose evaluations measure the module's speed-up too.

    ``eval_speedup`` is the speed of generation with the module over plain ``generate``. It decides which weights are
    kept, and when training ends: after ``patience`` evaluations in a row without a gain, or never for ``None``.
    """

    def __init__(
        self,
        model: FitModule,
        text: PackedDataset,
        held_out: PackedDataset,
        speedup: SpeedupEvaluator,
        args: TrainingArguments,
        patience: int | None,
        folder: str,  # a temporary one, for the best weights where the arguments save nothing
    ) -> None:
        super().__init__(
            model=model,
            args=args if patience is None else _stopping_early(args, len(text), folder),
            train_dataset=text,
            eval_dataset=held_out,
            data_collator=default_data_collator,
            compute_metrics=model.means,
            callbacks=[] if patience is None else [EarlyStoppingCallback(patience, _GAIN)],
        )
        self._module, self._speedup = model.part, speedup
        self._resumes = last_checkpoint(args, model.description, text.rows)

    def train(self, *args: Any, **options: Any) -> Any:
        """Trains, or resumes a fit that was stopped; after its last step, it only loads the weights."""
        last = self._resumes
        if last is None or not _has_ended(state := TrainerState.load_from_json(os.path.join(last, TRAINER_STATE_NAME))):
            return super().train(*args, resume_from_checkpoint=last, **options)
        self.state = state
        self._load_from_checkpoint(last)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
        return None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """As the stock one, with the speed-up among the metrics."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        speeds = self._speedup.metrics(self._module, in_training=self.is_in_train)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in speeds.items()})
        return output

    def _load_best_model(self) -> None:
        if self.state.best_metric:  # as long as the module cannot draft, the newest weights are the best
            super()._load_best_model()


def training_arguments(folder: str, device: torch.device, **changed: Any) -> TrainingArguments:
    """One epoch of AdamW at 1e-3 with 8 rows a batch, unless ``changed``."""
    usual: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 50,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": device.type == "cpu",
    }
    return TrainingArguments(**usual | changed)


def resumable_arguments(output_dir: str | os.PathLike[str], device: torch.device, **changed: Any) -> TrainingArguments:
    """The same with checkpoints beside ``output_dir``, of which the last one is kept."""
    kept = {"save_strategy": "steps", "save_steps": SAVE_STEPS, "save_total_limit": 1}
    return training_arguments(checkpoints_of(output_dir), device, **kept, **changed)


def _stopping_early(given: TrainingArguments, rows: int, folder: str) -> TrainingArguments:
    """The same arguments with an evaluation and a checkpoint from time to time, and the fastest weights at the end."""
    batch = given.train_batch_size * given.gradient_accumulation_steps * given.world_size
    steps = given.max_steps if given.max_steps > 0 else math.ceil(math.ceil(rows / batch) * given.num_train_epochs)
    args = copy.copy(given)
    if args.save_strategy == SaveStrategy.NO:
        args.output_dir, args.save_only_model, args.save_total_limit = folder, True, 1
    elif args.save_total_limit == 1:
        args.save_total_limit = 2  # the fastest and the last
    args.eval_strategy, args.save_strategy = IntervalStrategy.STEPS, SaveStrategy.STEPS
    args.eval_steps = args.save_steps = given.eval_steps or min(_EVERY, max(1, steps // _LOOKS))
    args.metric_for_best_model, args.greater_is_better, args.load_best_model_at_end = "speedup", True, True
    args.restore_callback_states_from_checkpoint = True
    return args


def _has_ended(state: TrainerState) -> bool:
    """Whether the training of a checkpoint was about to stop."""
    control: dict[str, Any] = state.stateful_callbacks["TrainerControl"]
    return bool(control["args"]["should_training_stop"])


@contextmanager
def seeded(args: TrainingArguments | None) -> Iterator[None]:
    """Applies the Trainer's seed to random numbers that are drawn outside of it, on the CPU unless told otherwise."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(42 if args is None else args.seed)
        yield


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
