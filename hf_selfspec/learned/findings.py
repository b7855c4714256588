"""What a draft source learns about a model and keeps from call to call, and a file in which processes share it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

from ..errors import SettingError, warn_once
from ..model.fingerprint import Fingerprint
from ..stats import GenerationStats
from . import saving
from .saving import Key, Saved

# Seconds to wait while another process holds a file, at the end of a process and where texts are to be forgotten; calls
# do not wait.
PATIENCE = 10.0
# Seconds between two writes of texts; they double after each write that was not possible, up to a maximum.
WRITTEN, _MOST_WAITED = 10.0, 640.0


class Findings:
    """What a source has learned about one model for one kind of call; a source overrides what it needs."""

    changed: Callable[[], object] = staticmethod(lambda: None)  # called when there is something new to save

    def report(self, stats: GenerationStats) -> None:
        """Adds what was learned to the statistics of a call."""

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned; raises and changes nothing for anything else."""

    def merge(self, state: dict[str, Any]) -> None:
        """Adds what another process has learned, as :meth:`state` returned it there; raises as :meth:`restore` does."""

    def forget(self) -> None:
        """Drops users' texts, if there are any, and what follows from them."""


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


class CacheFile:
    """A file of ``cache_dir``: one model's findings, either those of one source with texts or all others.

    Texts that are forgotten take the file with them, so texts that began with a file of another ``text_id`` are dropped
    as well.
    """

    def __init__(self, path: Path, has_texts: bool) -> None:
        self.path = path
        self.has_texts = has_texts
        self.has_news = False  # whether there is something new to write
        self.kept: dict[Key, dict[str, Any]] = {}  # what it held, also for kinds of calls that were not made since
        self._text_id = ""
        self._version: tuple[int, int] | None = None
        self._last_write, self._pause = -WRITTEN, WRITTEN

    def add_news(self) -> None:
        self.has_news = True

    @property
    def is_due(self) -> bool:
        return self.has_news and (not self.has_texts or monotonic() - self._last_write >= self._pause)

    def count_write(self, is_done: bool) -> None:
        """Called after a write; one that was not possible is due again, after a longer and longer pause."""
        self._last_write, self._pause = monotonic(), WRITTEN if is_done else min(2 * self._pause, _MOST_WAITED)
        self.has_news |= not is_done

    def read(self) -> Saved | None:
        """Reads it; ``None`` with a warning for one that cannot be used. Files are replaced as a whole: no lock."""
        version, saved = self._present_version(), None
        if version is not None:
            with begins_anew():
                saved = saving.read(self.path)
        self._version = version
        if version is None or saved is not None:  # a file that cannot be used does not mean that texts were dropped
            self._text_id = "" if saved is None else saved.text_id
        self.kept = {} if saved is None or self.has_texts else saved.findings
        return saved

    def write(
        self,
        findings: Mapping[Key, Findings],
        settings: Mapping[str, Any],
        fingerprint: Fingerprint,
        patience: float,
    ) -> None:
        """Writes findings together with what others have written since."""
        with locked(self.path, patience):
            text_id, of_others = self._text_id, None
            if self._present_version() != self._version:
                of_others = self.read()
            for key, of_key in findings.items():
                if text_id and self._text_id != text_id:
                    of_key.forget()
                if of_others is not None and key in of_others.findings:
                    with begins_anew(), saving.reading(self.path):
                        of_key.merge(of_others.findings[key])
            self._text_id = self._text_id or uuid4().hex
            states = self.kept | {key: of_key.state() for key, of_key in findings.items()}
            saving.write(Saved(dict(settings), fingerprint, states, self.path, self._text_id))
            self._version = self._present_version()

    def begin(self) -> None:
        """The next write is the first one: texts were dropped."""
        self._text_id, self._version = "", None

    def _present_version(self) -> tuple[int, int] | None:
        try:
            file = self.path.stat()
        except OSError:
            return None
        return file.st_mtime_ns, file.st_ino


@contextmanager
def begins_anew() -> Iterator[None]:
    """Warns of a file of ``cache_dir`` that cannot be used; the next write takes its place."""
    try:
        yield
    except (SettingError, OSError) as error:
        warn_once(f"findings begin anew, since their file cannot be used: {error}")
