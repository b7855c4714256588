"""What a ``SelfSpec`` learns from call to call, and where it lasts."""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedModel

from . import saving
from .errors import SettingError
from .model.fingerprint import Fingerprint
from .notices import say_once
from .saving import Kind
from .stop.rules import Memory
from .types import GenerationStats

# Calls that are kept for pictures.
_LOGGED, _POINTS = 4096, 256


class Findings(Protocol):
    """What is known of one model for one kind of call.

    Attributes:
        changed: is called when more is known, ``None`` where nobody wants to know.
    """

    changed: Callable[[], None] | None

    @property
    def is_idle(self) -> bool:
        """Whether the next call need neither draft nor look at its text."""

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Takes in a call that did neither."""

    def report(self, stats: GenerationStats) -> None:
        """Adds what is known to the statistics of a call."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


_F = TypeVar("_F", bound=Findings)


class Learned:
    """What changes from call to call, shared by threads and by copies; a pickle begins with what was read from a file.

    Attributes:
        stats: of the last call.
        calls: of the last calls, in order, without what is said of single tokens.
        models: for each model the findings by kind of call, the kind that came last at the end.
        saved: what was read from a file, for the model that has its fingerprint.
    """

    def __init__(self, saved: saving.Saved | None = None) -> None:
        self.stats: GenerationStats | None = None
        self.calls: deque[GenerationStats] = deque(maxlen=_LOGGED)
        self.models: weakref.WeakKeyDictionary[PreTrainedModel, dict[Kind, Any]] = weakref.WeakKeyDictionary()
        self.saved = saved
        self._cached: weakref.WeakKeyDictionary[PreTrainedModel, saving.Saved] = weakref.WeakKeyDictionary()
        self._fingerprints: weakref.WeakKeyDictionary[PreTrainedModel, Fingerprint] = weakref.WeakKeyDictionary()
        self._memories: weakref.WeakKeyDictionary[PreTrainedModel, dict[Kind, Memory]] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def __reduce__(self) -> Any:
        return Learned, (self.saved,)

    def add_call(self, stats: GenerationStats) -> None:
        """Takes in a finished call."""
        with self._lock:
            self.stats = stats
            thinned = stats.timeline[:: max(1, len(stats.timeline) // _POINTS)]
            self.calls.append(replace(stats, from_draft=[], matchness=[], timeline=thinned))

    def latest(self, model: PreTrainedModel) -> Any:
        """The findings for the last kind of call of ``model``, ``None`` if there are none."""
        with self._lock:
            return next(reversed(self.models.get(model, {}).values()), None)

    def known(self, model: PreTrainedModel, kind: Kind) -> Findings | None:
        """The findings for one kind of call, ``None`` before the first such call."""
        with self._lock:
            kinds = self.models.get(model, {})
            if kind in kinds:
                kinds[kind] = kinds.pop(kind)
            found: Findings | None = kinds.get(kind)
            return found

    def memory(self, model: PreTrainedModel, kind: Kind) -> Memory:
        """What the stop rule keeps from call to call."""
        with self._lock:
            return self._memories.setdefault(model, {}).setdefault(kind, Memory())

    def fingerprint(self, model: PreTrainedModel) -> Fingerprint:
        """The fingerprint, taken once."""
        with self._lock:
            if model not in self._fingerprints:
                self._fingerprints[model] = Fingerprint.of_decoder(model)
            return self._fingerprints[model]

    def check(self, model: PreTrainedModel) -> None:
        """Checks that what was read from a file belongs to ``model``.

        Raises:
            SettingError: it does not.
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
        kind: Kind,
        make: Callable[[Any], _F],
        cache: Path | None,
        settings: Mapping[str, Any],
    ) -> _F:
        """The findings for one kind of call.

        Args:
            model: that they are about.
            kind: of the call.
            make: makes those with which a new kind begins, given another kind's or ``None``.
            cache: a file in which they last, ``None`` for none.
            settings: to write beside them.
        """
        with self._lock:
            kinds = self.models.setdefault(model, {})
            if kind not in kinds:
                kinds[kind] = self._new(model, kind, make, next(iter(kinds.values()), None), cache)
                if cache is not None:
                    kinds[kind].changed = partial(self._cache, cache, weakref.ref(model), settings)
            kinds[kind] = kinds.pop(kind)
            return kinds[kind]

    def _new(self, model: PreTrainedModel, kind: Kind, make: Callable[[Any], _F], other: Any, cache: Path | None) -> _F:
        found = make(other)
        saved = self.saved
        if saved is None and cache is not None and cache.exists():
            saved = self._cached[model] = saving.read(cache)
        if saved is None:
            return found
        try:
            states = saved.findings
            if kind in states:
                found.restore(states[kind])
            elif states and other is None:
                # What another kind of call found is a better start than none.
                first = make(None)
                first.restore(next(iter(states.values())))
                return make(first)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise saving.corrupt_findings(saved.path, error) from error
        return found

    def save(self, path: Path, model: PreTrainedModel | None, settings: Mapping[str, Any]) -> None:
        """Writes settings and what is known of ``model``."""
        with self._lock:
            saved = self.saved if model is None else self._cached.get(model, self.saved)
            fingerprint = saved.fingerprint if saved is not None and model is None else None
            if model is not None:
                self.check(model)
                fingerprint = self.fingerprint(model)
            # What was read and not used yet is kept.
            findings = {} if saved is None else dict(saved.findings)
            if model is not None:
                findings.update({kind: found.state() for kind, found in self.models.get(model, {}).items()})
            saving.write(path, settings, fingerprint, findings)

    def _cache(self, path: Path, model: weakref.ref[PreTrainedModel], settings: Mapping[str, Any]) -> None:
        try:
            if (alive := model()) is not None:
                self.save(path, alive, settings)
        except OSError as error:
            say_once(f"{path} cannot be written ({error}), so what is found does not last.")

    def cache_file(self, folder: Path, task: str, model: PreTrainedModel, settings: Mapping[str, Any]) -> Path:
        """Where findings of ``model`` for a task last."""
        kept = json.dumps({name: saving.encode(value, name) for name, value in settings.items()}, sort_keys=True)
        digest = hashlib.sha256(kept.encode()).hexdigest()[:12]
        return folder / self.fingerprint(model).name / f"{task}-{digest}.json"
