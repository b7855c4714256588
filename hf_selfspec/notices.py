"""Warnings that are said once in a process."""

import warnings

_said: set[str] = set()


def say_once(message: str) -> None:
    """Warns the user, the first time only."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)
