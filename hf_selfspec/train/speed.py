"""How fast a model generates with what is being fitted to it, on text that is held out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..errors import SettingError
from ..parts.part import Part
from ..selfspec import SelfSpec
from ..settings import check_count

# Rows whose first half is a prompt, and the most tokens that are generated behind it; after the first few, which meet
# shapes for the first time.
_ROWS, _TOKENS, _FEW = 4, 32, 8
# Below so many times plain generate's speed a part is told not to pay: single runs are 5 % apart.
_PAYS = 1.0
# Steps between two looks at the speed, unless the Trainer's arguments tell, and a gain that is none by chance.
_EVERY, _GAIN = 100, 1.02

SpecOf = Callable[[Any], SelfSpec]

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
    """Compares generation with a part to plain generation.

    Args:
        model: that the part is fitted to.
        rows: ``[n, s]`` held-out text, of which the first few rows are used.
        spec_of: a ``SelfSpec`` that drafts with a part; a :class:`SettingError` of it is a part that cannot draft.
    """

    def __init__(self, model: PreTrainedModel, rows: torch.Tensor, spec_of: SpecOf) -> None:
        self._model = model
        self._prompts = rows[:_ROWS, : rows.shape[1] // 2]
        self._new = min(_TOKENS, rows.shape[1] - self._prompts.shape[1])
        self._spec_of = spec_of

    @property
    def is_known(self) -> bool:
        """Whether there is text to generate behind."""
        return bool(self._prompts.numel()) and self._new > 1

    @torch.no_grad()
    def of(self, part: Part) -> float:
        """Tokens a second with the part over those of plain generation; 0 where it cannot draft."""
        was_training = part.training
        part.eval()
        try:
            spec = self._spec_of(part)
            with greedily(self._model, self._new):
                for options in ({}, {"assistant": spec}):
                    self._seconds(self._prompts[:1], {"max_new_tokens": min(_FEW, self._new), **options})
                # In turn, and the median, since machines are not always equally fast.
                return median(
                    self._seconds(prompt, {}) / self._seconds(prompt, {"assistant": spec})
                    for prompt in self._prompts.split(1)
                )
        except SettingError:
            return 0.0
        finally:
            part.train(was_training)

    def _seconds(self, prompt: torch.Tensor, options: dict[str, Any]) -> float:
        """Seconds a token."""
        prompt = prompt.to(self._model.get_input_embeddings().weight.device)
        begun = perf_counter()
        ids = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        ids.tolist()  # a GPU has them now
        return (perf_counter() - begun) / (ids.shape[1] - prompt.shape[1])


class StopWhenNoFaster(TrainerCallback):
    """Ends a training when the speed on held-out text has not risen for some time, and keeps the fastest weights.

    Args:
        part: what is trained.
        speed: of generation with it.
        patience: looks in a row without a gain after which it ends.
    """

    def __init__(self, part: Part, speed: HeldOutSpeed, patience: int) -> None:
        self._part, self._speed, self._patience = part, speed, patience
        self._best, self._since = 0.0, 0
        self._weights: dict[str, torch.Tensor] = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        """Looks at the speed now and then."""
        every = args.eval_steps if isinstance(args.eval_steps, int) else _EVERY
        if state.global_step % every:
            return
        speed = self._speed.of(self._part)
        _logger.info(f"{self._part.kind}, step {state.global_step}: {speed:.2f} times plain generate's speed.")
        self._since += 1
        if speed >= _GAIN * self._best or not self._weights:
            self._best, self._since = speed, 0
            self._weights = {name: value.clone() for name, value in self._part.state_dict().items()}
        control.should_training_stop = control.should_training_stop or self._since >= self._patience

    def on_train_end(self, *_: Any, **options: Any) -> None:
        """Puts the fastest weights back."""
        if self._weights and self._since:
            self._part.load_state_dict(self._weights)


def early_stop(name: str, part: Part, speed: HeldOutSpeed, patience: int | None) -> list[TrainerCallback]:
    """The callback that ends a fit, none without ``patience``.

    Args:
        name: what takes the setting, for messages.
        part, speed, patience: see :class:`StopWhenNoFaster`.

    Raises:
        SettingError, SettingTypeError: no such count, no text to find the speed with, or several processes.
    """
    if patience is None:
        return []
    check_count(f"{name}(patience)", patience)
    if PartialState().num_processes > 1:
        raise SettingError(f"{name}(patience={patience}): several processes would not stop alike. Leave patience out.")
    if not speed.is_known:
        raise SettingError(
            f"{name}(patience={patience}): there is no held-out text to generate greedily behind. Give more rows, "
            "of at least 4 tokens, or leave patience out."
        )
    return [StopWhenNoFaster(part, speed, patience)]


def tell_whether_it_pays(part: Part, speed: HeldOutSpeed) -> dict[str, float]:
    """The figure of a part's speed, empty where there is no text to find it with; a warning where it does not pay."""
    if not speed.is_known:
        return {}
    found = speed.of(part)
    if found < _PAYS and PartialState().is_main_process:
        _logger.warning(
            f"{part.kind}: with it, the model generates at {found:.2f} times the speed of plain generate on held-out "
            "text. Fit it for longer, on more text or on text like that which is generated, choose another exit layer, "
            "or do without it: SelfSpec.lookup() needs no fit."
        )
    return {"speed over plain generate": round(found, 2)}
