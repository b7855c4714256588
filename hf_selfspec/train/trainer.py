"""Callbacks that change the model while ``transformers.Trainer``, or a loop without one, trains it, and undo it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..errors import SettingError, SettingTypeError, UnsupportedOptionError
from ..generate.seams import add_seam
from ..model.anatomy import causal_lm
from ..model.patching import InstanceForwards
from ..validation import check_count


class TrainingRun:
    """What a callback has attached to a model (a causal LM, or PEFT's wrapper around one) during one training."""

    def attach(self, model: Any) -> None: ...

    def detach(self) -> None: ...

    def begin_step(self, step: int, steps: int) -> None: ...

    def end_step(self) -> None:
        """Called before the weights change."""

    def logs(self) -> dict[str, float]:
        """What goes into the log besides the loss, of the time since the last log; called on all ranks."""
        return {}


class ModelCallback(TrainerCallback):
    """Attaches something to the model during ``Trainer.train``, one training at a time, and removes it afterwards."""

    _served = False
    _run = TrainingRun()  # of the current training

    def check(self, trainer: Trainer) -> None:
        """Raises if this training is not supported; called before it begins."""

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises if this model cannot be trained so; called before a training begins, whoever runs it."""

    def make_run(self, model: Any, seed: int) -> TrainingRun:
        raise NotImplementedError

    def detach(self) -> None:
        run, self._run = self._run, TrainingRun()
        run.detach()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self.detach()  # auto_find_batch_size begins again, with smaller batches
        if self._served:
            self._run = self.make_run(model, args.seed)
            self._run.attach(model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self._served:  # as where the callback was added meanwhile
            raise UnsupportedOptionError(
                f"{type(self).__name__} has to be among the callbacks before Trainer.train begins, and Trainer.train "
                "has to be the one that hf_selfspec wraps, see hf_selfspec.install."
            )
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
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        _check_parallelism(self.args.n_gpu, plugin is not None and getattr(plugin, "fsdp_version", 2) == 1)
        _check_callbacks("Trainer", callbacks, self.model)
        for callback in callbacks:
            callback.check(self)
        plain_log, forwards = self.log, InstanceForwards()

        @functools.wraps(plain_log)
        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                for callback in callbacks:
                    logs.update(callback._run.logs())
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


class TrainingLoop:
    """What :func:`training` gives a loop."""

    def __init__(self, runs: Sequence[TrainingRun], steps: int) -> None:
        self._runs, self._steps, self._step = runs, steps, 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds the forwards and backwards of one step, which may be of several batches, before the optimizer's.

        Raises:
            SettingError: all steps were taken.
            UnsupportedModelError: the step has trained nothing but the last layer.
        """
        if self._step >= self._steps:
            raise SettingError(f"training(steps={self._steps}) has taken all of its steps: give more.")
        for run in self._runs:
            run.begin_step(self._step, self._steps)
        yield
        for run in self._runs:
            run.end_step()
        self._step += 1

    def logs(self) -> dict[str, float]:
        """The means since the last call, as the ``Trainer`` logs them, over all processes; these all have to call."""
        return {name: value for run in self._runs for name, value in run.logs().items()}


@contextmanager
def training(model: Any, callbacks: Sequence[ModelCallback], steps: int, seed: int = 42) -> Iterator[TrainingLoop]:
    """Serves callbacks in a training loop of your own, without a ``Trainer``.

    ::

        with training(model, [EarlyExitLoss(), LayerDropout()], steps=1000) as loop:
            for batch in batches:
                with loop.step():
                    model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    With accelerate, the loop runs the prepared model, and this gets the one before, or ``unwrap_model`` of it.

    Args:
        model: a causal LM of transformers, or a PEFT model around one. Its own loss is trained, so batches have
            ``labels``.
        callbacks: :class:`EarlyExitLoss`, :class:`LayerDropout` or both.
        steps: number of optimizer steps ``T``, for curricula and schedules.
        seed: of the layers that are dropped.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
        UnsupportedModelError, UnsupportedOptionError: the model cannot be trained so.
    """
    check_count("training(steps)", steps)
    check_count("training(seed)", seed, least=0)
    if not callbacks or not all(isinstance(callback, ModelCallback) for callback in callbacks):
        raise SettingTypeError(
            f"training(callbacks) must be EarlyExitLoss(), LayerDropout() or both, got {callbacks!r}."
        )
    _check_callbacks("training", callbacks, model)
    # DataParallel runs its copies in other threads, in which nothing is trained: that is seen at the end of a step.
    _check_parallelism(1, any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()))
    with ExitStack() as stack:
        runs = [callback.make_run(model, seed) for callback in callbacks]
        for run in runs:
            stack.callback(run.detach)
            run.attach(model)
        yield TrainingLoop(runs, steps)


def _check_callbacks(name: str, callbacks: Sequence[ModelCallback], model: Any) -> None:
    for callback in callbacks:
        class_name = type(callback).__name__
        if sum(type(other) is type(callback) for other in callbacks) > 1:
            raise SettingError(f"{name}(callbacks) has more than one {class_name}: give one of each kind.")
        callback.check_model(causal_lm(model, class_name))


def _check_parallelism(count: int, is_first_fsdp: bool) -> None:
    refused = {
        f"One process with {count} GPUs (DataParallel) runs copies of the model in threads. Start one process per GPU "
        "with torchrun or accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES.": count > 1,
        "DeepSpeed ZeRO-3 gathers parameters only in the forwards that it knows. Use ZeRO-1, ZeRO-2 or "
        "FSDP2.": is_deepspeed_zero3_enabled(),
        'FSDP version 1 flattens the parameters. Set "fsdp_config": {"version": 2}, or fsdp_version: 2 in '
        "accelerate's configuration.": is_first_fsdp,
    }
    for why, is_set in refused.items():
        if is_set:
            raise UnsupportedOptionError(f"EarlyExitLoss and LayerDropout cannot train in this way. {why}")


add_seam(Trainer, "train", with_model_callbacks)
