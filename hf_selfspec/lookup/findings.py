"""What free drafts learn about a model, shared by all calls and threads of a ``SelfSpec``."""

from __future__ import annotations

import atexit
import base64
import weakref
from collections.abc import Iterable
from threading import RLock
from time import monotonic
from typing import Any

import numpy as np

from ..learned.findings import TextFindings
from .row import LookupKnowledge, LookupRow
from .suffix import SEPARATOR

# Seconds between two writes to disk; the last write is at the end of the process.
_WRITTEN = 10.0


_unwritten: weakref.WeakSet[LookupFindings] = weakref.WeakSet()


@atexit.register
def _write_rest() -> None:
    """Writes what the last calls of the process have added."""
    for found in list(_unwritten):
        found.write()


class LookupFindings(TextFindings):
    """Successors, texts and weights of evidence.

    Args:
        stored_tokens: tokens of earlier texts to keep.
        vocabulary: ``v``; a file with other tokens is rejected.

    Attributes:
        known: successors, texts and evidence.
        lock: held while ``known`` is used.
    """

    def __init__(self, stored_tokens: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.known = LookupKnowledge(most_stored=stored_tokens)
        self.lock = RLock()
        self._written = -_WRITTEN

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

    def forget(self) -> None:
        """Drops texts, successors and evidence."""
        with self.lock:
            self.known.forget()

    def merge(self, state: dict[str, Any]) -> None:
        """Adds what another process knows."""
        known = self._checked(state)
        with self.lock:
            self.known.merge(known)

    def state(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        with self.lock:
            return {"known": _packed(self.known.state())}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        known = self._checked(state)
        with self.lock:
            self.known.restore(known)

    def _checked(self, state: dict[str, Any]) -> dict[str, Any]:
        """The knowledge in the state of another or an earlier process, checked."""
        known: dict[str, Any] = _unpacked(state["known"])
        for tokens in (known["store"], known["successors"]["tokens"]):
            _check_tokens(np.asarray(tokens), self._vocabulary)
        return known


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
