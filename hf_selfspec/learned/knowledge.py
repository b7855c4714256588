"""What a ``SelfSpec`` learns from call to call, and where it is kept."""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..control.arms import Measurements
from ..errors import SettingError, warn_once
from ..model.fingerprint import Fingerprint
from ..stats import GenerationStats
from ..stop.rules import Memory
from . import saving
from .files import reported
from .findings import Findings, TextFindings
from .saving import Key, Kind
from .text_file import TextFile, aside, beginning_anew

# How many calls are kept for plots, and the most points of the timeline of each: 4 MB at most.
_LOGGED, _POINTS = 512, 64


_F = TypeVar("_F", bound=Findings)


class Knowledge:
    """What changes from call to call, shared by threads and copies; a pickle restarts from what was read from a file.

    Attributes:
        stats: statistics of the last call.
        calls: statistics of the last calls, in order, without the lists that have an entry for each token.
        models: for each model the findings by kind of call and source, the most recently used ones last.
        saved: what was read from a file, for the model that has its fingerprint.
    """

    def __init__(self, saved: saving.Saved | None = None) -> None:
        self.stats: GenerationStats | None = None
        self.calls: deque[GenerationStats] = deque(maxlen=_LOGGED)
        self.models: weakref.WeakKeyDictionary[PreTrainedModel, dict[Key, Any]] = weakref.WeakKeyDictionary()
        self.saved = saved
        self._cached: weakref.WeakKeyDictionary[PreTrainedModel, dict[Path, saving.Saved]] = weakref.WeakKeyDictionary()
        self._fingerprints: weakref.WeakKeyDictionary[PreTrainedModel, Fingerprint] = weakref.WeakKeyDictionary()
        self._text_files: weakref.WeakKeyDictionary[PreTrainedModel, dict[Path, TextFile]] = weakref.WeakKeyDictionary()
        # The files that this process has used, including those of models that no longer exist.
        self._with_texts: set[Path] = set()
        # By file, what writes findings at the end of a call: a search has new ones with each trial.
        self._unwritten: dict[Path, Callable[[], None]] = {}
        self._memories: weakref.WeakKeyDictionary[PreTrainedModel, dict[Kind, Memory]] = weakref.WeakKeyDictionary()
        self._measured: weakref.WeakKeyDictionary[PreTrainedModel, dict[Kind, Measurements]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return Knowledge, (self.saved,)

    def add_call(self, stats: GenerationStats) -> None:
        """Records a finished call."""
        with self._lock:
            self.stats = stats
            thinned = stats.timeline[:: len(stats.timeline) // _POINTS + 1]
            self.calls.append(replace(stats, from_draft=[], matchness=[], round_sizes=[], timeline=thinned))

    def latest(self, model: PreTrainedModel, wanted: Callable[[Any], bool] = lambda found: True) -> Any:
        """The most recently used findings about ``model`` that are ``wanted``; ``None`` if there are none."""
        with self._lock:
            return next((found for found in reversed(self.models.get(model, {}).values()) if wanted(found)), None)

    def of_kind(self, model: PreTrainedModel, kind: Kind) -> list[Findings]:
        """The findings for one kind of call, none before the first such call."""
        with self._lock:
            return [found for key, found in self.models.get(model, {}).items() if key.kind in (kind, None)]

    def memory(self, model: PreTrainedModel, kind: Kind) -> Memory:
        """What the stop rule keeps from call to call."""
        with self._lock:
            return self._memories.setdefault(model, {}).setdefault(kind, Memory())

    def measurements(self, model: PreTrainedModel, kind: Kind) -> Measurements:
        """What rounds have cost and sources have brought, which is found again in each process."""
        with self._lock:
            known = self._measured.setdefault(model, {})
            return known.setdefault(kind, Measurements(next(iter(known.values()), None)))

    def fingerprint(self, model: PreTrainedModel) -> Fingerprint:
        """The fingerprint that the model had at its first use: a model that is being trained keeps it."""
        with self._lock:
            if model not in self._fingerprints:
                self._fingerprints[model] = Fingerprint.of_decoder(model)
            return self._fingerprints[model]

    def check(self, model: PreTrainedModel) -> None:
        """Checks that what was read from a file belongs to ``model``.

        Raises:
            SettingError: it belongs to another model.
        """
        saved = self.saved
        if saved is None or saved.fingerprint is None:
            return
        if difference := saved.fingerprint.difference(self.fingerprint(model)):
            raise SettingError(
                f"{saved.path} was saved for {difference}. Use it with the model that it was saved for, or make a new "
                "SelfSpec for this one."
            )

    def of(
        self,
        model: PreTrainedModel,
        key: Key,
        make: Callable[[Any], _F],
        cache: Path | None,
        settings: Mapping[str, Any],
    ) -> _F:
        """Findings of one source for one kind of call, or for all kinds.

        Args:
            model: the model that they are about.
            key: kind and source.
            make: creates the findings with which a new kind starts, given another kind's or ``None``.
            cache: a file in which they are kept, ``None`` for none.
            settings: the settings to write to that file.
        """
        with self._lock:
            known = self.models.setdefault(model, {})
            if key not in known:
                other = next((found for one, found in known.items() if one.source == key.source), None)
                known[key] = self._new(model, key, make, other, cache)
                if cache is not None:
                    write = partial(self._cache, cache, weakref.ref(model), settings, key)
                    later = partial(self._unwritten.__setitem__, cache, write)
                    known[key].changed = write if key.kind is None else later
            known[key] = known.pop(key)
            found: _F = known[key]
            return found

    def _new(self, model: PreTrainedModel, key: Key, make: Callable[[Any], _F], other: Any, cache: Path | None) -> _F:
        found = make(other)
        if self.saved is not None:
            return _restored(self.saved, key, make, found, other)
        if cache is not None:
            with beginning_anew(cache):
                if (saved := self._read(model, key, cache)) is not None:
                    found = _restored(saved, key, make, found, other)
                    self._cached.setdefault(model, {})[cache] = saved
        return found

    def _read(self, model: PreTrainedModel, key: Key, path: Path) -> saving.Saved | None:
        if key.kind is None:
            return self._text_file(model, path).read()
        return saving.read(path) if path.exists() else None

    def _text_file(self, model: PreTrainedModel, path: Path) -> TextFile:
        self._with_texts.add(path)
        files = self._text_files.setdefault(model, {})
        if path not in files:
            files[path] = TextFile(path)
        return files[path]

    def save(
        self,
        path: Path,
        model: PreTrainedModel | None,
        settings: Mapping[str, Any],
        wanted: Callable[[Key], bool] = lambda key: True,
        text_id: str = "",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """Writes settings and what is known of ``model``, or the ``wanted`` part of it.

        The file is for the weights that the model has now; their ``fingerprint`` is computed if it is not given.
        """
        with self._lock:
            saved = self.saved if model is None else self._cached.get(model, {}).get(path, self.saved)
            if saved is not None and model is None:
                fingerprint = saved.fingerprint
            if model is not None:
                self.check(model)
                fingerprint = fingerprint or Fingerprint.of_decoder(model)
            # What was read but not used yet is kept.
            findings = {} if saved is None else dict(saved.findings)
            if model is not None:
                known = self.models.get(model, {})
                used = {key.source for key in known}
                # Files of earlier versions do not name the source, of which they have only one.
                findings = {key: state for key, state in findings.items() if key.source or not used}
                findings.update({key: found.state() for key, found in known.items()})
            chosen = {key: state for key, state in findings.items() if wanted(key)}
            saving.write(path, settings, fingerprint, chosen, text_id)

    def forget_texts(self) -> None:
        """Drops what findings keep of texts, also from the files in which they are kept.

        Raises:
            SettingError: a file cannot be removed.
        """
        with self._lock:
            known = [(key, found) for kinds in self.models.values() for key, found in kinds.items()]
            with_texts = [found for _, found in known if isinstance(found, TextFindings)]
            for found in with_texts:
                found.forget()
            for files in self._cached.values():
                files.update({path: _without_texts(saved) for path, saved in files.items()})
            if self.saved is not None:
                self.saved = _without_texts(self.saved)
            for path in self._with_texts:
                with reported(path), TextFile(path).locked():
                    for file in (path, aside(path)):
                        if not file.is_dir():
                            file.unlink(missing_ok=True)
            for found in with_texts:
                if found.changed is not None:
                    found.changed()

    def write(self) -> None:
        """Writes what calls have found since the last time, where it is kept on disk."""
        with self._lock:
            while self._unwritten:
                self._unwritten.popitem()[1]()

    def _cache(self, path: Path, model: weakref.ref[PreTrainedModel], settings: Mapping[str, Any], key: Key) -> None:
        if (alive := model()) is None:
            return
        try:
            with self._lock, reported(path):
                if (now := Fingerprint.of_decoder(alive)) != self.fingerprint(alive):
                    warn_once(
                        f"the weights of {type(alive).__name__} have changed since this SelfSpec began, and files of "
                        "cache_dir are for one model: findings from now on stay in memory. Use `save_pretrained` "
                        "next to the model's checkpoints, or a new SelfSpec when the weights are final."
                    )
                elif key.kind is None:
                    self._cache_texts(path, alive, settings, key, now)
                else:
                    self.save(path, alive, settings, lambda one: one.kind is not None, fingerprint=now)
        except SettingError as error:
            warn_once(f"findings are not kept on disk: {error}")

    def _cache_texts(
        self, path: Path, model: PreTrainedModel, settings: Mapping[str, Any], key: Key, now: Fingerprint
    ) -> None:
        """Writes what is known of texts, merged with what other processes have written since."""
        file = self._text_file(model, path)
        with file.locked():
            if isinstance(found := self.models[model][key], TextFindings):
                with beginning_anew(path):
                    file.meet(found, key)
            self.save(path, model, settings, lambda one: one == key, file.id or "", now)
            file.wrote()


@dataclass(frozen=True)
class KnowledgeOfCall:
    """What is known of one model for one kind of call, see :class:`.draft.source.KnowledgeOfModel`.

    Attributes:
        knowledge: all knowledge of the ``SelfSpec``.
        model: the model.
        kind: the kind of call.
        cache_dir, task: where it is kept, see ``SelfSpec``.
        settings: the settings that are written to the file.
    """

    knowledge: Knowledge
    model: PreTrainedModel
    kind: Kind
    cache_dir: Path | None
    task: str
    settings: Mapping[str, Any]

    def of(self, name: str, make: Callable[[Any], _F]) -> _F:
        """Findings under a name for this kind of call."""
        return self.knowledge.of(self.model, Key(self.kind, name), make, self.file, self.settings)

    def of_all_kinds(self, name: str, make: Callable[[Any], _F]) -> _F:
        """Findings under a name that all kinds of calls share, in a file of their own."""
        file = self._file("-" + name.replace(" ", "-"))
        return self.knowledge.of(self.model, Key(None, name), make, file, self.settings)

    def all_findings(self) -> list[Findings]:
        """All findings for this kind of call, none before the first such call."""
        return self.knowledge.of_kind(self.model, self.kind)

    def memory(self) -> Memory:
        """What the stop rule keeps from call to call."""
        return self.knowledge.memory(self.model, self.kind)

    def measurements(self) -> Measurements:
        """What rounds have cost and sources have brought."""
        return self.knowledge.measurements(self.model, self.kind)

    def fingerprint(self) -> Fingerprint:
        """The model's fingerprint."""
        return self.knowledge.fingerprint(self.model)

    @property
    def file(self) -> Path | None:
        """The file with the findings for single kinds of calls, ``None`` if there is none."""
        return self._file("")

    def _file(self, ending: str) -> Path | None:
        if self.cache_dir is None:
            return None
        kept = json.dumps({name: saving.encode(value, name) for name, value in self.settings.items()}, sort_keys=True)
        digest = hashlib.sha256(kept.encode()).hexdigest()[:12]
        return self.cache_dir / self.fingerprint().name / f"{self.task}-{digest}{ending}.json"


def _restored(saved: saving.Saved, key: Key, make: Callable[[Any], _F], found: _F, other: Any) -> _F:
    """New findings as the file has them, or begun with those for another kind of call.

    Raises:
        SettingError: what is in the file is not a state of such findings.
    """
    states = saved.states(key.source)
    try:
        if key.kind in states:
            found.restore(states[key.kind])
        elif states and other is None:
            # What another kind of call has found is a better start than nothing.
            first = make(None)
            first.restore(next(iter(states.values())))
            return make(first)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise saving.corrupt_findings(saved.path, error) from error
    return found


def _without_texts(saved: saving.Saved) -> saving.Saved:
    """The file's content without the findings for all kinds of calls, which hold the texts."""
    return replace(saved, findings={key: state for key, state in saved.findings.items() if key.kind is not None})
