"""Reading files that may be damaged, and writing files whole or not at all."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from ..errors import SelfSpecError, SettingError, brief
from ..validation import StrPath

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_name(text: str) -> bool:
    """Returns whether a repository of the Hub can have this name."""
    return _NAME.fullmatch(text) is not None


def path_of(path: StrPath) -> Path:
    """Returns a path that the user gave, with a home folder in place of ``~``."""
    return Path(os.path.expanduser(path))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields where to write a file, which then replaces ``path``, unless an error was raised."""
    with folder_written_whole(path.parent) as inside:
        yield inside / path.name


@contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Yields a folder inside ``folder``; the files written there move to ``folder``, weights first, unless an error was
    raised."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(".tmp", ".", folder, ignore_cleanup_errors=True) as name:
        inside = Path(name)
        yield inside
        for file in filter(Path.is_file, inside.rglob("*")):
            with file.open("rb+") as written:
                os.fsync(written.fileno())  # so that a power failure leaves no empty one in the place of another
        for file in sorted(inside.iterdir(), key=lambda file: (file.suffix != ".safetensors", file.name)):
            os.replace(file, folder / file.name)


@contextmanager
def reported(path: StrPath) -> Iterator[None]:
    """Turns an error about a file that cannot be written into one for the user."""
    try:
        yield
    except (OSError, SafetensorError, NotImplementedError) as error:  # the last one where files cannot be locked
        raise SettingError(
            f"{os.fspath(path)} cannot be written ({_reason(error)}). Give another place, or make room there."
        ) from error


def check_folder(name: str, folder: StrPath) -> None:
    """Checks that files can be written in a folder, called ``name`` in messages, or that it can be created."""
    if not os.fspath(folder):
        raise SettingError(f"{name} is empty. Name a folder; the current one is `.`.")
    at = path_of(folder).absolute()
    try:
        while not at.exists():
            at = at.parent
        with TemporaryDirectory(".tmp", ".", at):  # a file system can still refuse what os.access allows
            pass
    except OSError as error:
        raise SettingError(
            f"{name} {folder}: nothing can be written there ({at}: {_reason(error)}). Name a folder."
        ) from error


def read_text(path: Path) -> str:
    """Returns the content of a file; raises a ``ValueError`` if it cannot be read or is not text in UTF-8."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(_reason(error)) from error
    if "\0" in text:
        raise ValueError("it has null bytes")
    return text


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises a ``ValueError`` or ``RecursionError`` for anything else."""
    return json.loads(read_text(path))


@contextmanager
def reading(name: StrPath, trouble: str, advice: str) -> Iterator[None]:
    """Turns any error about a file or folder that is read into one for the user, who gets to know of which; the
    ``trouble`` is what it is where it is not what was written."""
    try:
        yield
    except SelfSpecError as error:
        if os.fspath(name) in str(error):
            raise
        raise SettingError(f"{os.fspath(name)}: {error}") from error
    except Exception as error:  # of readers of files, or of the code of any configuration
        why = brief(repr(error) if isinstance(error, LookupError) else error)
        raise SettingError(f"{os.fspath(name)} {trouble} ({why}). {advice}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
