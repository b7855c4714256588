"""What all fits share: their settings, the path from a text to a fitted module, and functions made of settings."""

import copy
import inspect
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast, get_type_hints

import numpy as np
import torch
import torch.nn as nn
from accelerate import PartialState
from torch.utils.data import StackDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from transformers.trainer_utils import EvalPrediction

from ..errors import SettingError, SettingTypeError
from ..model.anatomy import causal_lm, max_positions
from ..model.internals import use_one_device
from ..modules.draft_module import DraftModule, about, not_finite
from ..validation import StrPath, check_count
from .exits import FrozenModel, HiddenStates
from .texts import Tokenizer, divided, packed

P = ParamSpec("P")
M = TypeVar("M", bound=DraftModule)

# Arguments of the Trainer where none are given.
USUAL_ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "logging_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass(frozen=True, kw_only=True)
class Fit(ABC, Generic[M]):
    """The settings of a fit, of which its function and its command are made.

    Attributes:
        command, function: the fit's name on the command line, and that of its function.
        output_dir: folder in which the module is saved, with a model card.
    """

    command: ClassVar[str]
    function: ClassVar[str]

    output_dir: StrPath | None = None

    def __init_subclass__(cls, command: str = "", function: str = "") -> None:
        super().__init_subclass__()
        cls.command, cls.function = command, function

    def check(self) -> None: ...

    def check_config(self, config: Any) -> None:
        """Checks the settings against the config of a model's text decoder."""

    def read(self, tokenizer: Tokenizer, dataset: Iterable[Any]) -> torch.Tensor:
        """Returns the text as rows of tokens ``[n, s]``; raises if there is too little."""
        return packed(tokenizer, dataset, 1, self.function)

    @abstractmethod
    def fit(self, model: Any, text: torch.Tensor) -> M: ...

    def __call__(self, model: Any, tokenizer: Tokenizer, dataset: Iterable[Any]) -> M:
        inner = causal_lm(model, self.function)
        self.check()
        self.check_config(inner.config.get_text_config(decoder=True))
        return self.fit(inner, self.read(tokenizer, dataset))


def as_function(settings: Callable[P, Fit[M]]) -> Callable[Concatenate[Any, Tokenizer, Iterable[Any], P], M]:
    """Returns the function of a fit: model, tokenizer and dataset, and the settings as keywords."""

    def fit(model: Any, tokenizer: Tokenizer, dataset: Iterable[Any], *args: P.args, **kwargs: P.kwargs) -> M:
        return settings(*args, **kwargs)(model, tokenizer, dataset)

    fit_class = cast(type[Fit[M]], settings)
    first, hints = list(inspect.signature(fit).parameters.values())[:3], get_type_hints(fit_class)
    named = [
        setting.replace(annotation=hints[name]) for name, setting in inspect.signature(fit_class).parameters.items()
    ]
    fit.__name__ = fit.__qualname__ = fit_class.function
    fit.__doc__, fit.__module__ = fit_class.__doc__, fit_class.__module__
    # The command line makes its command of the class.
    vars(fit).update(__signature__=inspect.Signature([*first, *named]), fit_class=fit_class)
    return fit  # type: ignore[return-value]  # its first arguments may be given by name, too


@dataclass(frozen=True, kw_only=True)
class TrainedFit(Fit[M]):
    """A fit that trains; the settings are described at :func:`fit_adapter`."""

    block_size: int = 256
    args: TrainingArguments | None = None
    callbacks: Sequence[TrainerCallback] = ()

    @abstractmethod
    def exit_layers(self, config: Any) -> Sequence[int]:
        """The layers whose states the module reads, for a model with this config."""

    def made(self, config: Any) -> Any:
        """Returns the module for a model with this config, where that is all it takes."""

    def module(self, frozen: FrozenModel) -> M:
        """Returns the module with which the fit of this model begins."""
        return cast(M, self.made(frozen.model.config.get_text_config(decoder=True)))

    @abstractmethod
    def loss(self, module: M, frozen: FrozenModel, states: HiddenStates) -> torch.Tensor: ...

    @abstractmethod
    def metrics(self, module: M, frozen: FrozenModel, states: HiddenStates) -> dict[str, torch.Tensor]:
        """Returns what is measured on held-out text, a value for each token ``[b s]`` by name."""

    @abstractmethod
    def recipe(self, module: M) -> dict[str, Any]:
        """Returns the settings that determine the module, for its card."""

    def finish(self, module: M, frozen: FrozenModel, held_out: torch.Tensor) -> None:
        """Does what is to be done between the training and its figures."""

    def check(self) -> None:
        name, args = self.function, self.args
        if torch.is_inference_mode_enabled():
            raise SettingError(f"{name} trains, which torch.inference_mode does not allow: call it outside of that.")
        check_count(f"{name}(block_size)", self.block_size)
        if args is not None and not isinstance(args, TrainingArguments):
            raise SettingTypeError(f"{name}(args) must be TrainingArguments of transformers or None, got {args!r}.")

    def check_config(self, config: Any) -> None:
        check_length(self.function, self.block_size, config)
        self.exit_layers(config)
        with torch.device("meta"):
            self.made(config)

    def read(self, tokenizer: Tokenizer, dataset: Iterable[Any]) -> torch.Tensor:
        return packed(tokenizer, dataset, self.block_size, self.function)

    @torch.enable_grad()
    def fit(self, model: Any, text: torch.Tensor) -> M:
        rows, held_out = divided(text)
        frozen = FrozenModel(model, self.exit_layers(model.config.get_text_config(decoder=True)))
        with seeded(self.args), frozen.frozen(), tempfile.TemporaryDirectory() as folder:
            module = self.module(frozen).to(frozen.device, torch.float32)
            args, recipe = self._arguments(frozen.device, folder), self.recipe(module)
            trained = FitModule(module, frozen, self)
            trainer = Trainer(
                trained,
                args,
                default_data_collator,
                *[StackDataset(input_ids=cast(Any, part)) if len(part) else None for part in (rows, held_out)],
                compute_metrics=trained.means,
                callbacks=list(self.callbacks),
            )
            begun = perf_counter()
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            seconds = perf_counter() - begun
            if key := not_finite(module.eval().state_dict()):
                raise SettingError(
                    f"the fit has diverged: {key} is not finite, so nothing was saved. Give a smaller learning rate, "
                    "or text and a model whose states are finite."
                )
            recipe |= {"tokens": rows.numel(), "steps": trainer.state.global_step}
            module.about = about(model, recipe, {})
            self.finish(module, frozen, held_out)
            evaluated = trainer.evaluate() if len(held_out) else {}
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        figures = {"first loss": losses[0], "last loss": losses[-1]} if losses else {}
        figures |= {name.replace("_", " "): evaluated[f"eval_{name}"] for name in trained.names}
        figures |= {"seconds of training": round(seconds, 1)} | module.about["figures"]
        return saved(module, module.about | {"figures": figures}, self.output_dir)

    def _arguments(self, device: torch.device, folder: str) -> TrainingArguments:
        """The user's arguments, or the usual ones."""
        args = copy.copy(self.args)
        if args is None:
            args = TrainingArguments(folder, use_cpu=device.type == "cpu", **USUAL_ARGUMENTS)
        if args.n_gpu > 1:
            use_one_device(args)  # torchrun serves several
        return args


class FitModule(nn.Module):
    """What the Trainer trains: only the small module. The frozen model is not a submodule: it is not moved or saved."""

    def __init__(self, module: DraftModule, frozen: FrozenModel, fit: TrainedFit[Any]) -> None:
        super().__init__()
        self.part = module  # the name in checkpoints
        self.names: tuple[str, ...] = ()
        self._fit, self._frozen = fit, frozen

    def forward(self, input_ids: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        """Returns the loss for ids ``[b, s]``, and in evaluations the metrics ``[b, s, metrics]``; needs no labels."""
        device = next(self.part.parameters()).device
        states = {name: state.to(device) for name, state in self._frozen.hidden_states(input_ids).items()}
        output = {"loss": self._fit.loss(self.part, self._frozen, states)}
        if not self.training:
            metrics = self._fit.metrics(self.part, self._frozen, states)
            self.names = tuple(metrics)
            output["metrics"] = torch.stack([values.view(input_ids.shape) for values in metrics.values()], -1)
        return output

    def means(self, evaluated: EvalPrediction) -> dict[str, float]:
        means = np.nanmean(evaluated.predictions, (0, 1))
        return {name: round(float(mean), 4) for name, mean in zip(self.names, means, strict=True)}


@contextmanager
def seeded(args: TrainingArguments | None) -> Iterator[None]:
    """Random numbers come from the Trainer's seed, and those of the caller go on afterwards. Tensors go to the CPU by
    default, where the Trainer shuffles."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(42 if args is None else args.seed)
        yield


def check_length(name: str, block_size: object, config: Any) -> None:
    """Raises if rows are longer than the positions of a model with this config."""
    positions = max_positions(config)
    if positions is not None and isinstance(block_size, int) and block_size > positions:
        raise SettingError(f"{name}(block_size={block_size}) is more than the {positions} positions of the model.")


def saved(module: M, about: dict[str, Any], folder: StrPath | None) -> M:
    """Returns the module with its ``about``, saved if there is a folder; only the main process writes."""
    module.about = about
    if folder is not None:
        if PartialState().is_main_process:
            module.save_pretrained(folder)
        PartialState().wait_for_everyone()
    return module.eval()
