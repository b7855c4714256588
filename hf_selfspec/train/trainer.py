"""The one seam with ``transformers.Trainer``: callbacks that change the model while it trains, and leave no trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..errors import UnsupportedModelError, UnsupportedOptionError

_ORIGINAL = "_hf_selfspec_original"


class ModelCallback(TrainerCallback):
    """A callback that attaches something to the model for the time of ``Trainer.train``.

    What it attaches is gone when ``train`` returns or raises. One callback serves one training at a time.
    """

    def check(self, trainer: Trainer) -> None:
        """Raises if this training cannot be served; called before it begins."""

    def attach(self, model: PreTrainedModel, args: TrainingArguments, state: TrainerState) -> None:
        """Attaches to the causal LM (below PEFT and distributed wrappers)."""
        raise NotImplementedError

    def detach(self) -> None:
        """Takes back what :meth:`attach` did; harmless when there is nothing."""
        raise NotImplementedError

    def logs(self, trainer: Trainer) -> dict[str, float]:
        """What goes into the Trainer's log beside the loss; called on all ranks."""
        return {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self.detach()
        self.attach(causal_lm(model), args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.detach()


def causal_lm(model: Any) -> PreTrainedModel:
    """The transformers model below PEFT's wrapper."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"EarlyExitLoss and LayerDropout train causal LMs of transformers (and PEFT models around them), got "
            f"{type(inner).__name__}."
        )
    return inner


def install() -> None:
    """Makes ``Trainer.train`` clean up after this package's callbacks; done when the package is imported.

    Trainings without them are passed on untouched. Calling this again changes nothing.
    """
    if not hasattr(Trainer.train, _ORIGINAL):
        Trainer.train = _with_model_callbacks(Trainer.train)


def uninstall() -> None:
    """Takes :func:`install` back."""
    original = getattr(Trainer.train, _ORIGINAL, None)
    if original is not None:
        Trainer.train = original


def _with_model_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        callbacks = [found for found in self.callback_handler.callbacks if isinstance(found, ModelCallback)]
        if not callbacks:
            return original(self, *args, **kwargs)
        _check_training(self)
        for callback in callbacks:
            callback.check(self)
        log = self.log
        had_log = "log" in self.__dict__

        @functools.wraps(log)
        def log_with_exits(logs: dict[str, float], *log_args: Any, **log_kwargs: Any) -> None:
            if "loss" in logs:
                for callback in callbacks:
                    logs.update(callback.logs(self))
            log(logs, *log_args, **log_kwargs)

        self.log = log_with_exits
        try:
            return original(self, *args, **kwargs)
        finally:
            for callback in reversed(callbacks):
                callback.detach()
            if had_log:
                self.log = log
            else:
                self.__dict__.pop("log", None)

    setattr(train, _ORIGINAL, original)
    return train


def _check_training(trainer: Trainer) -> None:
    if trainer.args.n_gpu > 1:
        raise UnsupportedOptionError(
            f"one process with {trainer.args.n_gpu} GPUs (DataParallel) runs copies of the model in threads, which "
            "EarlyExitLoss and LayerDropout cannot follow. Start one process per GPU with torchrun or accelerate "
            "launch, or show one GPU with CUDA_VISIBLE_DEVICES."
        )
    if is_deepspeed_zero3_enabled():
        raise UnsupportedOptionError(
            "DeepSpeed ZeRO-3 keeps parameters away outside the forwards that it knows, which EarlyExitLoss and "
            "LayerDropout cannot serve. Use ZeRO-1, ZeRO-2 or FSDP2."
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 2) == 1:
        raise UnsupportedOptionError(
            "FSDP version 1 flattens the parameters, which EarlyExitLoss and LayerDropout cannot serve. Set "
            '"fsdp_config": {"version": 2}, or fsdp_version: 2 in accelerate\'s configuration.'
        )
