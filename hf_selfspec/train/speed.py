"""How fast a model generates with what is being fitted to it, on held-out text."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..draft.cascade import Cascade
from ..draft.lookup import Lookup
from ..errors import SettingError
from ..files import reported, written_whole
from ..parts.part import Part
from ..selfspec import SelfSpec
from ..settings import check_count
from .backbone import Backbone
from .checkpoints import FASTEST
from .fitting import keep

# Rows whose first half is a prompt, the most tokens generated after it, and tokens of a call that warms up.
_ROWS, _TOKENS, _FEW = 4, 32, 8
# Steps between two measurements, unless the Trainer's arguments say, and their least number in a training.
_EVERY, _LOOKS = 100, 10
# A smaller gain may be chance.
_GAIN = 1.02

SpecOf = Callable[[Any], SelfSpec]
_P = TypeVar("_P", bound=Part)

_logger = logging.getLogger(__name__)


@contextmanager
def greedily(model: PreTrainedModel, new_tokens: int) -> Iterator[set[int]]:
    """Greedy generation of so many tokens, without penalties, several sequences or time limits of the model's own.

    Yields:
        The tokens that end a text.
    """
    usual = model.generation_config
    ends = {usual.eos_token_id} if isinstance(usual.eos_token_id, int) else set(usual.eos_token_id or ())
    try:
        model.generation_config = GenerationConfig(
            max_new_tokens=new_tokens,
            bos_token_id=usual.bos_token_id,
            eos_token_id=usual.eos_token_id,
            pad_token_id=min(ends, default=0),
        )
        yield ends
    finally:
        model.generation_config = usual


class HeldOutSpeed:
    """Compares generation with a part to plain ``generate``.

    Args:
        model: the model that the part is fitted to.
        rows: ``[n, s]`` held-out text, of which the first few rows are used.
        spec_of: returns a ``SelfSpec`` that drafts with a part.
    """

    def __init__(self, model: PreTrainedModel, rows: torch.Tensor, spec_of: SpecOf) -> None:
        self._model = model
        self._prompts = rows[:_ROWS, : rows.shape[1] // 2]
        self._new = min(_TOKENS, rows.shape[1] - self._prompts.shape[1])
        self._spec_of = spec_of

    @property
    def is_known(self) -> bool:
        """Whether there is text to continue."""
        return bool(self._prompts.numel()) and self._new > 1

    def of(self, part: Part) -> float:
        """Returns the speed with the part, in times of plain ``generate``'s; 0 if it cannot draft (yet)."""
        try:
            with _ready(part):
                return self._speeds([self._spec_of(part)])[0]
        except Exception as error:  # whatever it is, hours of fitting are not lost to it
            _logger.warning(f"{part.kind}: it cannot draft: {error}")
            return 0.0

    def with_free_drafts(self, part: Part) -> tuple[float, float, float]:
        """Returns the speeds with the part, with free drafts, and with both."""
        with _ready(part):
            alone = self._spec_of(part)
            both = replace(alone, draft=Cascade((Lookup(), alone.draft)))
            one, free, together = self._speeds([alone, SelfSpec.lookup(), both])
        return one, free, together

    @torch.no_grad()
    def _speeds(self, specs: list[SelfSpec]) -> list[float]:
        ways: list[dict[str, Any]] = [{"assistant": spec} for spec in (False, *specs)]  # plain first
        with greedily(self._model, self._new):
            for way in ways:
                # A text in reverse, since free drafts would know the beginning of one that is measured.
                self._seconds(self._prompts[:1].flip(1), {"max_new_tokens": min(_FEW, self._new), **way})
            # In turn, and the median, since machines are not always equally fast.
            seconds = [[self._seconds(prompt, way) for way in ways] for prompt in self._prompts.split(1)]
        return [median(plain / other for plain, other in zip(*of, strict=True)) for of in _pairs(seconds)]

    def _seconds(self, prompt: torch.Tensor, options: dict[str, Any]) -> float:
        """Seconds per token."""
        prompt = prompt.to(self._model.get_input_embeddings().weight.device)
        begun = perf_counter()
        ids = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        ids.tolist()  # a GPU has them now
        return (perf_counter() - begun) / (ids.shape[1] - prompt.shape[1])


def _pairs(seconds: list[list[float]]) -> list[tuple[list[float], list[float]]]:
    """Of ``[prompts, ways]`` the first way beside each other one."""
    plain, *others = (list(of) for of in zip(*seconds, strict=True))
    return [(plain, other) for other in others]


@contextmanager
def _ready(part: Part) -> Iterator[None]:
    """The part in eval mode, without copies of it on other devices from before."""
    was_training = part.training
    part.eval()
    try:
        part.forget_copies()
        yield
    finally:
        part.forget_copies()
        part.train(was_training)


class StopWhenNoFaster(TrainerCallback):
    """Ends a training when the speed on held-out text has not risen for some time, and keeps the fastest weights.

    Where the Trainer saves checkpoints, the fastest weights are saved in its ``output_dir``, too.

    Args:
        part: the part that is trained.
        speed: measures generation with it.
        patience: measurements in a row without a gain after which training ends.
    """

    def __init__(self, part: Part, speed: HeldOutSpeed, patience: int) -> None:
        self._part, self._speed, self._patience = part, speed, patience
        self._measured: dict[int, float] = {}
        self._fastest = -1  # step
        self._weights: dict[str, torch.Tensor] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        """Reads what an earlier run has measured, if training resumes."""
        file = _file(args)
        if state.global_step and file is not None and file.exists():
            try:
                self._weights = dict(load_file(file))
                with safe_open(file, framework="pt") as found:
                    about = json.loads((found.metadata() or {})["about"])
                self._fastest = about["fastest"]
                self._measured = {int(step): speed for step, speed in about["measured"].items()}
            except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
                raise SettingError(
                    f"{file} was cut short or changed ({error}), so the fit cannot resume with it. Remove it: the "
                    "fastest weights are then those measured from now on."
                ) from error

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        """Measures from time to time."""
        if state.global_step % _steps_between(args, state.max_steps) == 0:
            self._measure(args, state.global_step)
            since = sum(self._fastest < step <= state.global_step for step in self._measured)
            control.should_training_stop = control.should_training_stop or since >= self._patience

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        """Puts the fastest weights back."""
        if state.global_step not in self._measured:
            self._measure(args, state.global_step)
        self._part.load_state_dict(self._weights)

    def _measure(self, args: TrainingArguments, step: int) -> None:
        speed = self._measured[step] = self._speed.of(self._part)
        _logger.info(f"{self._part.kind}, step {step}: {speed:.2f} times the speed of plain generate.")
        best = self._measured.get(self._fastest, 0.0)
        is_fastest = not self._weights or (speed > best and speed >= _GAIN * best)
        if is_fastest:
            self._fastest = step
        if is_fastest or best == 0:  # as long as there is no speed, the newest
            self._weights = {name: value.detach().cpu().clone() for name, value in self._part.state_dict().items()}
        if (file := _file(args)) is not None:
            about = json.dumps({"fastest": self._fastest, "measured": self._measured})
            with reported(file), written_whole(file) as beside:
                save_file(self._weights, beside, metadata={"about": about})


def _steps_between(args: TrainingArguments, steps: int) -> int:
    """Steps from one measurement to the next; ``eval_steps`` below 1 is a share of all steps."""
    given = args.eval_steps
    if not given:
        return min(_EVERY, max(1, steps // _LOOKS))
    return math.ceil(given * steps) if given < 1 else int(given)


def _file(args: TrainingArguments) -> Path | None:
    """Where the fastest weights are kept, ``None`` where the Trainer saves nothing."""
    return None if args.save_strategy == "no" or args.output_dir is None else Path(args.output_dir) / FASTEST


def early_stop(name: str, part: Part, speed: HeldOutSpeed, patience: int | None) -> list[TrainerCallback]:
    """Returns the callback that ends a fit, none without ``patience``.

    Args:
        name: what takes the setting, for messages.
        part, speed, patience: see :class:`StopWhenNoFaster`.

    Raises:
        SettingError, SettingTypeError: no such count, no text to measure on, or several processes.
    """
    if patience is None:
        return []
    check_count(f"{name}(patience)", patience)
    if PartialState().num_processes > 1:
        raise SettingError(f"{name}(patience={patience}): several processes would not stop alike. Leave patience out.")
    if not speed.is_known:
        raise SettingError(
            f"{name}(patience={patience}): there is no held-out text to continue greedily. Give more rows, of at least "
            "4 tokens, or leave patience out."
        )
    return [StopWhenNoFaster(part, speed, patience)]


def speeds_of(part: Part, speed: HeldOutSpeed) -> dict[str, float]:
    """Returns the figures of a part's speed, none if it cannot be measured; warns if the part does not pay.

    A fit is not lost to what goes wrong here.
    """
    if not speed.is_known:
        return {}
    try:
        alone, free, both = speed.with_free_drafts(part)
    except Exception as error:  # whatever it is, the fitted part is not lost to it
        warnings.warn(f"{part.kind}: its speed could not be measured: {error}", stacklevel=4)
        return {}
    if max(alone, both) < max(1.0, free) and PartialState().is_main_process:
        warnings.warn(
            f"this {part.kind} does not pay: on held-out text the model generates at {alone:.2f} times the speed of "
            f"plain generate with it, at {both:.2f} with it and free drafts, and at {free:.2f} with SelfSpec.lookup(), "
            "which needs no fit. Fit for longer, on more text or on text like that which will be generated, or choose "
            "another exit layer.",
            stacklevel=4,
        )
    return {
        "speed over plain generate": round(alone, 2),
        "speed with free drafts": round(both, 2),
        "speed of free drafts alone": round(free, 2),
    }


def with_speeds(part: _P, backbone: Backbone, speed: HeldOutSpeed, folder: Any) -> _P:
    """Returns a fitted part with the figures of its speed, saved if there is a folder."""
    with backbone.frozen():
        figures = speeds_of(part, speed)
    return keep(part, {**part.about, "figures": {**part.about["figures"], **figures}}, folder)
