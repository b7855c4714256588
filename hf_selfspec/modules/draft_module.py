"""A module that is fitted to a model and saved apart from it: weights, settings, recipe and the model's fingerprint."""

import copy
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_DIGEST = "weights_sha256"  # in the config; files are replaced one by one
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
    def about(self, value: About) -> None:
        name = f"{type(self).__name__}(about)"
        about = _object(name, value)
        for entry in ("recipe", "figures"):
            _object(f"{name}[{entry!r}]", about.get(entry))
        if about.get("fingerprint") is not None:
            Fingerprint.read(about["fingerprint"], f"{name}['fingerprint']")
        self._check_about(name, about)
        self.__dict__["_about"] = about
        self.__dict__["_hub_mixin_config"] = {**self.__dict__["_hub_mixin_config"], "about": value}

    def _check_about(self, name: str, about: dict[str, Any]) -> None: ...

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Returns the module itself if it is on the device and of the type (by default its own), else a copy, which is
        made once."""
        first = next(self.parameters())
        dtype = dtype or first.dtype
        if (device, dtype) == (first.device, first.dtype):
            return self
        copies = _copies.setdefault(self, {})
        if (device, dtype) not in copies:
            copies[device, dtype] = copy.deepcopy(self).to(device)
            for parameter in copies[device, dtype].parameters():  # no buffers: rotary frequencies need all their digits
                parameter.data = parameter.data.to(dtype)
        return copies[device, dtype]

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
        last_state, digest = self.__dict__.get("_digest", (None, ""))
        if last_state != state or None in state:
            sha256 = hashlib.sha256()
            for value in weights:
                values = value.detach().flatten()
                sha256.update(values[:: max(1, len(values) // 1024)].double().cpu().numpy().tobytes())
            digest = sha256.hexdigest()[:8]
            self.__dict__["_digest"] = state, digest
        return str(digest)

    def extra_repr(self) -> str:
        return self.digest

    def check(self, fingerprint: Callable[[], Fingerprint]) -> None:
        """Raises if the module was fitted to a model with another fingerprint."""
        saved = self.about.get("fingerprint")
        if saved is not None and (difference := Fingerprint.read(saved, "fingerprint").difference(fingerprint())):
            raise SettingError(
                f"this {self.kind} was fitted to {difference}. Use it with that model, or fit another one."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """As :meth:`from_pretrained`."""
        return cls.from_pretrained(path)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Reads a folder that ``save_pretrained`` has written, or a repository of the Hub (``options`` as there).

        Raises:
            SettingError: there is none, it holds something else, was cut short, has weights that are not finite, or
                files of two saves, of which one was interrupted.
        """
        name = os.fspath(pretrained_model_name_or_path)
        config_file, weights_file = (file_of(cls.kind, name, file, **options) for file in (CONFIG, WEIGHTS))
        try:
            with torch.device("meta"):  # no memory is allocated for what the settings want, but the weights do not have
                settings = read_json(config_file)
                if not isinstance(settings, dict):
                    raise ValueError(f"its {CONFIG} has no names")
                digest = settings.pop(_DIGEST, None)
                module = cls(**settings)
            tensors = read_tensors(weights_file)
            module.load_state_dict(tensors, assign=True)
        except SelfSpecError as error:  # of a setting
            raise SettingError(f"{config_file}: {error}") from error
        except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise SettingError(
                f"{name} holds no saved {cls.kind}, or one whose {CONFIG} or {WEIGHTS} was cut short or changed "
                f"({brief(error)}). Fit and save it again."
            ) from error
        if key := not_finite(tensors):
            raise SettingError(f"the {cls.kind} at {name} has weights that are not finite: {key}. Fit it again.")
        if digest != _digest_of(weights_file):  # last, so that files that are replaced meanwhile are noticed, too
            raise SettingError(f"{name}: its {CONFIG} and {WEIGHTS} are not of one save. Save the {cls.kind} again.")
        return module.float().eval()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> Any:
        """Like huggingface_hub's, but the folder is written as a whole or not at all.

        Raises:
            SettingError: the folder cannot be written.
        """
        folder, push = path_of(save_directory), options.pop("push_to_hub", False)
        repository = options.pop("repo_id", None) or folder.name
        of_files = {name: options[name] for name in ("config", "model_card_kwargs") if name in options}
        with reported(folder), folder_written_whole(folder) as inside:
            super().save_pretrained(inside, **of_files)
        return self.push_to_hub(repository, **options) if push else None

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)
        self.__dict__["_hub_mixin_config"][_DIGEST] = _digest_of(save_directory / WEIGHTS)

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


def file_of(kind: str, name: str, file: str, **options: Any) -> Path:
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


def _digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file, copied, since the file may change."""
    return {key: value.clone() for key, value in load_file(file).items()}


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Returns the name of the first tensor with a value that is not finite."""
    return next((key for key, value in tensors.items() if not torch.isfinite(value).all()), None)


@contextmanager
def reading_published(kind: str, name: str) -> Iterator[None]:
    """Turns any error about a checkpoint that others publish into one for the user."""
    try:
        yield
    except SelfSpecError:
        raise
    except Exception as error:  # of readers of files, or of the code of any configuration
        raise SettingError(
            f"{name} holds no {kind}, or one whose {CONFIG} or weights were cut short or changed ({brief(error)})."
        ) from error


def published_weights(tensors: dict[str, torch.Tensor], unused: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names do not begin with ``unused``, floating-point ones in the type of ``fc``'s."""
    tensors = {key: value for key, value in tensors.items() if not key.startswith(unused)}
    if key := not_finite(tensors):
        raise ValueError(f"{key} is not finite")
    dtype = tensors["fc.weight"].dtype
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}


def about(model: PreTrainedModel, recipe: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Returns what is saved with the weights."""
    fingerprint = Fingerprint.of_decoder(model)
    return {"fingerprint": asdict(fingerprint), "recipe": recipe, "figures": figures}


def module_of(name: str, setting: Any, module_class: type[_M]) -> tuple[_M | str, _M]:
    """Returns what a setting keeps that is a module or the path of a saved one, and the module, loaded."""
    if isinstance(setting, module_class):
        return setting, setting
    if not isinstance(setting, (str, os.PathLike)):
        raise SettingTypeError(f"{name} must be {module_class.__name__} or the path of a saved one, got {setting!r}.")
    folder = path_of(setting)
    path = str(folder.resolve()) if os.path.isdir(folder) else os.fspath(setting)  # valid in any working directory
    return path, module_class.load(path)
