"""Fitting small modules to a frozen model on given text, with the stock ``transformers.Trainer``."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from accelerate import PartialState
from torch.utils.checkpoint import checkpoint
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import SettingError, SettingTypeError
from ..model.anatomy import Anatomy, causal_lm
from ..model.exits import LOGIT_ELEMENTS
from ..model.fingerprint import Fingerprint
from ..parts.part import Part, about
from ..settings import check_positive
from ..transfer import wait_for
from .backbone import Backbone, Observed
from .blocks import HELD_OUT, Blocks
from .checkpoints import KEPT, checkpoints_of, ended, last_checkpoint, weights_of_whole
from .costs import FitCosts, tell

_P = TypeVar("_P", bound=Part)
# A value for each position, from the logits [n, v] of a draft and those of the whole model.
Pair = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]


class Fitting(nn.Module):
    """The module that the Trainer trains: only the part. The frozen model is not a submodule: it is not moved or saved.

    Args:
        part: the part to fit.
        backbone: the frozen model.
        loss: the part's loss as a function of the model's states.
        recipe: the settings that determine the part, besides the text and the Trainer's arguments.
    """

    def __init__(
        self, part: Part, backbone: Backbone, loss: Callable[[Observed], torch.Tensor], recipe: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.part = part
        self.recipe = dict(recipe)
        self.name = f"{part.kind} {dict(recipe)} of {Fingerprint.of_decoder(backbone.model)}"
        self._seen = (backbone, loss)  # in a tuple, so that they do not become submodules

    @property
    def backbone(self) -> Backbone:
        """The frozen model."""
        return self._seen[0]

    def forward(self, input_ids: torch.Tensor, return_loss: bool = True) -> dict[str, torch.Tensor]:
        """Returns ``{"loss": ...}`` for ids ``[b, s]``; ``return_loss`` tells the Trainer that this needs no labels."""
        return {"loss": self._loss(self.backbone.observe(input_ids))}

    def seconds(self, input_ids: torch.Tensor, runs_model: bool) -> tuple[float, float]:
        """Returns seconds of the model on a batch, and of the part's forward and backward; nothing is kept of it.

        Args:
            input_ids: ``[b, s]`` the batch.
            runs_model: whether the model runs; otherwise its states are in the cache.
        """
        begun = perf_counter()
        observed = self.backbone.look(input_ids) if runs_model else self.backbone.observe(input_ids)
        wait_for(self.backbone.device)
        between = perf_counter()
        self._loss(observed).backward()
        wait_for(self.backbone.device)
        ended = perf_counter()
        self.zero_grad(set_to_none=True)
        return between - begun, ended - between

    def _loss(self, observed: Observed) -> torch.Tensor:
        return self._seen[1](observed.to(next(self.part.parameters()).device))


def training_arguments(folder: str, device: torch.device, **changed: Any) -> TrainingArguments:
    """Arguments of the Trainer: one epoch of AdamW at 1e-3 with 8 rows a batch, unless ``changed``."""
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


@dataclass(frozen=True)
class Fitted:
    """The course of a fit.

    Attributes:
        losses: the losses that were logged.
        seconds: time of training.
        tokens: number of tokens in one epoch.
        steps: number of steps of the optimiser.
    """

    losses: tuple[float, ...]
    seconds: float
    tokens: int
    steps: int


def fit(
    fitting: Fitting,
    rows: Blocks,
    held_out: torch.Tensor,
    figures: Mapping[str, Callable[[Observed], torch.Tensor]],
    args: TrainingArguments | None,
    output_dir: str | os.PathLike[str] | None,
    callbacks: Sequence[TrainerCallback],
) -> None:
    """Trains the part and measures it; the model has to be frozen.

    Args:
        fitting, rows, held_out, args, output_dir, callbacks: see :func:`train`.
        figures: names of figures, and what returns a value for each token of the held-out rows.

    Raises:
        SettingError: the checkpoints are of another fit, or the fit has diverged.
    """
    fitted = train(fitting, rows, held_out, args, output_dir, callbacks)
    fitting.part.eval()
    with seeded(args):
        found = measured(fitting.backbone, held_out, figures)
    finished(fitting, fitted, found, args, output_dir)


def train(
    fitting: Fitting,
    blocks: Blocks,
    held_out: torch.Tensor,
    args: TrainingArguments | None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Fitted:
    """Runs the Trainer; where there are checkpoints, a fit that was stopped resumes.

    Args:
        fitting: the module to train.
        blocks: the text.
        held_out: ``[n, s]`` rows for the Trainer's evaluation, if its arguments have one.
        args: arguments of the Trainer, ``None`` for the usual ones.
        output_dir: where the part will be saved; with the usual arguments, checkpoints are kept beside it until then.
        callbacks: further callbacks of the Trainer.

    Raises:
        SettingError: the checkpoints are of another fit.
    """
    device = fitting.backbone.device
    # With another default device the Trainer would shuffle on that one.
    with tempfile.TemporaryDirectory() as folder, torch.device("cpu"):
        if args is None and output_dir is None:
            args = training_arguments(folder, device)
        elif args is None:
            args = training_arguments(checkpoints_of(cast(str, output_dir)), device, **KEPT)
        checkpoint = last_checkpoint(args, fitting.name, blocks.rows)
        if args.n_gpu > 1:
            args = copy.copy(args)  # the user's
            args._n_gpu = 1  # the model is not copied to further devices of one process; torchrun serves them
        trainer = Trainer(
            model=fitting,
            args=args,
            train_dataset=blocks,
            eval_dataset=[{"input_ids": row} for row in held_out],
            data_collator=default_data_collator,
            callbacks=list(callbacks),
        )
        if checkpoint is None:
            with trainer.accelerator.autocast():
                tell(FitCosts.of(fitting, blocks, args), fitting.part.kind)
        begun = perf_counter()
        if (weights := weights_of_whole(checkpoint)) is None:
            trainer.train(resume_from_checkpoint=checkpoint)
        else:
            fitting.load_state_dict(weights)
            trainer.state = TrainerState.load_from_json(os.path.join(cast(str, checkpoint), TRAINER_STATE_NAME))
            for callback in callbacks:
                callback.on_train_begin(args, trainer.state, trainer.control)
                callback.on_train_end(args, trainer.state, trainer.control)
        seconds = perf_counter() - begun
    losses = tuple(float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    return Fitted(losses, seconds, blocks.rows.numel(), trainer.state.global_step)


def per_token(
    what: Pair, head: Head, states: torch.Tensor, whole_head: Head, final: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Applies ``what`` to the logits of two heads, for a chunk of tokens at a time.

    Args:
        what: from logits ``[n, v]`` of the draft and of the whole model to ``[n]`` values.
        head: the draft's head; gradients flow through it.
        states: ``[b, s, d]`` the input of ``head``.
        whole_head: the whole model's head.
        final: ``[b, s, d]`` the input of ``whole_head``.
        vocabulary: ``v``.

    Returns:
        ``[b s]``, a value for each token.
    """

    def of(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known = whole_head(others).float()
        return what(head(some).float(), known)

    pairs = states.flatten(0, 1), final.flatten(0, 1)
    chunk = max(1, LOGIT_ELEMENTS // vocabulary)
    found = []
    for start in range(0, len(pairs[0]), chunk):
        some = [rows[start : start + chunk] for rows in pairs]
        found.append(checkpoint(of, *some, use_reentrant=False) if torch.is_grad_enabled() else of(*some))
    return torch.cat(found)


def cross_entropy(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``[n]`` cross entropy of the draft's distribution against the whole model's (Kangaroo, equation 3)."""
    return -(whole.softmax(-1) * drafted.log_softmax(-1)).sum(-1)


def agreement(drafted: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``[n]`` whether both have the same first choice."""
    return (drafted.argmax(-1) == whole.argmax(-1)).float()


def prepared(
    name: str, model: Any, tokenizer: Any, dataset: Iterable[Any], block_size: int, args: Any
) -> tuple[Any, Blocks]:
    """Checks the arguments that all fits share, and returns the causal LM and the text as rows of tokens."""
    inner = causal_lm(model, name)
    if args is not None and not isinstance(args, TrainingArguments):
        raise SettingTypeError(f"{name}(args) must be TrainingArguments of transformers or None, got {args!r}.")
    if args is not None:
        _check_arguments(f"{name}(args)", args)
    check_length(name, block_size, Anatomy.of(inner).max_positions)
    blocks = Blocks(tokenizer, dataset, block_size, name)
    if args is not None and args.eval_strategy != "no" and len(blocks) < HELD_OUT:
        raise SettingError(
            f"{name}(args): eval_strategy={args.eval_strategy.value!r} needs held-out rows, and of {len(blocks)} rows "
            f"none is held out. Give at least {HELD_OUT} rows, or eval_strategy='no'."
        )
    return inner, blocks


def _check_arguments(name: str, args: TrainingArguments) -> None:
    """Checks the arguments that decide whether the Trainer trains at all.

    Raises:
        SettingError, SettingTypeError: one is not allowed.
    """
    if not 0 <= args.learning_rate < math.inf:
        raise SettingError(f"{name}: learning_rate must be a finite number of at least 0, got {args.learning_rate!r}.")
    if args.max_steps <= 0:
        check_positive(f"{name}: num_train_epochs", args.num_train_epochs)


def check_length(name: str, block_size: object, positions: int | None) -> None:
    """Checks that rows are no longer than the model's positions.

    Raises:
        SettingError: they are longer.
    """
    if positions is not None and isinstance(block_size, int) and block_size > positions:
        raise SettingError(f"{name}(block_size={block_size}) is more than the {positions} positions of the model.")


@contextmanager
def seeded(args: TrainingArguments | None) -> Iterator[None]:
    """Applies the Trainer's seed to random numbers that are drawn before it runs, on the CPU unless told otherwise."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(42 if args is None else args.seed)
        yield


@torch.no_grad()
def measured(
    backbone: Backbone, held_out: torch.Tensor, figures: Mapping[str, Callable[[Observed], torch.Tensor]]
) -> dict[str, float]:
    """The means of figures over the tokens of the held-out rows, an empty dict if there are no rows."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in figures}
    for row in held_out:
        observed = backbone.observe(row[None])
        for name, figure in figures.items():
            found[name].append(figure(observed))
    return {name: round(torch.cat(values).mean().item(), 4) for name, values in found.items() if values}


def finished(
    fitting: Fitting, fitted: Fitted, figures: dict[str, float], args: TrainingArguments | None, output_dir: Any
) -> None:
    """Gives the part its recipe and figures.

    Raises:
        SettingError: the fit has diverged.
    """
    part = fitting.part
    wrong = [key for key, value in part.state_dict().items() if not torch.isfinite(value).all()]
    if wrong:
        ended(part, args, output_dir)
        raise SettingError(
            f"the fit has diverged: {wrong[0]} is not finite, so nothing was saved. Give a smaller learning rate, or "
            "text and a model whose states are finite."
        )
    recipe = {**fitting.recipe, "tokens": fitted.tokens, "steps": fitted.steps}
    if fitted.losses:
        figures = {"first loss": fitted.losses[0], "last loss": fitted.losses[-1], **figures}
    figures["seconds of training"] = round(fitted.seconds, 1)
    part.about = about(fitting.backbone.model, recipe, figures)


def keep(part: _P, known: dict[str, Any], folder: Any) -> _P:
    """Returns the part with what is known of it, saved if there is a folder; only the main process writes."""
    part.about = known
    part._hub_mixin_config = {**cast(dict[str, Any], part._hub_mixin_config), "about": known}
    if folder is not None:
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                part.save_pretrained(folder)
    return part.eval()
