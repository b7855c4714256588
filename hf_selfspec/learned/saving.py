"""Saving settings and findings: one JSON file, written whole or not at all, and the classes that it may name."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import hf_selfspec

from ..errors import SettingError, SettingTypeError
from ..model.fingerprint import Fingerprint
from . import files
from .files import is_name, read_json, written_whole

FILE_NAME = "selfspec.json"
FORMAT = 1
# The settings in a file; classes that they may hold are registered. Where a SelfSpec keeps its findings
# (``cache_dir``, ``task``) is not among them: a file from elsewhere must not choose where this machine writes.
_SETTINGS = ("draft", "stop", "tree", "max_draft", "exact", "trust")

_classes: dict[str, type] = {}
_T = TypeVar("_T", bound=type)

# By a kind of calls and a source what that has learned, see Findings.state.
States = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Saved:
    """The content of a file."""

    settings: Mapping[str, Any]  # as JSON values, see decode_settings
    fingerprint: Fingerprint | None  # of the model to which all this belongs, None for any
    findings: States
    path: Path
    stamp: str = ""  # of a file in cache_dir: another one once texts were forgotten


def register(cls: _T) -> _T:
    """Lets a frozen dataclass of settings be saved and loaded by its name.

    ``SelfSpec.save_pretrained`` writes the name and the fields of a draft, stop rule or tree; ``from_pretrained`` makes
    the object again if a class of that name is registered in that process. No file makes Python import a module, so the
    module that defines the class has to be imported first::

        @hf_selfspec.register
        @dataclass(frozen=True)
        class MyDraft(hf_selfspec.DraftSource): ...

    Raises:
        SettingTypeError: the class is not a dataclass.
        SettingError: another class of this name is registered.
    """
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise SettingTypeError(f"register takes a dataclass of settings, got {cls!r}. Write @register above the class.")
    namesake = _classes.get(cls.__name__, cls)
    if (namesake.__module__, namesake.__qualname__) != (cls.__module__, cls.__qualname__):
        raise SettingError(
            f"{cls.__module__}.{cls.__qualname__} cannot be registered: {namesake.__module__}.{namesake.__qualname__} "
            "has this name already. Give your class another name."
        )
    _classes[cls.__name__] = cls  # a module that is reloaded defines its class again
    return cls


def class_named(name: object) -> type | None:
    """Returns the registered class of that name, ``None`` if there is none."""
    if isinstance(name, str) and name in hf_selfspec.__all__:
        getattr(hf_selfspec, name)  # which registers a public class of this package
    return _classes.get(name) if isinstance(name, str) else None


def encode(value: Any, name: str) -> Any:
    """Returns settings as JSON values; only objects of registered classes can be among them."""
    cls = type(value)
    if _classes.get(cls.__name__) is cls:
        fields = {f.name: encode(getattr(value, f.name), f"{name}.{f.name}") for f in dataclasses.fields(value)}
        return {"class": cls.__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [encode(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SettingError(
        f"{name} is {value!r}, which cannot be saved: only settings of hf_selfspec's own classes and of classes with "
        "hf_selfspec.register can. Leave your own function or generator out and set it again after loading; give a "
        "head by the folder in which it is saved."
    )


def decode_settings(settings: Any) -> dict[str, Any]:
    """Returns the arguments of ``SelfSpec`` from a file's settings."""
    if unknown := sorted(settings.keys() - set(_SETTINGS)):
        raise SettingError(f"it sets {unknown[0]}, which a file cannot set. It may set {', '.join(_SETTINGS)}.")
    return {name: decode(value, name) for name, value in settings.items()}


def decode(value: Any, name: str) -> Any:
    """The inverse of :func:`encode`; ``name`` contains the names of the settings around it, e.g. ``draft.search``."""
    if isinstance(value, dict):
        if (cls := class_named(value.get("class"))) is None:
            raise SettingError(
                f"{name} has the class {value.get('class')!r}, which is not known here. If it is your own, import the "
                "module that registers it (hf_selfspec.register) before loading."
            )
        fields = {field: decode(content, f"{name}.{field}") for field, content in value.items() if field != "class"}
        return cls(**fields)
    # A folder by its whole path, or a repository; Windows would log in to the machine that ``//name`` names.
    is_place = isinstance(value, str) and re.search(r"[\\/]", value)
    if is_place and (re.match(r"[\\/]{2}", value) or not (Path(value).is_absolute() or is_name(value))):
        raise SettingError(
            f"{name} is {value!r}, which is neither the whole path of a folder nor the name of a repository on the Hub."
        )
    return tuple(decode(item, name) for item in value) if isinstance(value, list) else value


def write(saved: Saved) -> None:
    """Writes a file, whole or not at all."""
    content = {"format": FORMAT, **dataclasses.asdict(saved), "digest": _digest(saved.findings)}
    del content["path"]
    with written_whole(saved.path) as beside, beside.open("x", encoding="utf-8") as file:
        json.dump(content, file)


def read(path: Path) -> Saved:
    """Reads a file; raises a ``SettingError`` if it is not a saved ``SelfSpec``, or was cut short or changed."""
    with reading(path):
        if not path.exists():
            raise SettingError("it does not exist. Give the folder that `spec.save_pretrained(folder)` has written.")
        content = read_json(path)
        if (version := content.pop("format")) != FORMAT:
            raise SettingError(
                f"it has format {version!r}, and this version reads format {FORMAT}. Save it again with this version."
            )
        if (fingerprint := content["fingerprint"]) is not None:
            content["fingerprint"] = Fingerprint.read(fingerprint, "fingerprint")
        # So that what restores findings need not doubt them.
        if content.pop("digest", "") != _digest(content["findings"]) and content["findings"] != {}:
            raise ValueError("other findings than were written")
        return Saved(path=path, **content)


def _digest(findings: States) -> str:
    return hashlib.sha256(json.dumps(findings).encode()).hexdigest()[:16]


def reading(path: Path) -> AbstractContextManager[None]:
    """Turns what the parts of a file raise, where they are not what was written, into an error about the file."""
    trouble = "is not a saved SelfSpec, or was cut short or changed"
    return files.reading(path, trouble, "Save it again, or delete it.")
