"""Saving settings and findings: one JSON file, written whole or not at all, and the classes that it may name."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from safetensors import SafetensorError

import hf_selfspec

from ..errors import SelfSpecError, SettingError, SettingTypeError
from ..model.fingerprint import Fingerprint
from .files import is_name, read_json, write_json

FILE_NAME = "selfspec.json"
FORMAT = 1
# The settings in a file; classes that they may hold are registered. Where a SelfSpec keeps its findings
# (``cache_dir``, ``task``) is not among them: a file from elsewhere must not choose where this machine writes.
_SETTINGS = ("draft", "stop", "tree", "max_draft", "exact", "trust")

# The settings that may hold a registered class, by their names in a file. ``rule`` is the rule inside another rule.
Place = Literal["draft", "stop", "rule", "tree", "search"]
_places: dict[str, dict[str, type]] = {}
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


def register(*places: Place) -> Callable[[_T], _T]:
    """Lets a frozen dataclass of settings be saved and loaded by its name.

    ``SelfSpec.save_pretrained`` writes the name and the fields of a draft, stop rule or tree; ``from_pretrained`` makes
    the object again if a class of that name is registered in that process. No file makes Python import a module, so the
    module that defines the class has to be imported first::

        @hf_selfspec.register("draft")
        @dataclass(frozen=True)
        class MyDraft(hf_selfspec.DraftSource): ...

    Args:
        places: the settings that may hold it: ``"draft"``, ``"stop"``, ``"tree"``.

    Raises:
        SettingTypeError: the class is not a dataclass.
        SettingError: another class of this name is registered there, or there is no such setting.
    """
    if not places or not all(place in get_args(Place) for place in places):
        raise SettingError(
            f"register(*places) takes the settings that may hold the class, got {places!r}. Write "
            'register("draft"), register("stop") or register("tree") above the class.'
        )

    def add(cls: _T) -> _T:
        if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
            raise SettingTypeError(f"register takes a dataclass of settings, got {cls!r}.")
        for place in places:
            namesake = _places.setdefault(place, {}).get(cls.__name__, cls)
            if (namesake.__module__, namesake.__qualname__) != (cls.__module__, cls.__qualname__):
                raise SettingError(
                    f"{cls.__module__}.{cls.__qualname__} cannot be registered: {namesake.__module__}."
                    f"{namesake.__qualname__} has this name already. Give your class another name."
                )
            _places[place][cls.__name__] = cls  # a module that is reloaded defines its class again
        return cls

    return add


def class_named(name: object, setting: str | None = None) -> type | None:
    """Returns the registered class of that name that a setting, or any, may hold; ``None`` if there is none."""
    if not isinstance(name, str):
        return None
    if name in hf_selfspec.__all__:
        getattr(hf_selfspec, name)  # which registers a public class of this package
    places = _places.values() if setting is None else [_places.get(setting, {})]
    return next((classes[name] for classes in places if name in classes), None)


def encode(value: Any, name: str) -> Any:
    """Returns settings as JSON values; only objects of registered classes can be among them."""
    cls = type(value)
    if any(classes.get(cls.__name__) is cls for classes in _places.values()):
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
    _check_names("", settings, _SETTINGS)
    return {name: decode(value, name) for name, value in settings.items()}


def decode(value: Any, name: str) -> Any:
    """The inverse of :func:`encode`; ``name`` contains the names of the settings around it, e.g. ``draft.search``."""
    if isinstance(value, dict):
        setting = name.rpartition(".")[2]
        cls = class_named(value.get("class"), "draft" if setting == "sources" else setting)
        if cls is None:
            raise SettingError(
                f"{name} has the class {value.get('class')!r}, which is not allowed there. If it is your own, import "
                "the module that registers it (hf_selfspec.register) before loading."
            )
        fields = {field: content for field, content in value.items() if field != "class"}
        _check_names(f"{name}.", fields, [field.name for field in dataclasses.fields(cls)])
        return cls(**{field: decode(content, f"{name}.{field}") for field, content in fields.items()})
    if isinstance(value, str) and re.search(r"[\\/]", value):
        _check_place(name, value)
    return tuple(decode(item, name) for item in value) if isinstance(value, list) else value


def _check_names(where: str, names: Mapping[str, Any], allowed: Sequence[str]) -> None:
    if unknown := sorted(names.keys() - set(allowed)):
        raise SettingError(f"it sets {where}{unknown[0]}, which a file cannot set. It may set {', '.join(allowed)}.")


def _check_place(name: str, value: str) -> None:
    """Checks for an absolute path or a Hub repository; Windows would log in to the machine that ``//name`` names."""
    if re.match(r"[\\/]{2}", value) or not (Path(value).is_absolute() or is_name(value)):
        raise SettingError(
            f"{name} is {value!r}, which is neither the whole path of a folder nor the name of a repository on the Hub."
        )


def write(saved: Saved) -> None:
    """Writes a file, whole or not at all."""
    content = {"format": FORMAT, **dataclasses.asdict(saved)}
    del content["path"]
    write_json(saved.path, content)


def read(path: Path) -> Saved:
    """Reads a file; raises a ``SettingError`` if it is not a saved ``SelfSpec``, or was cut short or changed."""
    with reading(path):
        if not path.exists():
            raise SettingError("it does not exist. Give the folder that `spec.save_pretrained(folder)` has written.")
        content = read_json(path)
        if (version := content.pop("format")) != FORMAT:
            raise SettingError(
                f"it has format {version!r}, but this version of hf_selfspec reads format {FORMAT}. Save it again with "
                "this version, or install the one it was saved with."
            )
        if (fingerprint := content["fingerprint"]) is not None:
            content["fingerprint"] = Fingerprint.read(fingerprint, "fingerprint")
        content["findings"] = {name: dict(state) for name, state in content["findings"].items()}
        return Saved(path=path, **content)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the parts of a file raise, where they are not what was written, into an error about the file."""
    try:
        yield
    except SelfSpecError as error:
        raise SettingError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, SafetensorError) as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise SettingError(
            f"{path} is not a saved SelfSpec, or was cut short or changed ({why}). Save it again, or delete it."
        ) from error
