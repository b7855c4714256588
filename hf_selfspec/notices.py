"""Warnings that are issued once per process."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

# Folders of the code that may lie between the user's line and a warning.
_INSIDE = tuple(str(Path(found).parent) for found in (__file__, transformers.__file__, torch.__file__))
_warned: set[str] = set()
# How many warnings are remembered; when there are more, each may be issued again.
_MOST = 1024


def warn_once(message: str) -> None:
    """Warns the user, once for each ``message``."""
    _warn(message, message)


def warn_once_ignoring_numbers(message: str) -> None:
    """Warns the user, once for all messages that differ only in their numbers."""
    _warn(message, re.sub(r"\d+", "#", message))


@contextmanager
def muted() -> Iterator[None]:
    """Suppresses warnings, for a trial whose result the user does not see; they do not count as issued."""
    issued = set(_warned)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _warned.intersection_update(issued)


def _warn(message: str, key: str) -> None:
    if key not in _warned:
        if len(_warned) >= _MOST:
            _warned.clear()
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=_levels_inside() + 1)


def _levels_inside() -> int:
    """Returns the number of stack frames between the warning and the user's own line."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, levels = frame.f_back, levels + 1
    return levels - 1
