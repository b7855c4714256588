"""What a ``SelfSpec`` learns from call to call, and the file of ``cache_dir`` in which it is kept."""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, cast
from uuid import uuid4

from transformers import PreTrainedModel

from ..errors import SettingError, only_warned, warn_once
from ..model.fingerprint import Fingerprint
from ..model.forks import new_lock
from ..model.module_tools import is_tensor_parallel
from ..stats import GenerationStats
from ..validation import StrPath
from . import saving
from .files import path_of, reported
from .saving import Saved, States

# Seconds between two writes of a file after calls, and seconds to wait while another process holds it, at the end of a
# process and where texts are to be forgotten; calls do not wait.
_PAUSE, PATIENCE = 10.0, 10.0
# The kind of findings that all kinds of calls share: those of texts, which users may have forgotten.
ALL = "all"


class Findings:
    """What a source has learned about one model for one kind of call; a source overrides what it needs."""

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""

    def forget(self) -> None:
        """Drops users' texts, if there are any, and what follows from them."""


_T = TypeVar("_T")

# What this process has learned and not written yet, by file; also of models that no longer exist.
_unwritten: dict[Path, tuple[Knowledge, ModelRecord]] = {}


@atexit.register
def write_all() -> None:
    """Writes what this process has learned and not written yet."""
    until = monotonic() + PATIENCE
    for knowledge, record in list(_unwritten.values()):
        knowledge.write(record, max(until - monotonic(), 0.1))


@dataclass
class ModelRecord:
    """What was learned about one model, by the names of a kind of calls and of a source; the last one in use last."""

    model: Callable[[], PreTrainedModel | None]  # which it does not keep alive
    learned: dict[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None  # at the first use; a model that is being trained keeps it
    kept: Saved | None = None  # what its file held last, also for kinds of calls that were not made since
    seen: list[tuple[int, int]] | None = None  # its parameters and their versions when it last had that fingerprint
    written: float = -_PAUSE

    @property
    def findings(self) -> dict[str, Findings]:
        """What is kept on disk; each process finds out the rest anew."""
        return {name: found for name, found in self.learned.items() if isinstance(found, Findings)}

    def states(self) -> States:
        """What is known, as a file holds it."""
        kept = {} if self.kept is None else self.kept.findings
        return kept | {name: findings.state() for name, findings in self.findings.items()}

    def forget(self) -> None:
        for findings in self.findings.values():
            findings.forget()
        self.kept = _without_texts(self.kept)


class Knowledge:
    """What changes from call to call, shared by threads and copies; a pickle restarts from what a file held."""

    def __init__(self, saved: Saved | None = None) -> None:
        self._last: GenerationStats | None = None
        self._of_thread = threading.local()
        self.saved = saved  # what was read from a file, for the model that has its fingerprint
        self.lock = new_lock()  # held while anything here is read or changed, never while a file's lock is waited for
        self.files: set[Path] = set()  # those of cache_dir, also of models that no longer exist
        self._records: weakref.WeakKeyDictionary[PreTrainedModel, ModelRecord] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Knowledge, (self.saved,)

    def record(self, model: PreTrainedModel) -> ModelRecord:
        with self.lock:
            return self._records.setdefault(model, ModelRecord(weakref.ref(model)))

    def fingerprint(self, model: PreTrainedModel) -> Fingerprint:
        """The fingerprint that the model had at its first use."""
        with self.lock:
            record = self.record(model)
            record.fingerprint = record.fingerprint or Fingerprint.of_decoder(model)
            return record.fingerprint

    @property
    def models(self) -> list[PreTrainedModel]:
        with self.lock:
            return [model for model, record in self._records.items() if record.findings]

    def add_call(self, stats: GenerationStats) -> None:
        self._last = self._of_thread.stats = stats

    @property
    def stats(self) -> GenerationStats | None:
        """Of the last call in this thread, or of the last of all where there was none in it."""
        return getattr(self._of_thread, "stats", self._last)

    def latest(self, model: PreTrainedModel, wanted: Callable[[Any], bool] = lambda findings: True) -> Any:
        """The most recently used findings about ``model`` that are ``wanted``; ``None`` if there are none."""
        with self.lock:
            return next(filter(wanted, reversed(list(self.record(model).findings.values()))), None)

    def choice(self, model: PreTrainedModel, choice_class: type = object) -> Any:
        """The fastest exit, or what a search has chosen, if it is of that class, for the last kind of call with one."""
        study = self.latest(model, lambda each: hasattr(each, "choice") and isinstance(each.choice, choice_class))
        return None if study is None else study.choice

    def check(self, model: PreTrainedModel) -> None:
        """Checks that what was read from a file belongs to ``model``."""
        saved = self.saved
        if saved is None or saved.fingerprint is None:
            return
        if difference := saved.fingerprint.difference(self.fingerprint(model)):
            raise SettingError(
                f"{saved.path} was saved for {difference}. Use it with that model, or make a new SelfSpec for this one."
            )

    def content(self, path: Path, model: PreTrainedModel | None, settings: Mapping[str, Any]) -> Saved:
        """Settings and what is known of ``model``, for its present weights: what a file is to hold."""
        with self.lock:
            saved = self.saved or Saved({}, None, {}, path)
            if model is None:
                return replace(saved, settings=settings, path=path)
            self.check(model)
            states = saved.findings | self.record(model).states()  # what was not used yet is kept
            return Saved(settings, Fingerprint.of_decoder(model), states, path)

    def keep(self, model: PreTrainedModel) -> None:
        """Has what a call has learned written, where it is kept on disk: now, or after a later call, or at exit."""
        record = self.record(model)
        kept = record.kept
        if kept is None or kept.path not in self.files:
            return
        seen = [(id(each), 0 if each.is_inference() else each._version) for each in model.parameters()]
        is_due = seen != record.seen or monotonic() - record.written >= _PAUSE
        record.seen = seen
        _unwritten[kept.path] = self, record
        if is_due:
            self.write(record, 0.0)

    def write(self, record: ModelRecord, patience: float) -> None:
        """Writes what is new about a model in place of what others have written since, or leaves it to a later time if
        another process holds the file for longer than ``patience`` seconds."""
        record.written = monotonic()
        kept, model = cast(Saved, record.kept), record.model()
        _unwritten.pop(kept.path, None)
        with only_warned(f"keeping findings in {kept.path}"):
            with self.lock:
                is_new = record.states() != kept.findings
            if is_new and model is not None and Fingerprint.of_decoder(model) != record.fingerprint:
                record.kept = replace(kept, path=Path())  # it is being trained, and a file is for one model
            elif is_new:
                try:
                    self._write(record, kept, patience)
                except TimeoutError:
                    _unwritten.setdefault(kept.path, (self, record))

    def _write(self, record: ModelRecord, kept: Saved, patience: float) -> None:
        with _locked(kept.path, patience):
            present = _read(kept.path)
            stamp = "" if present is None else present.stamp
            with self.lock:
                if kept.stamp not in ("", stamp):
                    record.forget()  # as others did, who have removed the file
                written = replace(kept, findings=record.states(), stamp=stamp or uuid4().hex)
            saving.write(written)
            with self.lock:
                record.kept = written

    def forget_texts(self) -> None:
        """Drops what findings keep of texts, and the files in which they are kept."""
        with self.lock:
            waiting = [record for knowledge, record in _unwritten.values() if knowledge is self]
            for record in [*self._records.values(), *waiting]:
                record.forget()
            self.saved = _without_texts(self.saved)
            paths = sorted(self.files)
        for path in paths:  # afterwards, so that no write that has begun brings texts back
            with reported(path), _locked(path, PATIENCE):
                for file in (path, *path.parent.glob(f"*.tmp/{path.name}")):  # of processes that were killed, too
                    file.unlink(missing_ok=True)


@dataclass(frozen=True)
class KnowledgeOfCall:
    """What a ``SelfSpec`` knows of one model for one kind of call, and where it keeps that."""

    knowledge: Knowledge  # all that the ``SelfSpec`` has learned
    model: PreTrainedModel
    call_kind: str  # whether tokens are sampled, and whether there are several rows
    settings: Callable[[], Mapping[str, Any]]
    cache_dir: StrPath | None
    task: str

    def of(self, source: str, make: Callable[[Any], _T], call_kind: str | None = None) -> _T:
        """Returns what a source has learned in this kind of call; ``make`` begins it, given that of another kind.

        Objects of a class that derives from :class:`Findings` are kept on disk. Calls of all kinds share those of
        ``call_kind=ALL``, with what is known of texts and can be forgotten.
        """
        with self.knowledge.lock:
            learned, name = self.knowledge.record(self.model).learned, f"{call_kind or self.call_kind}: {source}"
            learned[name] = learned.pop(name) if name in learned else self._begun(name, make)  # the last one in use
            return cast(_T, learned[name])

    def fingerprint(self) -> Fingerprint:
        return self.knowledge.fingerprint(self.model)

    def write_others(self) -> None:
        """Writes what others in this process have learned of the model, before its file is read for the first time."""
        if self.cache_dir is not None and self.knowledge.record(self.model).kept is None:
            for knowledge, record in list(_unwritten.values()):
                if record.fingerprint == self.fingerprint():
                    knowledge.write(record, 0.0)

    def kept(self) -> Saved:
        """What was loaded from a file for this model, or what its file in ``cache_dir`` held."""
        with self.knowledge.lock:
            record = self.knowledge.record(self.model)
            record.kept = record.kept or self._read_first()
            return record.kept

    def _read_first(self) -> Saved:
        knowledge = self.knowledge
        if knowledge.saved is not None:
            knowledge.check(self.model)
            return knowledge.saved
        # The processes of a tensor-parallel model may have different folders, and would draft differently.
        if self.cache_dir is None or is_tensor_parallel(self.model):
            return Saved({}, None, {}, Path())
        settings, fingerprint = self.settings(), self.fingerprint()
        digest = hashlib.sha256(json.dumps([saving.FORMAT, settings], sort_keys=True).encode()).hexdigest()
        path = path_of(self.cache_dir) / fingerprint.name / f"{self.task}-{digest[:12]}.json"
        knowledge.files.add(path)
        begun = Saved(settings, fingerprint, {}, path)
        present = _read(path)
        return begun if present is None else replace(begun, findings=present.findings, stamp=present.stamp)

    def _begun(self, name: str, make: Callable[[Any], Any]) -> Any:
        """What begins with what a file holds, or with that of another kind of call."""
        kept, (_, _, source) = self.kept(), name.partition(": ")
        learned = self.knowledge.record(self.model).learned
        begun = make(next((each for other, each in learned.items() if other.partition(": ")[2] == source), None))
        if name in kept.findings:
            try:
                with saving.reading(kept.path):
                    begun.restore(kept.findings[name])
            except SettingError as error:
                if self.knowledge.saved is not None:
                    raise
                _begins_anew(error)
        return begun


def _read(path: Path) -> Saved | None:
    """Reads a file of ``cache_dir``; ``None`` if there is none, or with a warning one that is damaged."""
    try:
        return saving.read(path) if path.exists() else None
    except SettingError as error:
        _begins_anew(error)
        return None


def _begins_anew(error: SettingError) -> None:
    """Warns of a file of ``cache_dir`` that cannot be used; the next write takes its place."""
    warn_once(f"what was learned before is lost, since its file cannot be used: {error}")


def _without_texts(saved: Saved | None) -> Saved | None:
    if saved is None:
        return None
    states = {name: state for name, state in saved.findings.items() if not name.startswith(f"{ALL}: ")}
    return replace(saved, findings=states, stamp="")


@contextmanager
def _locked(path: Path, patience: float) -> Iterator[None]:
    """Keeps others from writing a file; waits for them, after ``patience`` seconds with a ``TimeoutError``."""
    from filelock import FileLock  # imported here because calls without a cache folder do not need it

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=patience):
        yield
