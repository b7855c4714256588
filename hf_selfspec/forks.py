"""Locks that a forked process finds free, although the threads that held them exist in its parent alone."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from time import monotonic
from typing import Any, TypeVar

# Seconds that a fork waits at most for other threads to leave what locks guard; a graph may be compiled under one.
_PATIENCE = 1.0

_T = TypeVar("_T")

_locks = weakref.WeakSet[Any]()
_taken = threading.local()


def new_lock() -> Any:
    """Returns a lock that a thread may take again: what the garbage collector calls may need one that is held.

    A fork takes all of them first, so that the child finds whole what they guard; there, the rest are made free.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class cached_property(functools.cached_property[_T]):  # noqa: N801 (takes the place of that)
    """As in Python 3.12: before, all objects of a class shared a lock, which was held while a value is computed."""

    def __init__(self, function: Callable[[Any], _T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


def in_children(function: Callable[[], object]) -> None:
    """Calls ``function`` in each forked process, after locks are free."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _take() -> None:
    until = monotonic() + _PATIENCE
    locks = list[Any]()
    while not locks and monotonic() < until:
        with suppress(RuntimeError):  # another thread has made a lock meanwhile
            locks = list(_locks)
    _taken.locks = [lock for lock in locks if lock.acquire(timeout=max(until - monotonic(), 0.0))]


def _release() -> None:
    for lock in _taken.__dict__.pop("locks", ()):
        lock.release()


def _renew() -> None:
    _release()
    for lock in list(_locks):
        if lock.acquire(blocking=False):  # free, or held by this thread
            lock.release()
        else:
            lock._at_fork_reinit()  # as Python's own modules do


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_release, after_in_child=_renew)
