"""A module that is fitted to a model and saved apart from it: weights, settings, recipe and the model's fingerprint."""

import copy
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.nn as nn
from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from typing_extensions import Self

import hf_selfspec

from ..errors import SettingError, SettingTypeError
from ..learned import files
from ..learned.files import folder_written_whole, path_of, read_json, reported
from ..model.fingerprint import Fingerprint

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# In the config: what kind of part it is, and of which weights, since files are replaced one by one.
_KIND, DIGEST = "kind", "weights_sha256"
# Copies of modules on other devices, or of other types, with the weights that were copied, and their state then.
_copies = weakref.WeakKeyDictionary[nn.Module, dict[tuple[torch.device, torch.dtype], Any]]()
_M = TypeVar("_M", bound="DraftModule")
About: TypeAlias = dict[str, Any] | None
Config: TypeAlias = dict[str, Any]


class Format(NamedTuple):
    """How a config tells what a folder holds, what loads it, and what makes it from its name and config alone, without
    weights."""

    is_format: Callable[[Config], bool]
    load: Callable[..., Any]
    make: Callable[[str, Config], Any]


_formats: list[Format] = []


class DraftModule(nn.Module, PyTorchModelHubMixin):
    """A small module that was fitted to one frozen model.

    ``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` are those of huggingface_hub: ``config.json``,
    ``model.safetensors`` and a model card with the recipe and the figures.

    Attributes:
        kind: what messages and the config call such a module.
        usage: the expression of a ``SelfSpec`` that drafts with the folder ``{!r}``, for command lines.
        source: the name of the registered draft source that drafts with it where it is attached to a model.
        keeps_type: whether weights stay in the type in which they were saved, else they become float32.
        about: ``{"fingerprint": ..., "recipe": ..., "figures": ...}``: the model that it belongs to, how it was fitted
            and what was measured then.
    """

    kind: ClassVar[str] = "part"
    usage: ClassVar[str] = ""
    source: ClassVar[str] = ""
    keeps_type: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):  # otherwise a variant would load what the class before it has saved
            register_format(lambda config: config.get(_KIND) == cls.kind, cls.from_pretrained, cls._made)

    def __init__(self, about: About = None) -> None:
        super().__init__()
        self.about = dict(about or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def __str__(self) -> str:
        """What it is, in one line: kind, layers and vocabulary, and the model that it was made for."""
        model, recipe = (self.about.get(entry) or {} for entry in ("fingerprint", "recipe"))
        made_for = f"{model['model']} of {model['num_layers']} layers" if model else recipe.get("made for")
        return ", ".join([*self.facts(), *([f"made for {made_for}"] if made_for else [])])

    def facts(self) -> list[str]:
        """What ``str`` tells but for the model."""
        return [self.kind]

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Returns the module itself if it is on the device and of the type (by default its own), else a copy, which is
        made once, and again when weights have changed."""
        first = next(self.parameters())
        dtype = dtype or first.dtype
        if (device, dtype) == (first.device, first.dtype):
            return self
        weights, state, copied = _copies.get(self, {}).get((device, dtype), ((None,), (), None))
        if weights[0] is not first or state != _state(weights):
            copied, weights = copy.deepcopy(self).to(device), list(self.parameters())
            for parameter in copied.parameters():  # no buffers: rotary frequencies need all their digits
                parameter.data = parameter.data.to(dtype)
            _copies.setdefault(self, {})[device, dtype] = weights, _state(weights), copied
        return cast(Self, copied)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def digest(self) -> str:
        """A short hash of the weights, of up to 1,024 values of each; it tells modules apart that have one shape."""
        weights = list(self.state_dict(keep_vars=True).values())
        state = _state(weights)
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
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Self:
        """Reads a folder that ``save_pretrained`` has written, or a repository of the Hub (``options`` as there).

        ``DraftModule.from_pretrained`` reads parts of all kinds, and heads in the formats of others.

        Raises:
            SettingError: there is none, it holds something else, was cut short, has weights that are not finite, or
                files of two saves, of which one was interrupted.
        """
        name = os.fspath(pretrained_model_name_or_path)
        settings = read_config(cls.kind, name, **options)
        if cls is DraftModule:
            if (known := format_of(settings)) is None:
                raise SettingError(
                    f"{name} holds no part: its {CONFIG} has no kind that is known here. Give the folder or the Hub "
                    "repository of a fitted part, a DFlash, DSpark or EAGLE-3 head, or a Gemma 4 assistant; if its "
                    "class is your own, import the module that defines it before loading."
                )
            return cast(Self, known.load(name, **options))
        weights_file = file_of(cls.kind, name, WEIGHTS, **options)
        with reading(cls.kind, name):
            if (kind := settings.get(_KIND)) != cls.kind:
                raise ValueError(f"{CONFIG} is that of {kind!r}")
            digest, module = settings.get(DIGEST), cls._made(name, settings)
            tensors = read_tensors(weights_file)
            module.load_state_dict(tensors, assign=True)
            if key := not_finite(tensors):
                raise ValueError(f"weights that are not finite: {key}")
            if digest != _digest_of(weights_file):  # last, so that files that are replaced meanwhile are noticed, too
                raise ValueError(f"its {CONFIG} and {WEIGHTS} are not of one save")
        return (module if cls.keeps_type else module.float()).eval()

    @classmethod
    def _made(cls, name: str, settings: Config) -> Self:
        """A module without weights: no memory is allocated for what settings want, but a file may not have."""
        with torch.device("meta"):
            return cls(**{key: value for key, value in settings.items() if key not in (_KIND, DIGEST)})

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
        written = {"about": self.about or None, _KIND: self.kind, DIGEST: _digest_of(save_directory / WEIGHTS)}
        self.__dict__["_hub_mixin_config"] |= written

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


def register_format(
    is_format: Callable[[Config], bool],
    load: Callable[..., Any],
    make: Callable[[str, Config], Any],
    is_last: bool = False,
) -> None:
    """Lets ``load`` read folders and repositories with a config that ``is_format``, see :class:`Format`; with
    ``is_last`` those that are of no other format."""
    _formats.insert(len(_formats) if is_last else 0, Format(is_format, load, make))


def format_of(config: Config) -> Format | None:
    """Returns the format of a folder with this config, if it is one of a part."""
    for _ in range(2):
        for known in _formats:
            if known.is_format(config):
                return known
        for name in hf_selfspec.__all__:  # this package's own kinds, whose modules nothing may have used yet
            getattr(hf_selfspec, name)
    return None


def _state(weights: Sequence[torch.Tensor]) -> list[int | None]:
    """Numbers that change with weights, or with where they are; tensors of inference mode have only the latter."""
    versions = [None if weight.is_inference() else weight._version for weight in weights]
    return [*versions, *map(torch.Tensor.data_ptr, weights)]


def read_config(kind: str, name: str, **options: Any) -> dict[str, Any]:
    """Returns the content of a part's config."""
    file = file_of(kind, name, CONFIG, **options)
    with reading(kind, name):
        config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError(f"its {CONFIG} has no names")
        return config


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


def reading(kind: str, name: str) -> AbstractContextManager[None]:
    """Turns any error about the files of a part into one for the user."""
    trouble = f"holds no {kind}, or one whose {CONFIG} or weights were cut short or changed"
    return files.reading(name, trouble, "Save it again.")


def check_served(name: str, refused: dict[str, bool]) -> None:
    """Raises if a head has something that is not served."""
    if variants := ", ".join(variant for variant, is_there in refused.items() if is_there):
        raise SettingError(
            f"{name} is a variant that is not served: {variants}. The guide has a table of the formats that are."
        )


def told(count: int, width: int, read: Sequence[int], size: int, vocabulary: int) -> list[str]:
    """Says how many layers of which width a head has, the states before which of the model's it reads, and how many
    tokens of which vocabulary it drafts, 0 for all, or where it is not known."""
    layers = f"{count} layer{'s' * (count > 1)} of width {width}"
    states = [f"reads the states before the layers {', '.join(map(str, read))}"] if read else []
    of = f"{vocabulary:,} tokens" if vocabulary else "tokens"
    return [layers, *states, f"drafts {size:,} of {of}" if 0 < size != vocabulary else f"drafts all {of}"]


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
    module = DraftModule.from_pretrained(path)
    if not isinstance(module, module_class):
        raise SettingError(f"{name}: {path} holds a saved {module.kind}, and takes a {module_class.kind}.")
    return path, module
