"""Warnings that are said once in a process."""

import re
import sys
import warnings
from pathlib import Path

import torch
import transformers

# Folders of what stands between the user's line and a warning.
_INSIDE = tuple(str(Path(found).parent) for found in (__file__, transformers.__file__, torch.__file__))
_said: set[str] = set()


def say_once(message: str) -> None:
    """Warns the user, the first time only."""
    _warn(message, message)


def say_once_whatever_numbers(message: str) -> None:
    """The same where the numbers in ``message`` differ from call to call."""
    _warn(message, re.sub(r"\d+", "#", message))


def _warn(message: str, key: str) -> None:
    if key not in _said:
        _said.add(key)
        warnings.warn(message, UserWarning, stacklevel=_levels_inside() + 1)


def _levels_inside() -> int:
    """Calls from the one that warns up to the user's own line."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, levels = frame.f_back, levels + 1
    return levels - 1
