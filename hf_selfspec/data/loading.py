"""Loads the models that a command line names, by folder or name on the Hub; every failure is a one-line error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..errors import SettingError, brief
from .hub import hub_error, is_name

_CONFIG = "config.json"
_GIVE_MODEL = "Give the folder of a causal LM of transformers, or its name on the Hub."


@dataclass(frozen=True)
class NamedModel:
    """A causal LM that is not loaded yet."""

    name: str  # folder or name on the Hub
    local_files_only: bool = False  # the Hub does not answer, so only what was downloaded before is used

    @classmethod
    def find(cls, name: str) -> NamedModel:
        """Looks for a folder, then on the Hub, then in the cache of downloads."""
        if os.path.isdir(name):
            return cls(name)
        why = hub_error(HfApi().model_info, name) if is_name(name) else "this is not a valid name"
        if not why:
            return cls(name)
        if is_name(name) and isinstance(try_to_load_from_cache(name, _CONFIG), str):
            return cls(name, local_files_only=True)
        raise SettingError(
            f"--model {name}: there is no such folder, and the Hub has no such model ({why}). {_GIVE_MODEL}"
        )

    def config(self) -> Any:
        """The config."""
        return self._load("config", AutoConfig.from_pretrained)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        found: PreTrainedTokenizerBase = self._load("tokenizer", AutoTokenizer.from_pretrained)
        return found

    def model(self, dtype: str = "auto", device: torch.device | None = None) -> PreTrainedModel:
        """The model with its weights, in evaluation mode; in the file's dtype for ``auto``, by default on the CPU."""
        found: PreTrainedModel = self._load("model", AutoModelForCausalLM.from_pretrained, dtype=dtype)
        if device is not None:
            nn.Module.to(found, device)
        return found

    def _load(self, what: str, load: Callable[..., Any], **options: Any) -> Any:
        """Loads a part of the model; code from its repository is not run."""
        if self.local_files_only:
            options["local_files_only"] = True
        try:
            return load(self.name, trust_remote_code=False, **options)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # errors for damaged files come from many libraries and share no other base class
            raise SettingError(
                f"--model {self.name}: its {what} cannot be loaded ({brief(error)}). {_GIVE_MODEL}"
            ) from error


def set_up(device: str | None, threads: int | None) -> None:
    """Sets up the process of a command, and checks that the machine has the device."""
    logging.set_verbosity_error()  # hf_selfspec reports what is wrong with a call, in one line
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    device_named(device)
    if threads is not None:
        torch.set_num_threads(threads)


def device_named(name: str | None) -> torch.device:
    """Returns a device of this machine; without a name the accelerator, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    if name is None:
        return accelerator
    known = ["cpu"] if accelerator.type == "cpu" else ["cpu", accelerator.type]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingError(f"--device {name}: there is no such device. Give one of {', '.join(known)}.") from error
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if device.type not in known or (device.index or 0) >= count:
        raise SettingError(f"--device {name}: this machine has none. Give one of {', '.join(known)}.")
    return device
