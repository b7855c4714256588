"""What a ``SelfSpec`` learns from call to call, and where it is kept."""

from __future__ import annotations

import atexit
import hashlib
import json
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from ..errors import SettingError, brief, only_warned, warn_once
from ..model.fingerprint import Fingerprint
from ..model.forks import new_lock
from ..model.module_tools import is_tensor_parallel
from ..stats import GenerationStats
from ..validation import StrPath
from . import saving
from .files import path_of, reported, unfinished
from .findings import PATIENCE, CacheFile, Findings, begins_anew, locked
from .saving import CallKind, Key, Saved

# How many calls are kept for plots, and how many points of the timeline of each: 4 MB at most.
_LOGGED, _POINTS = 512, 64

_F = TypeVar("_F", bound=Findings)
_T = TypeVar("_T")

_unwritten: weakref.WeakSet[Knowledge] = weakref.WeakSet()


@atexit.register
def _write_rest() -> None:
    until = monotonic() + PATIENCE
    for knowledge in list(_unwritten):
        for model, of_model in list(knowledge.unwritten.items()):
            replace(of_model, model=model).write(max(until - monotonic(), 0.1))


@dataclass
class ModelRecord:
    """What was learned about one model."""

    findings: dict[Key, Any] = field(default_factory=dict)  # the most recently used ones last
    in_process: dict[tuple[str, CallKind], Any] = field(default_factory=dict)  # never on disk
    fingerprint: Fingerprint | None = None  # at the first use; a model that is being trained keeps it
    files: dict[Path, CacheFile] = field(default_factory=dict)  # of cache_dir


class Knowledge:
    """What changes from call to call, shared by threads and copies; a pickle restarts from what a file held."""

    def __init__(self, saved: Saved | None = None) -> None:
        self.stats: GenerationStats | None = None  # of the last call
        self.calls: deque[GenerationStats] = deque(maxlen=_LOGGED)  # without lists that have an entry for each token
        self.saved = saved  # what was read from a file, for the model that has its fingerprint
        self.text_paths: set[Path] = set()  # used by this process, also for models that no longer exist
        self.lock = new_lock()  # held while anything here is read or changed, never while a file is waited for
        # Models with something new to write, held weakly, and what writes it once it has its model again.
        self.unwritten: weakref.WeakKeyDictionary[PreTrainedModel, KnowledgeOfCall] = weakref.WeakKeyDictionary()
        self._records: weakref.WeakKeyDictionary[PreTrainedModel, ModelRecord] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Knowledge, (self.saved,)

    def record(self, model: PreTrainedModel) -> ModelRecord:
        with self.lock:
            return self._records.setdefault(model, ModelRecord())

    def fingerprint(self, model: PreTrainedModel) -> Fingerprint:
        """The fingerprint that the model had at its first use."""
        with self.lock:
            record = self.record(model)
            if record.fingerprint is None:
                record.fingerprint = Fingerprint.of_decoder(model)
            return record.fingerprint

    @property
    def models(self) -> list[PreTrainedModel]:
        with self.lock:
            return [model for model, record in self._records.items() if record.findings]

    def add_call(self, stats: GenerationStats) -> None:
        with self.lock:
            self.stats = stats
            thinned = stats.timeline[:: len(stats.timeline) // _POINTS + 1]
            self.calls.append(replace(stats, from_draft=[], matchness=[], round_sizes=[], timeline=thinned))

    def latest(self, model: PreTrainedModel, wanted: Callable[[Any], bool] = lambda findings: True) -> Any:
        """The most recently used findings about ``model`` that are ``wanted``; ``None`` if there are none."""
        with self.lock:
            return next(filter(wanted, reversed(self.record(model).findings.values())), None)

    def choice(self, model: PreTrainedModel, choice_class: type | tuple[type, ...] = object) -> Any:
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
            saved, findings, fingerprint = self.saved, dict[Key, dict[str, Any]](), None
            if saved is not None:  # what was not used yet is kept
                findings, fingerprint = dict(saved.findings), saved.fingerprint
            if model is not None:
                self.check(model)
                record, fingerprint = self.record(model), Fingerprint.of_decoder(model)
                for file in record.files.values():
                    findings |= file.kept
                findings |= {key: of_key.state() for key, of_key in record.findings.items()}
            return Saved(dict(settings), fingerprint, findings, path)

    def forget_texts(self) -> None:
        """Drops what findings keep of texts, also from the files in which they are kept."""
        with self.lock:
            paths, problems = sorted(self.text_paths), list[SettingError]()
        with ExitStack() as files:
            held = []
            for path in paths:
                try:
                    with reported(path):
                        files.enter_context(locked(path, PATIENCE))  # another thread's write would merge the texts
                    held.append(path)
                except SettingError as error:
                    problems.append(error)
            with self.lock:
                for record in self._records.values():
                    for findings in record.findings.values():
                        findings.forget()
                    for path in record.files.keys() & set(held):
                        record.files[path].begin()
                if self.saved is not None:
                    # Texts are in findings for all kinds of calls.
                    kept = {key: state for key, state in self.saved.findings.items() if key.call_kind is not None}
                    self.saved = replace(self.saved, findings=kept)
            for path in held:
                try:
                    with reported(path):
                        for file in (path, *unfinished(path)):
                            if not file.is_dir():
                                file.unlink(missing_ok=True)
                except SettingError as error:
                    problems.append(error)
        if problems:
            raise problems[0]


@dataclass(frozen=True)
class KnowledgeOfCall:
    """What a ``SelfSpec`` knows of one model for one kind of call, and the files in which it keeps that."""

    knowledge: Knowledge  # all that the ``SelfSpec`` has learned
    model: PreTrainedModel
    call_kind: CallKind
    settings: Callable[[], Mapping[str, Any]]
    cache_dir: StrPath | None
    task: str

    @property
    def _record(self) -> ModelRecord:
        return self.knowledge.record(self.model)

    def of(self, name: str, make: Callable[[Any], _F]) -> _F:
        """Returns a source's findings for this kind of call; ``make`` begins them, given those of another kind."""
        return self._used(Key(self.call_kind, name), make)

    def of_all_kinds(self, name: str, make: Callable[[Any], _F]) -> _F:
        """As :meth:`of`, for findings that all kinds of calls share, in a file of their own."""
        return self._used(Key(None, name), make)

    def in_process(self, name: str, make: Callable[[Any], _T]) -> _T:
        """What each process finds out anew for this kind of call; ``make`` begins it, given that of another kind."""
        with self.knowledge.lock:
            kept = self._record.in_process
            if (key := (name, self.call_kind)) not in kept:
                kept[key] = make(next((value for (other, _), value in kept.items() if other == name), None))
            return cast(_T, kept[key])

    def fingerprint(self) -> Fingerprint:
        return self.knowledge.fingerprint(self.model)

    def read(self) -> Saved | None:
        """What was loaded from a file for this model, else the file of ``cache_dir``; ``None`` if there is neither."""
        if self.knowledge.saved is not None:
            self.knowledge.check(self.model)
            return self.knowledge.saved
        file = self._file(Key(self.call_kind, ""))
        return saving.read(file.path) if file is not None and file.path.exists() else None

    def write(self, patience: float | None = None) -> None:
        """Writes what calls have found since the last time, where it is kept on disk.

        A call gives no ``patience``: it leaves what is not due, or held by another process, to later ones and to the
        end of the process. Neither a file nor its lock is waited for with the lock of all findings.
        """
        unwritten = self.knowledge.unwritten
        with only_warned("keeping findings on disk"):
            with self.knowledge.lock:
                files = list(self._record.files.values())
            for file in files:
                if file.is_due or (patience is not None and file.has_news):
                    self._write(file, patience or 0.0)
            if any(file.has_news for file in files):
                unwritten[self.model] = replace(self, model=cast(Any, None))
                _unwritten.add(self.knowledge)
            else:
                unwritten.pop(self.model, None)

    def _write(self, file: CacheFile, patience: float) -> None:
        """Writes a file; reports what fails, but not that another process holds it for now."""
        is_done = False
        file.has_news = False
        try:
            with reported(file.path):
                fingerprint = Fingerprint.of_decoder(self.model)
                if fingerprint == self.fingerprint():
                    with self.knowledge.lock:
                        in_file = [key for key in self._record.findings if self._file(key) is file]
                        findings = {key: self._record.findings[key] for key in in_file}
                    file.write(findings, self.settings(), fingerprint, patience)
                else:
                    warn_once(
                        f"the weights of {type(self.model).__name__} have changed since this SelfSpec began, and files "
                        "of cache_dir are for one model: findings from now on stay in memory. Use `save_pretrained` "
                        "next to the model's checkpoints, or a new SelfSpec when the weights are final."
                    )
            is_done = True
        except Exception as error:  # learning loses no text
            if patience or not isinstance(error.__cause__, TimeoutError):
                told = str(error) if isinstance(error, SettingError) else brief(repr(error))
                warn_once(f"findings are not kept on disk: {told}")
        finally:
            file.count_write(is_done)

    def _file(self, key: Key) -> CacheFile | None:
        """The file that holds findings."""
        if self.cache_dir is None or is_tensor_parallel(self.model):
            return None  # the processes of one model may have different folders, and would then draft differently
        settings = json.dumps([saving.FORMAT, self.settings()], sort_keys=True).encode()
        ending = "" if key.call_kind is not None else "-" + key.source.replace(" ", "-")
        name = f"{self.task}-{hashlib.sha256(settings).hexdigest()[:12]}{ending}.json"
        path = path_of(self.cache_dir) / self.fingerprint().name / name
        with self.knowledge.lock:
            return self._record.files.setdefault(path, CacheFile(path, has_texts=key.call_kind is None))

    def _used(self, key: Key, make: Callable[[Any], _F]) -> _F:
        with self.knowledge.lock:
            used = self._record.findings
            used[key] = used.pop(key, None) or self._begun(key, make)  # the last one in use
            return cast(_F, used[key])

    def _begun(self, key: Key, make: Callable[[Any], _F]) -> _F:
        """New findings, which begin with what a file holds, or those for another kind of call, and are written to the
        file."""
        of_source = (findings for other, findings in self._record.findings.items() if other.source == key.source)
        other = next(of_source, None)
        saved, file, findings = self.knowledge.saved, self._file(key), make(other)
        if saved is not None:
            findings = _restored(saved, key, make, other)
        elif file is not None and (saved := file.read()) is not None:
            with begins_anew():
                findings = _restored(saved, key, make, other)
        if file is not None:
            findings.changed = file.add_news
            if file.has_texts:
                self.knowledge.text_paths.add(file.path)
        return findings


def _restored(saved: Saved, key: Key, make: Callable[[Any], _F], other: Any) -> _F:
    """New findings as the file has them, or begun with those for another kind of call."""
    findings = make(other)
    states = {of_key.call_kind: state for of_key, state in saved.findings.items() if of_key.source == key.source}
    with saving.reading(saved.path):
        if key.call_kind in states:
            findings.restore(states[key.call_kind])
        elif states and other is None:
            # What another kind of call has found is a better start than nothing.
            first = make(None)
            first.restore(next(iter(states.values())))
            return make(first)
    return findings
