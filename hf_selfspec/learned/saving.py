"""Saving settings and findings: one JSON file, written whole or not at all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SelfSpecError, SettingError
from ..model.fingerprint import Fingerprint
from .files import is_name, read_json, write_json
from .registry import is_registered, registered

FILE_NAME = "selfspec.json"
_FORMAT = 1
# The settings in a file; the registry has the classes that they may hold. Where a SelfSpec keeps its findings
# (``cache_dir``, ``task``) is not among them: a file from elsewhere must not choose where this machine writes.
_SETTINGS = ("draft", "stop", "tree", "max_draft")
# Settings that name the folder or repository to load a part from, and whether they may be left out.
PARTS = {"adapter": False, "head": True, "heads": False, "lora": False}

# Whether tokens are sampled, and whether there are several rows.
Kind = tuple[bool, bool]


class Key(NamedTuple):
    """What findings are about: a kind of calls, and the draft source that keeps them."""

    kind: Kind | None  # None for all
    source: str  # empty in files of earlier versions


@dataclasses.dataclass(frozen=True)
class Saved:
    """The content of a file."""

    settings: dict[str, Any]
    fingerprint: Fingerprint | None  # of the model to which all this belongs, None for any
    findings: dict[Key, dict[str, Any]]  # states, see Findings.state
    path: Path
    text_id: str = ""  # see TextFile

    def states(self, source: str) -> dict[Kind | None, dict[str, Any]]:
        """The states of one source by kind of call."""
        return {key.kind: state for key, state in self.findings.items() if key.source in (source, "")}


def encode(value: Any, name: str) -> Any:
    """Returns settings as JSON values; only objects of registered classes can be among them."""
    if dataclasses.is_dataclass(value) and is_registered(type(value)):
        fields = {f.name: encode(getattr(value, f.name), f"{name}.{f.name}") for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [encode(item, name) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise SettingError(
        f"{name} is {value!r}, which cannot be saved: only settings of hf_selfspec's own classes and of classes with "
        "hf_selfspec.register can. Leave your own function or generator out and set it again after loading."
    )


def decode_settings(settings: Any) -> dict[str, Any]:
    """Returns the arguments of ``SelfSpec`` from a file's settings."""
    if not isinstance(settings, dict):
        raise TypeError(f"its settings are {settings!r}")
    _check_names("", settings, _SETTINGS)
    return {name: decode(value, name) for name, value in settings.items()}


def decode(value: Any, name: str) -> Any:
    """The inverse of :func:`encode`; ``name`` contains the names of the settings around it, e.g. ``draft.search``."""
    setting = name.rpartition(".")[2]
    if isinstance(value, dict):
        kind = registered(setting, value.get("class"))
        if kind is None:
            raise SettingError(
                f"{name} has the class {value.get('class')!r}, which is not allowed there. If it is your own, import "
                "the module that registers it (hf_selfspec.register) before loading."
            )
        given = {field: one for field, one in value.items() if field != "class"}
        _check_names(f"{name}.", given, [field.name for field in dataclasses.fields(kind)])
        return kind(**{field: decode(one, f"{name}.{field}") for field, one in given.items()})
    if setting in PARTS and not (value is None and PARTS[setting]):
        _check_place(name, value)
    return tuple(decode(item, name) for item in value) if isinstance(value, list) else value


def _check_names(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise SettingError(f"it sets {where}{unknown[0]}, which a file cannot set. It may set {', '.join(known)}.")


def _check_place(name: str, value: Any) -> None:
    """Checks that a place is the absolute path of a folder or the name of a repository on the Hub.

    Windows logs in to the machine that a path names after two slashes of either kind, so a file must not choose such
    paths.
    """
    is_usual = isinstance(value, str) and not re.match(r"[\\/]{2}", value)
    if not is_usual or not (Path(value).is_absolute() or is_name(value)):
        raise SettingError(
            f"{name} is {value!r}, which is neither the whole path of a folder nor the name of a repository on the Hub."
        )


def write(
    path: Path,
    settings: Mapping[str, Any],
    fingerprint: Fingerprint | None,
    findings: Mapping[Key, dict[str, Any]],
    text_id: str = "",
) -> None:
    """Writes a file, whole or not at all."""
    content = {
        "format": _FORMAT,
        "settings": {name: encode(value, name) for name, value in settings.items()},
        "fingerprint": None if fingerprint is None else dataclasses.asdict(fingerprint),
        "findings": [
            {"do_sample": do_sample, "several_rows": several_rows, "source": key.source, "state": state}
            for key, state in findings.items()
            for do_sample, several_rows in [key.kind or (None, None)]
        ],
        "text_id": text_id,
    }
    write_json(path, content)


def read(path: Path) -> Saved:
    """Reads a file; raises a ``SettingError`` if it is not a saved ``SelfSpec``, or was cut short or changed."""
    with reading(path):
        try:
            content = read_json(path)
        except FileNotFoundError as error:
            raise SettingError(
                "it does not exist. Give the folder that `spec.save_pretrained(folder)` has written."
            ) from error
        if content["format"] != _FORMAT:
            raise SettingError(
                f"it has format {content['format']!r}, but this version of hf_selfspec reads format {_FORMAT}. "
                "Save it again with this version, or install the one it was saved with."
            )
        kept = content["fingerprint"]
        return Saved(
            settings=decode_settings(content["settings"]),
            fingerprint=None if kept is None else Fingerprint.read(kept, "fingerprint"),
            findings={_key(one): dict(one["state"]) for one in content["findings"]},
            path=path,
            text_id=str(content.get("text_id", "")),
        )


def read_if_there(path: Path) -> Saved | None:
    """As :func:`read`, ``None`` where there is no file."""
    return read(path) if path.exists() else None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the parts of a file raise, where they are not what was written, into an error about the file."""
    try:
        yield
    except SelfSpecError as error:
        raise SettingError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if type(error) is ValueError else repr(error)
        raise SettingError(
            f"{path} is not a saved SelfSpec, or was cut short or changed ({why}). Save it again, or delete it."
        ) from error


def _key(one: dict[str, Any]) -> Key:
    kind, source = (one["do_sample"], one["several_rows"]), one.get("source", "")
    if not isinstance(source, str) or not (kind == (None, None) or all(isinstance(value, bool) for value in kind)):
        raise TypeError(f"{kind!r}, {source!r} is not a kind of call and a source")
    return Key(None if kind[0] is None else kind, source)
