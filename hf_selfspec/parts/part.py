"""What is fitted to a model and kept beside it: weights, settings, recipe and the model that it belongs to."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn as nn
from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedModel
from typing_extensions import Self

from ..errors import SettingError, SettingTypeError
from ..model.fingerprint import Fingerprint

_copying = threading.RLock()
_P = TypeVar("_P", bound="Part")


class Part(nn.Module, PyTorchModelHubMixin):
    """A small module that was fitted to one frozen model.

    ``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` are those of huggingface_hub: ``config.json``,
    ``model.safetensors`` and a model card with the recipe and the figures.

    Attributes:
        kind: what it is called.
        about: ``{"fingerprint": ..., "recipe": ..., "figures": ...}``: the model that it belongs to, how it was fitted
            and what was measured then.
    """

    kind: ClassVar[str] = "part"
    about: dict[str, Any]

    def on(self, device: torch.device) -> Self:
        """Itself where it is on that device already, and otherwise a copy there, made once."""
        if next(self.parameters()).device == device:
            return self
        with _copying:
            copies = self.__dict__.setdefault("_copies", {})
            if device not in copies:
                self.__dict__["_copies"] = {}
                try:
                    copies[device] = copy.deepcopy(self).to(device)
                finally:
                    self.__dict__["_copies"] = copies
            found: Self = copies[device]
            return found

    @property
    def num_parameters(self) -> int:
        """How many numbers are in it."""
        return sum(parameter.numel() for parameter in self.parameters())

    def check(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Checks that it was fitted to the model with a fingerprint, which is taken if that is known.

        Raises:
            SettingError: it was fitted to another one.
        """
        kept = self.about.get("fingerprint")
        if kept is None:
            return
        if difference := Fingerprint(**kept).difference(fingerprint()):
            raise SettingError(
                f"this {self.kind} was fitted to {difference}. Use it with the model that it was fitted to, or fit "
                "another one."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a folder that ``save_pretrained`` has written, or a repository of the Hub.

        Raises:
            SettingError: there is none, it holds something else, was cut short, or has weights that are no numbers.
        """
        name = os.fspath(path)
        if Path(name).is_dir():
            for file in ("config.json", "model.safetensors"):
                if not (Path(name) / file).is_file():
                    raise SettingError(f"{name} has no {file}: give a folder that holds a saved {cls.kind}.")
        try:
            part: Self = cls.from_pretrained(name, strict=True)
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise SettingError(
                f"there is no saved {cls.kind} at {name!r} ({error}). Give the folder that `save_pretrained` has "
                "written, or the name of a repository on the Hub."
            ) from error
        except (SafetensorError, json.JSONDecodeError, RuntimeError, TypeError, KeyError, ValueError) as error:
            raise SettingError(
                f"{name} is not a saved {cls.kind}, or was cut short or changed ({error}). Fit and save it again."
            ) from error
        wrong = [key for key, value in part.state_dict().items() if not torch.isfinite(value).all()]
        if wrong:
            raise SettingError(f"the {cls.kind} at {name} has weights that are no numbers: {wrong[0]}. Fit it anew.")
        return part.eval()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> Any:
        """As huggingface_hub's, whose card of an earlier part would stay."""
        (Path(save_directory) / "README.md").unlink(missing_ok=True)
        return super().save_pretrained(Path(save_directory), **options)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card: what it is, the recipe, the figures."""
        data = ModelCardData(library_name="hf_selfspec", tags=["hf_selfspec", "self-speculative-decoding"])
        recipe = "\n".join(f"- {name}: {value}" for name, value in self.about.get("recipe", {}).items())
        figures = "\n".join(f"- {name}: {value}" for name, value in self.about.get("figures", {}).items())
        model = self.about.get("fingerprint", {}) or {}
        return ModelCard(
            f"---\n{data.to_yaml()}\n---\n\n# {self.kind[0].upper()}{self.kind[1:]} for self-speculative decoding\n\n"
            f"Fitted with hf_selfspec to a frozen {model.get('model', 'model')} of {model.get('num_layers', '?')} "
            f"layers, {self.num_parameters:,} parameters. It drafts; the model verifies, so that the output is the "
            f"model's own.\n\n## Recipe\n\n{recipe or 'not recorded'}\n\n## Figures\n\n{figures or 'none'}\n"
        )


def about(model: PreTrainedModel, recipe: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """What is kept beside the weights, as JSON has it."""
    fingerprint = Fingerprint.of_decoder(model)
    return {"fingerprint": asdict(fingerprint), "recipe": recipe, "figures": figures}


def part_of(name: str, given: Any, kind: type[_P]) -> tuple[_P | str, _P]:
    """What is kept of a setting that is a part or the place of a saved one, and the part itself.

    Raises:
        SettingError, SettingTypeError: it is neither, or there is none there.
    """
    if isinstance(given, kind):
        return given, given
    if not isinstance(given, (str, os.PathLike)):
        raise SettingTypeError(f"{name} must be {kind.__name__} or the path of a saved one, got {given!r}.")
    path = _saved_at(given)
    return path, kind.load(path)


def _saved_at(path: str | os.PathLike[str]) -> str:
    """The whole path of a folder, so that it holds in another working directory; a Hub name as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else os.fspath(path)
