"""Tracing of forwards: which thread is tracing, what it must not read, and what waits meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class _Current(threading.local):
    is_tracing: bool = False


_current = _Current()


def is_tracing() -> bool:
    """Returns whether this thread runs a forward to trace it, with tensors that have no values."""
    return _current.is_tracing


@contextmanager
def tracing() -> Iterator[None]:
    """Marks this thread's forwards as traced."""
    _current.is_tracing = True
    try:
        yield
    finally:
        _current.is_tracing = False


class NotTraceableError(RuntimeError):
    """A forward reads a number that changes from round to round."""


class NoGraphError(RuntimeError):
    """A forward of this shape is better without a graph; others can be graphs."""


class ChangingNumber:
    """A number that a graph must not hold: whatever is computed with it ends the trace."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NotTraceableError("the forward computes with the number of tokens in the cache")

    def __eq__(self, other: object) -> bool:
        self._refuse(other)

    def __ne__(self, other: object) -> bool:
        self._refuse(other)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __mod__ = __truediv__ = __int__ = __index__ = __float__ = __bool__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


class Turns:
    """Lets graphs run concurrently but be made one at a time: torch's tracer changes process-wide state."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = self._waiting = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs at the same time as others that use this method."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Runs while nothing else does."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._running)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()
