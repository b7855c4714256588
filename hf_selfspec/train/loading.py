"""Loads the models that a command line names, by folder or name on the Hub; every failure is a one-line error."""

import os
import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn as nn
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingError, brief
from ..learned.files import is_name

_CONFIG = "config.json"
_GIVE_MODEL = "Give the folder of a causal LM of transformers, or its name on the Hub."
# Errors that mean that the Hub did not answer. The Hub's errors derive from those of its HTTP library, which differs
# between versions.
NO_ANSWER: tuple[Any, ...] = (OSError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))
# Seconds within which the Hub has to answer. Downloads retry for half a minute before they give up.
_PATIENCE = 10.0


def hub_error(ask: Callable[..., object], name: str) -> str:
    """Returns why ``HfApi``'s ``dataset_info`` or ``model_info`` finds no such repository; empty in offline mode."""
    if not is_name(name):
        return "this is not a valid name"
    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        ask(name, timeout=_PATIENCE)
    except NO_ANSWER as error:
        return brief(error)
    return ""


class NamedModel:
    """A causal LM in a folder, on the Hub, or in the cache of downloads; each part is loaded when it is asked for."""

    def __init__(
        self, name: str, device: torch.device | str | None = None, revision: str | None = None, **weights: str | None
    ) -> None:
        """``weights`` are arguments of ``from_pretrained`` for the model, which then moves to ``device``, if any."""
        self.name, self._device, self._revision = name, device, revision
        self._weights = {option: value for option, value in weights.items() if value is not None}

    @cached_property
    def _source(self) -> dict[str, Any]:
        """The arguments of ``from_pretrained`` that say where it is."""
        of: dict[str, Any] = {} if self._revision is None else {"revision": self._revision}
        source: dict[str, Any] = {"trust_remote_code": False, **of}  # code from its repository is not run
        if not os.path.isdir(self.name) and (why := hub_error(partial(HfApi().model_info, **of), self.name)):
            cached = try_to_load_from_cache(self.name, _CONFIG, **of) if is_name(self.name) else None
            if not isinstance(cached, str):
                raise SettingError(
                    f"--model {self.name}: there is no such folder, and the Hub has no such model ({why}). "
                    f"{_GIVE_MODEL}"
                )
            source["local_files_only"] = True
        return source

    @property
    def loaded_as(self) -> dict[str, str]:
        """What was chosen of how it is loaded, beside its type."""
        options = {"revision": self._revision, **self._weights}
        return {option: str(value) for option, value in options.items() if value is not None and option != "dtype"}

    @cached_property
    def config(self) -> Any:
        return self._load("config", AutoConfig.from_pretrained)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._load("tokenizer", AutoTokenizer.from_pretrained, config=self.config)

    def model(self) -> PreTrainedModel:
        """The model with its weights, in evaluation mode."""
        model = self._load("model", AutoModelForCausalLM.from_pretrained, config=self.config, **self._weights)
        return model if self._device is None else nn.Module.to(model, self._device)

    def _load(self, what: str, load: Callable[..., Any], **options: Any) -> Any:
        source = self._source
        try:
            return load(self.name, **source, **options)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # errors for damaged files come from many libraries and share no other base class
            message = f"--model {self.name}: its {what} cannot be loaded ({brief(error)}). {_GIVE_MODEL}"
            raise SettingError(message) from error


def set_up(device: str | None, threads: int | None) -> torch.device:
    """Sets up the process of a command; returns the device, without a name the accelerator, or the CPU."""
    logging.set_verbosity_error()  # hf_selfspec reports what is wrong with a call, in one line
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device is None:
        return accelerator
    types = list(dict.fromkeys(["cpu", accelerator.type]))
    advice = f"Give one of {', '.join(types)}."
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise SettingError(f"--device {device}: there is no such device. {advice}") from error
    count = 1 if chosen.type == "cpu" else torch.accelerator.device_count()
    if chosen.type not in types or (chosen.index or 0) >= count:
        raise SettingError(f"--device {device}: this machine has none. {advice}")
    return chosen
