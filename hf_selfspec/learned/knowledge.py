"""What a ``SelfSpec`` learns from call to call, and where it is kept."""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from ..control.controller import Measurements
from ..errors import SettingError, brief, only_warned, warn_once
from ..forks import new_lock
from ..model.fingerprint import Fingerprint
from ..model.modules import is_tensor_parallel
from ..stats import GenerationStats
from ..stop.rules import Memory
from ..validation import StrPath
from . import saving
from .files import path_of, reported, unfinished
from .findings import PATIENCE, Findings, TextFile, TextFindings, aside, beginning_anew, locked
from .saving import Key, Kind, Saved

# How many calls are kept for plots, and the most points of the timeline of each: 4 MB at most.
_LOGGED, _POINTS = 512, 64

_F = TypeVar("_F", bound=Findings)

_unwritten: weakref.WeakSet[Knowledge] = weakref.WeakSet()


@atexit.register
def _write_rest() -> None:
    for knowledge in list(_unwritten):
        for write in list(knowledge.unwritten.values()):
            write(PATIENCE)


@dataclass
class ModelRecord:
    """All that is known of one model."""

    findings: dict[Key, Any] = field(default_factory=dict)  # the most recently used ones last
    memories: dict[Kind, Memory] = field(default_factory=lambda: defaultdict(Memory))  # of stop rules
    measurements: dict[Kind, Measurements] = field(default_factory=dict)  # found again in each process
    fingerprint: Fingerprint | None = None  # at the first use; a model that is being trained keeps it
    read: Saved | None = None  # what the file of cache_dir held, also for kinds of calls that were not made since
    # Whether that file has to be written at the end of the call: a search has something new with each trial.
    news: threading.Event = field(default_factory=threading.Event)


class Knowledge:
    """What changes from call to call, shared by threads and copies; a pickle restarts from what a file held."""

    def __init__(self, saved: Saved | None = None) -> None:
        self.stats: GenerationStats | None = None  # of the last call
        self.calls: deque[GenerationStats] = deque(maxlen=_LOGGED)  # without lists that have an entry for each token
        self.saved = saved  # what was read from a file, for the model that has its fingerprint
        self.text_paths: set[Path] = set()  # used by this process, also for models that no longer exist
        self.lock = new_lock()  # held while anything here is read or changed, never while a file is waited for
        self.writing = new_lock()  # held while findings that are not texts are written
        self.unwritten: dict[Path, Callable[[float], bool]] = {}  # by files that could not be written, what tries again
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

    def latest(self, model: PreTrainedModel, wanted: Callable[[Any], bool] = lambda found: True) -> Any:
        """The most recently used findings about ``model`` that are ``wanted``; ``None`` if there are none."""
        with self.lock:
            return next((found for found in reversed(self.record(model).findings.values()) if wanted(found)), None)

    def choice(self, model: PreTrainedModel, kind: type | tuple[type, ...] = object) -> Any:
        """What a probe or a search has chosen, if it is of that class, for the last kind of call with one."""
        found = self.latest(model, lambda one: hasattr(one, "choice") and isinstance(one.choice, kind))
        return None if found is None else found.choice

    def check(self, model: PreTrainedModel) -> None:
        """Checks that what was read from a file belongs to ``model``."""
        saved = self.saved
        if saved is None or saved.fingerprint is None:
            return
        if difference := saved.fingerprint.difference(self.fingerprint(model)):
            raise SettingError(
                f"{saved.path} was saved for {difference}. Use it with that model, or make a new SelfSpec for this one."
            )

    def content(
        self,
        path: Path,
        model: PreTrainedModel | None,
        settings: Mapping[str, Any],
        wanted: Callable[[Key], bool] = lambda key: True,
        text_id: str = "",
        fingerprint: Fingerprint | None = None,
    ) -> Saved:
        """Settings and what is known of ``model``, or the ``wanted`` part, for its present weights: what a file is to
        hold, which is written without the lock."""
        with self.lock:
            saved = self.saved or (None if model is None else self.record(model).read)
            # What was read but not used yet is kept.
            findings = {} if saved is None else dict(saved.findings)
            if model is None:
                fingerprint = None if saved is None else saved.fingerprint
            else:
                self.check(model)
                fingerprint = fingerprint or Fingerprint.of_decoder(model)
                known = self.record(model).findings
                used = {key.source for key in known}
                # Files of earlier versions do not name the source, of which they have only one.
                findings = {key: state for key, state in findings.items() if key.source or not used}
                findings.update({key: found.state() for key, found in known.items() if wanted(key)})
            chosen = {key: state for key, state in findings.items() if wanted(key)}
            return Saved(dict(settings), fingerprint, chosen, path, text_id)

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
                found = [one for record in self._records.values() for one in record.findings.values()]
                with_texts = [one for one in found if isinstance(one, TextFindings)]
                for one in with_texts:
                    one.forget()
                if self.saved is not None:
                    # Texts are in findings for all kinds of calls.
                    kept = {key: state for key, state in self.saved.findings.items() if key.kind is not None}
                    self.saved = replace(self.saved, findings=kept)
                for path in held:
                    try:
                        with reported(path):
                            for file in (path, aside(path), *unfinished(path)):
                                if not file.is_dir():
                                    file.unlink(missing_ok=True)
                    except SettingError as error:
                        problems.append(error)
        for one in with_texts:
            if one.save is not None:
                one.save(0.0)
        if problems:
            raise problems[0]


@dataclass(frozen=True)
class KnowledgeOfCall:
    """What a ``SelfSpec`` knows of one model for one kind of call, and the files in which it keeps that."""

    knowledge: Knowledge  # all that the ``SelfSpec`` has learned
    model: PreTrainedModel
    kind: Kind
    settings: Callable[[], Mapping[str, Any]]
    cache_dir: StrPath | None
    task: str

    @property
    def _record(self) -> ModelRecord:
        return self.knowledge.record(self.model)

    def of(self, name: str, make: Callable[[Any], _F]) -> _F:
        """Returns a source's findings for this kind of call; ``make`` begins them, given those of another kind."""
        return self._used(Key(self.kind, name), make)

    def of_all_kinds(self, name: str, make: Callable[[Any], _F]) -> _F:
        """As :meth:`of`, for findings that all kinds of calls share, in a file of their own."""
        return self._used(Key(None, name), make)

    def all_findings(self) -> list[Findings]:
        """All findings for this kind of call, none before the first such call."""
        with self.knowledge.lock:
            return [found for key, found in self._record.findings.items() if key.kind in (self.kind, None)]

    def memory(self) -> Memory:
        """What the stop rule keeps from call to call."""
        with self.knowledge.lock:
            return self._record.memories[self.kind]

    def measurements(self) -> Measurements:
        """What rounds have cost and sources have brought, which is found again in each process."""
        with self.knowledge.lock:
            known = self._record.measurements
            return known.setdefault(self.kind, Measurements(next(iter(known.values()), None)))

    def fingerprint(self) -> Fingerprint:
        return self.knowledge.fingerprint(self.model)

    @property
    def folder(self) -> Path | None:
        """The folder from which the ``SelfSpec`` was loaded, if it was."""
        saved = self.knowledge.saved
        return None if saved is None else saved.path.parent

    def read(self) -> Saved | None:
        """What was read from a file for this model, or another process has written; ``None`` if there is nothing."""
        if self.knowledge.saved is not None:
            self.knowledge.check(self.model)
            return self.knowledge.saved
        path = self._file(Key(self.kind, ""))
        return saving.read(path) if path is not None and path.exists() else None

    def write(self, patience: float = 0.0) -> bool:
        """Writes what calls have found since the last time, where it is kept on disk, and returns whether that is done.
        Otherwise the next call tries it again, and the end of the process."""
        knowledge, news = self.knowledge, self._record.news
        with only_warned("keeping findings on disk"):
            if not news.is_set() or (path := self._file(Key(self.kind, ""))) is None:
                return True
            done = False
            if knowledge.writing.acquire(timeout=patience):  # or another thread is at it
                try:
                    news.clear()
                    done = self._keep(path, patience)
                finally:
                    if not done:
                        news.set()
                    knowledge.writing.release()
            if done:
                knowledge.unwritten.pop(path, None)
            else:
                knowledge.unwritten[path] = self._later(KnowledgeOfCall.write)
                _unwritten.add(knowledge)
            return done
        return False

    def _keep(self, path: Path, patience: float, texts: TextFile | None = None, key: Key | None = None) -> bool:
        """Writes a file, and returns whether that is done; reports what fails, but not that another process holds it
        for now. Neither the file nor its lock is waited for with the lock of all findings."""
        knowledge, model, settings = self.knowledge, self.model, self.settings()
        try:
            with reported(path):
                now = Fingerprint.of_decoder(model)
                if now != self.fingerprint():
                    warn_once(
                        f"the weights of {type(model).__name__} have changed since this SelfSpec began, and files of "
                        "cache_dir are for one model: findings from now on stay in memory. Use `save_pretrained` "
                        "next to the model's checkpoints, or a new SelfSpec when the weights are final."
                    )
                elif texts is None or key is None:
                    saving.write(knowledge.content(path, model, settings, lambda one: one.kind is not None, "", now))
                else:
                    with knowledge.lock:
                        found = self._record.findings[key]
                    with texts.merged(found, key, patience):
                        known = knowledge.content(path, model, settings, lambda one: one == key, texts.id or "", now)
                        saving.write(known)
            return True
        except Exception as error:  # learning loses no text
            if patience or not isinstance(error.__cause__, TimeoutError):
                told = str(error) if isinstance(error, SettingError) else brief(repr(error))
                warn_once(f"findings are not kept on disk: {told}")
            return False

    def _file(self, key: Key) -> Path | None:
        if self.cache_dir is None or is_tensor_parallel(self.model):
            return None  # the processes of one model may have different folders, and would then draft differently
        digest = hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:12]
        ending = "" if key.kind is not None else "-" + key.source.replace(" ", "-")
        return path_of(self.cache_dir) / self.fingerprint().name / f"{self.task}-{digest}{ending}.json"

    def _used(self, key: Key, make: Callable[[Any], _F]) -> _F:
        with self.knowledge.lock:
            known = self._record.findings
            if key not in known:
                other = next((found for one, found in known.items() if one.source == key.source), None)
                known[key] = self._begun(key, make, other)
            found = known[key] = known.pop(key)  # the last one in use
            return found

    def _begun(self, key: Key, make: Callable[[Any], _F], other: Any) -> _F:
        """New findings, which begin with what a file holds and are written to it."""
        saved, path = self.knowledge.saved, self._file(key)
        found = make(other) if saved is None else _restored(saved, key, make, other)
        if path is None:
            return found
        texts = TextFile(path) if key.kind is None else None
        if saved is None:
            with beginning_anew(path):
                read = texts.read() if texts is not None else saving.read(path) if path.exists() else None
                found = found if read is None else _restored(read, key, make, other)
                self._record.read = self._record.read if texts is not None else read
        if texts is None:
            found.changed = self._record.news.set
        else:
            self.knowledge.text_paths.add(path)
            assert isinstance(found, TextFindings), "what all kinds of calls share is texts"
            found.save = self._later(lambda known, patience: known._keep(path, patience, texts, key))
        return found

    def _later(self, write: Callable[[KnowledgeOfCall, float], bool]) -> Callable[[float], bool]:
        """``write`` for later, as long as the model exists."""
        alive, without_model = weakref.ref(self.model), replace(self, model=cast(Any, None))

        def later(patience: float) -> bool:
            model = alive()
            return model is None or write(replace(without_model, model=model), patience)

        return later


def _restored(saved: Saved, key: Key, make: Callable[[Any], _F], other: Any) -> _F:
    """New findings as the file has them, or begun with those for another kind of call."""
    found, states = make(other), saved.states(key.source)
    with saving.reading(saved.path):
        if key.kind in states:
            found.restore(states[key.kind])
        elif states and other is None:
            # What another kind of call has found is a better start than nothing.
            first = make(None)
            first.restore(next(iter(states.values())))
            return make(first)
    return found
