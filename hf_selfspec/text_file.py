"""A file in which several processes keep what they know of texts: put together, and forgotten together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from . import saving
from .findings import TextFindings
from .saving import Key, Saved

# Seconds to wait for another process that reads or writes.
_PATIENCE = 10.0


class TextFile:
    """What one model's findings in this process know of the file.

    A file has an id, which it keeps as long as nothing is forgotten. Findings that belong to another id than the file's
    are older than what was forgotten, in another process or by removing the file, and are dropped.

    Args:
        path: the file.

    Attributes:
        id: of the file to which the findings belong, ``None`` before they met one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id: str | None = None
        self._version: tuple[int, int] | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process reads or writes the file in the meantime.

        Raises:
            OSError: the folder cannot be written, or another process held the file too long.
        """
        from filelock import FileLock  # which calls without a cache folder do not need

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", timeout=_PATIENCE):
            yield

    def read(self) -> Saved | None:
        """What is in the file, ``None`` where there is none; findings that take it up belong to the file.

        Raises:
            SettingError: it is not one of ours, was cut short or changed.
        """
        if not self.path.exists():
            return None
        # From a folder that cannot be written, in which nothing changes, it is read without the lock.
        with suppress(OSError), self.locked():
            return self._read()
        return self._read()

    def meet(self, found: TextFindings, key: Key) -> None:
        """Puts what others have written since into the findings, before these are written; call it when locked.

        Raises:
            SettingError: what is in the file is not a state of such findings.
        """
        mine, version = self.id, self._version
        if not self.path.exists():
            if mine is not None:
                found.forget()
            self.id = uuid4().hex
        elif self._seen() != version and (saved := self._read()) is not None:
            if mine not in (None, self.id):
                found.forget()
            if (state := saved.states(key.source).get(key.kind)) is not None:
                try:
                    found.merge(state)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise saving.corrupt_findings(self.path, error) from error

    def wrote(self) -> None:
        """The file is what this process has just written; call it when locked."""
        self._version = self._seen()

    def _read(self) -> Saved | None:
        if not self.path.exists():
            return None
        self._version = self._seen()
        saved = saving.read(self.path)
        self.id = saved.text_id
        return saved

    def _seen(self) -> tuple[int, int]:
        """Changes with the file."""
        found = self.path.stat()
        return found.st_mtime_ns, found.st_ino
