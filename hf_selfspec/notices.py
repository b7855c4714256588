"""Warnings that are said once in a process."""

import re
import warnings

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
        warnings.warn(message, UserWarning, stacklevel=3)
