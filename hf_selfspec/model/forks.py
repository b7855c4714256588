"""Locks that are free in a forked process, although the threads that held them exist only in its parent."""

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from time import monotonic
from typing import Any, TypeVar

# Most seconds that a fork waits for other threads to release their locks; a graph may be captured under a lock.
_PATIENCE = 1.0

_T = TypeVar("_T")

_locks = weakref.WeakValueDictionary[int, Any]()
_taken = threading.local()


def new_lock() -> Any:
    """Returns a lock that a thread may take again, since the garbage collector may call what needs a lock that is held.

    A fork first takes all of these locks, so that what they guard is whole in the child. Those that it could not take
    are made free there.
    """
    lock = threading.RLock()
    _locks[id(lock)] = lock
    return lock


class cached_property(functools.cached_property[_T]):  # noqa: N801 (takes the place of that)
    """As in Python 3.12. Before, all objects of a class shared a lock, which was held while a value was computed."""

    def __init__(self, function: Callable[[Any], _T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


def in_children(function: Callable[[], object]) -> None:
    """Calls ``function`` in each forked process, when locks are free there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _take() -> None:
    until = monotonic() + _PATIENCE
    locks = [lock for reference in _locks.valuerefs() if (lock := reference()) is not None]
    _taken.locks = [lock for lock in locks if lock.acquire(timeout=max(until - monotonic(), 0.0))]


def _release() -> None:
    for lock in _taken.__dict__.pop("locks", ()):
        lock.release()


def _renew() -> None:
    for lock in list(_locks.values()):
        if lock.acquire(blocking=False):  # free, or held by this thread
            lock.release()
        else:
            lock._at_fork_reinit()  # as Python's own modules do
    _release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take, after_in_parent=_release, after_in_child=_renew)
