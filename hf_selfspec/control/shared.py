"""What free drafts learn about a model, shared by all calls and threads of a ``SelfSpec``."""

from __future__ import annotations

import atexit
import base64
import math
import weakref
from collections.abc import Callable, Iterable
from threading import RLock
from time import monotonic
from typing import Any

import numpy as np

from ..lookup import LookupKnowledge, LookupRow
from ..lookup.suffix import SEPARATOR
from ..stats import GenerationStats
from .clock import RoundClock

# Contexts that share a clock: up to 1,024, 4,096, 16,384, ... slots.
_FIRST_RANGE, _RANGE = 10, 2
# How many clocks run; of others, as of those in a file, only the usual times are kept.
_RUNNING = 64
# Seconds between two writes to disk; the last write is at the end of the process.
_WRITTEN = 10.0


_unwritten: weakref.WeakSet[LookupFindings] = weakref.WeakSet()


@atexit.register
def _write_rest() -> None:
    """Writes what the last calls of the process have added."""
    for found in list(_unwritten):
        found.write()


class LookupFindings:
    """Successors, texts, weights of evidence and times of rounds; see :class:`Findings`.

    Args:
        stored_tokens: tokens of earlier texts to keep.
        vocabulary: ``v``; a file with other tokens is rejected.

    Attributes:
        known: successors, texts and evidence.
        lock: held while ``known`` is used.
        changed: called when there is something new to save, or ``None``.
    """

    is_idle = False

    def __init__(self, stored_tokens: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.known = LookupKnowledge(most_stored=stored_tokens)
        self.lock = RLock()
        self.changed: Callable[[], None] | None = None
        self._clocks: dict[str, RoundClock] = {}
        self._restored: dict[str, list[float]] = {}
        self._written = -_WRITTEN

    def clock(self, device: str, rows: int, context: int, on_cpu: bool, is_frozen: bool) -> RoundClock:
        """The clock for a device and dtype, a batch size and a context of ``context`` slots."""
        reach = max(context.bit_length() - _FIRST_RANGE, 0) // _RANGE
        name = f"{device} {rows} {reach}"
        with self.lock:
            if name not in self._clocks:
                clock = RoundClock(on_cpu, rows, is_frozen)
                if name in self._restored:
                    clock.restore(self._restored[name])
                elif (nearest := self._nearest(device, rows, reach)) is not None:
                    clock.begin_like(nearest)
                if len(self._clocks) >= _RUNNING:
                    oldest = next(iter(self._clocks))
                    self._restored[oldest] = self._clocks.pop(oldest).state()
                self._clocks[name] = clock
            found = self._clocks[name] = self._clocks.pop(name)  # the last one in use
            return found

    def _nearest(self, device: str, rows: int, reach: int) -> RoundClock | None:
        """The clock of the same device with the most similar number of rows, then context."""
        found: list[tuple[float, int, RoundClock]] = []
        for name, clock in self._clocks.items():
            where, other_rows, other_reach = name.rsplit(" ", 2)
            if where == device and clock.is_measured:
                found.append((abs(math.log(int(other_rows) / rows)), abs(int(other_reach) - reach), clock))
        return min(found, key=lambda one: one[:2])[2] if found else None

    def end(self, rows: Iterable[LookupRow]) -> None:
        """Puts finished texts into the store."""
        with self.lock:
            self.known.add_texts([row.own.tokens for row in rows])
        if monotonic() - self._written >= _WRITTEN:
            self.write()
        else:
            _unwritten.add(self)

    def write(self) -> None:
        """Writes what is known to disk, if it is kept there."""
        self._written = monotonic()
        _unwritten.discard(self)
        if self.changed is not None:
            self.changed()

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Ignores a call without a draft, which has nothing to learn from."""

    def report(self, stats: GenerationStats) -> None:
        """Adds nothing to the statistics."""

    def forget(self) -> None:
        """Drops texts, successors and evidence, and keeps times."""
        with self.lock:
            self.known.forget()

    def merge(self, state: dict[str, Any]) -> None:
        """See :meth:`TextFindings.merge`; this process keeps its own times."""
        known, _ = self._checked(state)
        with self.lock:
            self.known.merge(known)

    def state(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        with self.lock:
            clocks = self._restored | {name: clock.state() for name, clock in self._clocks.items()}
            return {"known": _packed(self.known.state()), "clocks": clocks}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is something else.
        """
        known, clocks = self._checked(state)
        with self.lock:
            self.known.restore(known)
            self._restored = clocks

    def _checked(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """The knowledge and the clocks in the state of another or an earlier process, checked."""
        clocks = {str(name): [float(time) for time in times] for name, times in state["clocks"].items()}
        for times in clocks.values():
            RoundClock(True).restore(times)
        known = _unpacked(state["known"])
        for tokens in (known["store"], known["successors"]["tokens"]):
            _check_tokens(np.asarray(tokens), self._vocabulary)
        return known, clocks


def _packed(state: Any) -> Any:
    """Arrays as text."""
    if isinstance(state, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(state).tobytes()).decode("ascii")
        return {"dtype": state.dtype.str, "shape": list(state.shape), "base64": data}
    return {name: _packed(value) for name, value in state.items()} if isinstance(state, dict) else state


def _unpacked(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if "base64" in state:
        dtype = np.dtype(str(state["dtype"]))
        if dtype.hasobject:
            raise ValueError("arrays hold numbers")
        return np.frombuffer(base64.b64decode(state["base64"], validate=True), dtype).reshape(state["shape"])
    return {name: _unpacked(value) for name, value in state.items()}


def _check_tokens(tokens: np.ndarray, vocabulary: int) -> None:
    """Raises ``ValueError`` where an array holds anything but token ids and separators."""
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens of the type {tokens.dtype}")
    if tokens.size and not SEPARATOR <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()}, but the model has 0 to {vocabulary - 1}")
