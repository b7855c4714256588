"""What a draft source learns about a model and keeps from call to call, and the file in which processes share texts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..errors import SettingError, warn_once
from ..stats import GenerationStats
from . import saving
from .saving import Key, Saved

# Seconds to wait while another process holds a file, at the end of a process and where texts are to be forgotten; calls
# do not wait.
PATIENCE = 10.0


class Findings:
    """What is known of one model for one kind of call; a source overrides what it needs."""

    changed: Callable[[], object] | None = None  # called when there is something new to save

    @property
    def is_idle(self) -> bool:
        """Whether the next call can skip drafting and does not need to look at its text."""
        return False

    def report(self, stats: GenerationStats) -> None:
        """Adds what is known to the statistics of a call."""

    def state(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned; raises and changes nothing for anything else."""


class TextFindings(Findings):
    """Findings that hold users' texts: they can be forgotten, and processes that share a file merge them."""

    # Writes them, and waits so many seconds for a file that another process holds; returns whether that is done.
    save: Callable[[float], bool] | None = None

    def forget(self) -> None:
        """Drops the texts and what follows from them."""
        raise NotImplementedError

    def merge(self, state: dict[str, Any]) -> None:
        """Adds what another process knows, as :meth:`state` returned it there; raises what :meth:`restore` does."""
        raise NotImplementedError


@contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Keeps others from writing a file; raises a ``TimeoutError`` while another process, or thread, does that for
    longer than ``patience`` seconds, and another ``OSError`` where it is not possible."""
    from filelock import FileLock  # imported here because calls without a cache folder do not need it

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock", timeout=patience)
    try:
        lock.acquire()
    except NotImplementedError as error:
        raise OSError(str(error)) from error
    try:
        yield
    finally:
        lock.release()


class TextFile:
    """The link of a file and one model's findings, which are dropped if their ``id`` is not that of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id: str | None = None
        self._version: tuple[int, int] | None = None

    def read(self) -> Saved | None:
        """Reads the file, ``None`` if there is none; findings that start from it belong to the file. Files are replaced
        as a whole, so that needs no lock."""
        try:
            self._version = self._seen()
            saved = saving.read(self.path)
        except (OSError, SettingError):
            if self.path.exists():
                raise
            return None
        self.id = saved.text_id
        return saved

    @contextmanager
    def merged(self, found: Findings, key: Key, patience: float) -> Iterator[None]:
        """Merges what others have written since into the findings; what the block writes is the file from then on."""
        with locked(self.path, patience):
            if isinstance(found, TextFindings):
                with beginning_anew(self.path):
                    self._merge(found, key)
            yield
            self._version = self._seen()

    def _merge(self, found: TextFindings, key: Key) -> None:
        mine, version = self.id, self._version
        if not self.path.exists():
            if mine is not None:
                found.forget()
            self.id = uuid4().hex
        elif self._seen() != version and (saved := self.read()) is not None:
            if mine not in (None, self.id):
                found.forget()
            if (state := saved.states(key.source).get(key.kind)) is not None:
                with saving.reading(self.path):
                    found.merge(state)

    def _seen(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_ino


@contextmanager
def beginning_anew(path: Path) -> Iterator[None]:
    """Warns of a file of ``cache_dir`` that cannot be used, and moves it aside unless it could only not be read now."""
    try:
        yield
    except (SettingError, OSError) as error:
        kept, cause = path, error.__cause__
        if not any(isinstance(one, OSError) for one in (error, cause, getattr(cause, "__cause__", None))):
            # In a folder that cannot be written it stays.
            with suppress(OSError):
                os.replace(path, aside(path))
                kept = aside(path)
        warn_once(f"findings begin anew, since their file, which is kept as {kept}, cannot be used: {error}")


def aside(path: Path) -> Path:
    """Where a file is kept that cannot be used."""
    return path.with_name(f"{path.name}.aside")
