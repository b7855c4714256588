"""The one seam with transformers: ``generate(assistant=SelfSpec())``, and callbacks that change a model in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin, StoppingCriteriaList, Trainer
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from .checks import check_options
from .errors import SettingTypeError, UnsupportedOptionError
from .model.anatomy import Anatomy
from .model.arguments import check_inputs
from .selfspec import SelfSpec
from .train.trainer import with_model_callbacks

_ORIGINAL = "_hf_selfspec_original"


def install() -> None:
    """Gives ``generate`` of all transformers models the argument ``assistant``, and ``Trainer`` our training callbacks.

    Done when the package is imported. Calls and trainings that use neither are passed on untouched. Calling this again
    changes nothing; :func:`uninstall` takes it back.
    """
    for owner, name, wrap in _SEAMS:
        original = getattr(owner, name)
        if not hasattr(original, _ORIGINAL):
            wrapped = wrap(original)
            setattr(wrapped, _ORIGINAL, original)
            setattr(owner, name, wrapped)


def uninstall() -> None:
    """Takes :func:`install` back. ``generate(custom_generate=SelfSpec())`` goes on working, callbacks do not."""
    for owner, name, _ in _SEAMS:
        original = getattr(getattr(owner, name), _ORIGINAL, None)
        if original is not None:
            setattr(owner, name, original)


def _with_assistant(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, assistant: Any = None, **kwargs: Any) -> Any:
        assistant = None if assistant is False else assistant
        spec = kwargs.get("custom_generate") if assistant is None else assistant
        if not isinstance(spec, SelfSpec):
            if assistant is None:
                return original(self, *args, **kwargs)
            raise SettingTypeError(
                f"generate(assistant=...) takes a SelfSpec, e.g. SelfSpec() or SelfSpec(draft=EarlyExit(layer=8)), got "
                f"{assistant!r}. For a second model use transformers' `assistant_model`."
            )
        if assistant is not None and kwargs.get("custom_generate") is not None:
            raise UnsupportedOptionError(
                "generate(assistant=...) and generate(custom_generate=...) both replace the decode loop: give one."
            )
        # Arguments by name, whatever the caller's style, so that those which callables do not get can be taken out.
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        named = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        named.update(given.get("kwargs", {}))
        if named.get("assistant_model") is not None:
            raise UnsupportedOptionError(
                "generate(assistant_model=...) is another way of drafting than `assistant`: give one of the two."
            )
        Anatomy.of(self)
        effective, _ = self._prepare_generation_config(
            named.get("generation_config"), **{k: v for k, v in named.items() if hasattr(self.generation_config, k)}
        )
        check_options(self, effective)
        for_model = {k: v for k, v in given.get("kwargs", {}).items() if not hasattr(self.generation_config, k)}
        check_inputs(self, named.get("inputs"), for_model)
        named["custom_generate"] = functools.partial(
            spec, streamer=named.get("streamer"), synced_gpus=_is_synced(self, named.get("synced_gpus"))
        )
        if effective.stop_strings is not None:
            _serve_stop_strings(named, effective.stop_strings)
        return original(self, **named)

    return generate


_SEAMS = ((GenerationMixin, "generate", _with_assistant), (Trainer, "train", with_model_callbacks))


def _is_synced(model: Any, synced_gpus: bool | None) -> bool:
    """What ``generate`` makes of ``synced_gpus``, which it does not hand to callables."""
    if synced_gpus is not None:
        return synced_gpus
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not several or torch.distributed.get_world_size() == 1:
        return False
    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)


def _serve_stop_strings(named: dict[str, Any], stop_strings: str | list[str]) -> None:
    """Transformers does not look for the tokenizer when a callable decodes, so the criterion is built here."""
    tokenizer = named.get("tokenizer")
    if tokenizer is None:
        raise UnsupportedOptionError(
            f"stop_strings={stop_strings!r} need the tokenizer: pass generate(tokenizer=tokenizer)."
        )
    criteria = named.get("stopping_criteria") or ()
    named["stopping_criteria"] = StoppingCriteriaList(
        [*criteria, StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)]
    )
    named["stop_strings"] = None
