"""Callbacks of ``transformers.Trainer`` that change the model while it trains, and undo it."""

import functools
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..errors import SettingError, UnsupportedOptionError
from ..hooks.seams import add_seam
from ..model.patching import InstanceForwards


class TrainingRun:
    """What a callback has attached to a model (a causal LM, or PEFT's wrapper around one) during one training."""

    def attach(self, model: Any) -> None: ...

    def detach(self) -> None: ...

    def begin_step(self, step: int, steps: int) -> None: ...

    def end_step(self) -> None:
        """Called before the weights change."""

    def logs(self, trainer: Trainer) -> dict[str, float]:
        """What goes into the Trainer's log besides the loss; called on all ranks."""
        return {}


class ModelCallback(TrainerCallback):
    """Attaches something to the model during ``Trainer.train``, one training at a time, and removes it afterwards."""

    _served = False
    _run = TrainingRun()  # of the current training

    def check(self, trainer: Trainer) -> None:
        """Raises if this training is not supported; called before it begins."""

    def make_run(self, model: Any, args: TrainingArguments) -> TrainingRun:
        raise NotImplementedError

    def detach(self) -> None:
        run, self._run = self._run, TrainingRun()
        run.detach()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if not self._served:
            raise UnsupportedOptionError(
                f"{type(self).__name__} has to be among the callbacks before Trainer.train begins, and Trainer.train "
                "has to be the one that hf_selfspec wraps, see hf_selfspec.install."
            )
        self.detach()  # auto_find_batch_size begins again, with smaller batches
        self._run = self.make_run(model, args)
        self._run.attach(model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._run.begin_step(state.global_step, state.max_steps)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._run.end_step()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.detach()


def with_model_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Trainer.train`` to serve this package's callbacks and clean up after them."""

    @functools.wraps(original)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        callbacks = [entry for entry in self.callback_handler.callbacks if isinstance(entry, ModelCallback)]
        if not callbacks:
            return original(self, *args, **kwargs)
        _check_training(self)
        for callback in callbacks:
            if sum(type(other) is type(callback) for other in callbacks) > 1:
                name = type(callback).__name__
                raise SettingError(f"Trainer(callbacks) has more than one {name}: give one of each kind.")
            callback.check(self)
        plain_log, forwards = self.log, InstanceForwards()

        @functools.wraps(plain_log)
        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                for callback in callbacks:
                    logs.update(callback._run.logs(self))
            plain_log(logs, *args, **kwargs)

        try:
            for callback in callbacks:
                callback._served = True
            forwards.put(self.__dict__, "log", log)
            return original(self, *args, **kwargs)
        finally:
            forwards.close()
            for callback in reversed(callbacks):
                callback._served = False
                callback.detach()

    return train


def _check_training(trainer: Trainer) -> None:
    count, plugin = trainer.args.n_gpu, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    refused = {
        f"One process with {count} GPUs (DataParallel) runs copies of the model in threads. Start one process per GPU "
        "with torchrun or accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES.": count > 1,
        "DeepSpeed ZeRO-3 gathers parameters only in the forwards that it knows. Use ZeRO-1, ZeRO-2 or "
        "FSDP2.": is_deepspeed_zero3_enabled(),
        'FSDP version 1 flattens the parameters. Set "fsdp_config": {"version": 2}, or fsdp_version: 2 in '
        "accelerate's configuration.": plugin is not None and getattr(plugin, "fsdp_version", 2) == 1,
    }
    for why, is_set in refused.items():
        if is_set:
            raise UnsupportedOptionError(f"EarlyExitLoss and LayerDropout cannot train in this way. {why}")


add_seam(Trainer, "train", with_model_callbacks)
