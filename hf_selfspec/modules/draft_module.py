"""A module that is fitted to a model and saved apart from it: weights, settings, recipe and the model's fingerprint."""

import copy
import hashlib
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
import torch.nn as nn
from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from typing_extensions import Self

from ..errors import SelfSpecError, SettingError, SettingTypeError, brief
from ..learned.files import folder_written_whole, path_of, read_json, reported
from ..model.fingerprint import Fingerprint

CONFIG, WEIGHTS, CARD = FILES = "config.json", "model.safetensors", "README.md"
# Copies of modules on other devices, or of other types.
_copies = weakref.WeakKeyDictionary[nn.Module, dict[tuple[torch.device, torch.dtype], Any]]()
_M = TypeVar("_M", bound="DraftModule")
About: TypeAlias = dict[str, Any] | None


class DraftModule(nn.Module, PyTorchModelHubMixin):
    """A small module that was fitted to one frozen model.

    ``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` are those of huggingface_hub: ``config.json``,
    ``model.safetensors`` and a model card with the recipe and the figures.

    Attributes:
        kind: what messages call such a module.
        about: ``{"fingerprint": ..., "recipe": ..., "figures": ...}``: the model that it belongs to, how it was fitted
            and what was measured then.
    """

    kind: ClassVar[str] = "module"

    @property
    def about(self) -> dict[str, Any]:
        return self.__dict__["_about"]

    @about.setter
    def about(self, known: About) -> None:
        name = f"{type(self).__name__}(about)"
        found = _object(name, known)
        for entry in ("recipe", "figures"):
            _object(f"{name}[{entry!r}]", found.get(entry))
        if found.get("fingerprint") is not None:
            Fingerprint.read(found["fingerprint"], f"{name}['fingerprint']")
        self._check_about(name, found)
        self.__dict__["_about"] = found
        self.__dict__["_hub_mixin_config"] = {**self.__dict__["_hub_mixin_config"], "about": known}

    def _check_about(self, name: str, known: dict[str, Any]) -> None: ...

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Returns the module itself if it is there already, in that type if given, else a copy, which is made once."""
        first = next(self.parameters())
        wanted = device, dtype or first.dtype
        if wanted == (first.device, first.dtype):
            return self
        copies = _copies.setdefault(self, {})
        if wanted not in copies:
            copies[wanted] = made = copy.deepcopy(self).to(device)
            for parameter in made.parameters():  # frequencies of rotary positions, in buffers, need all their digits
                parameter.data = parameter.data.to(wanted[1])
        return copies[wanted]

    def forget_copies(self) -> None:
        """Drops copies on other devices, which do not follow changed weights."""
        _copies.pop(self, None)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def digest(self) -> str:
        """A short hash of the weights, of up to 1,024 values of each; it tells modules apart that have one shape."""
        weights = self.state_dict(keep_vars=True).values()
        # Tensors of inference mode do not count their changes.
        state = [None if value.is_inference() else (value._version, value.data_ptr()) for value in weights]
        known = self.__dict__.get("_digest")
        if known is None or known[0] != state or None in state:
            found = hashlib.sha256()
            for value in weights:
                values = value.detach().flatten()
                found.update(values[:: max(1, len(values) // 1024)].double().cpu().numpy().tobytes())
            known = self.__dict__["_digest"] = (state, found.hexdigest()[:8])
        return str(known[1])

    def extra_repr(self) -> str:
        return self.digest

    def check(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Raises if the module was fitted to a model with another fingerprint."""
        kept = self.about.get("fingerprint")
        if kept is not None and (difference := Fingerprint.read(kept, "fingerprint").difference(fingerprint())):
            raise SettingError(
                f"this {self.kind} was fitted to {difference}. Use it with that model, or fit another one."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a folder that ``save_pretrained`` has written, or a repository of the Hub.

        Raises:
            SettingError: there is none, it holds something else, was cut short, or has weights that are not finite.
        """
        return cls.from_pretrained(path)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Like huggingface_hub's, with the options of its download, and a check that settings and weights fit each
        other; see :meth:`load`."""
        name = os.fspath(pretrained_model_name_or_path)
        config_file, weights_file = (file_of(cls.kind, name, file, options) for file in (CONFIG, WEIGHTS))
        try:
            with torch.device("meta"):  # no memory is allocated for what the settings want, but the weights do not have
                module = cls(**read_json(config_file))
            # Copies, since the file may change.
            tensors = {key: value.clone() for key, value in load_file(weights_file).items()}
            module.load_state_dict(tensors, assign=True)
        except SelfSpecError as error:
            raise SettingError(f"{config_file}: {error}") from error
        except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise SettingError(
                f"{name} holds no saved {cls.kind}, or one whose {CONFIG} or {WEIGHTS} was cut short or changed "
                f"({brief(error)}). Fit and save it again."
            ) from error
        wrong = [key for key, value in tensors.items() if not torch.isfinite(value).all()]
        if wrong:
            raise SettingError(f"the {cls.kind} at {name} has weights that are not finite: {wrong[0]}. Fit it again.")
        return module.float().eval()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> Any:
        """Like huggingface_hub's, but the folder is written as a whole or not at all.

        Raises:
            SettingError: the folder cannot be written.
        """
        folder, push = path_of(save_directory), options.pop("push_to_hub", False)
        repository = options.pop("repo_id", None) or folder.name
        own = {name: options[name] for name in ("config", "model_card_kwargs") if name in options}
        with reported(folder), folder_written_whole(folder) as inside:
            super().save_pretrained(inside, **own)
        return self.push_to_hub(repository, **options) if push else None

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Returns the model card: what the module is, its recipe and its figures."""
        data = ModelCardData(library_name="hf_selfspec", tags=["hf_selfspec", "self-speculative-decoding"])
        recipe, figures = (
            "\n".join(f"- {name}: {value}" for name, value in (self.about.get(entry) or {}).items())
            for entry in ("recipe", "figures")
        )
        model = self.about.get("fingerprint") or {}
        return ModelCard(
            f"---\n{data.to_yaml()}\n---\n\n# {self.kind[0].upper()}{self.kind[1:]} for self-speculative decoding\n\n"
            f"Fitted with hf_selfspec to a frozen {model.get('model', 'model')} of {model.get('num_layers', '?')} "
            f"layers, {self.num_parameters:,} parameters. It drafts; the model verifies, so that the output is the "
            f"model's own.\n\n## Recipe\n\n{recipe or 'not recorded'}\n\n## Figures\n\n{figures or 'none'}\n"
        )


def _object(name: str, value: object) -> dict[str, Any]:
    """Returns a dict with names as keys, an empty one for ``None``; raises for anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SettingTypeError(f"{name} must be a dict with names as keys, or None, got {brief(repr(value))}.")
    return value


def file_of(kind: str, name: str, file: str, options: dict[str, Any]) -> Path:
    """Returns the path of a file in a folder or a repository of the Hub; raises if there is none."""
    if os.path.isdir(folder := path_of(name)):
        if not (folder / file).is_file():
            raise SettingError(f"{name} has no {file}: give a folder that holds a saved {kind}.")
        return folder / file
    try:
        return Path(hf_hub_download(name, file, **options))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise SettingError(
            f"there is no saved {kind} at {name!r} ({error}). Give the folder that `save_pretrained` has written, or "
            "the name of a repository on the Hub."
        ) from error


def about(model: PreTrainedModel, recipe: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Returns what is saved with the weights."""
    fingerprint = Fingerprint.of_decoder(model)
    return {"fingerprint": asdict(fingerprint), "recipe": recipe, "figures": figures}


def module_of(name: str, given: Any, kind: type[_M]) -> tuple[_M | str, _M]:
    """Returns what a setting keeps that is a module or the path of a saved one, and the module, loaded."""
    if isinstance(given, kind):
        return given, given
    if not isinstance(given, (str, os.PathLike)):
        raise SettingTypeError(f"{name} must be {kind.__name__} or the path of a saved one, got {given!r}.")
    folder = path_of(given)
    path = str(folder.resolve()) if os.path.isdir(folder) else os.fspath(given)  # valid in any working directory
    return path, kind.load(path)
