"""The errors that this package raises when a user can do something about them, and warnings issued once a process.

``SelfSpecError``
 ├── ``SettingError``           a setting has a value that is not allowed (also a ``ValueError``)
 ├── ``SettingTypeError``       a setting has the wrong type (also a ``TypeError``)
 ├── ``UnsupportedModelError``  the model's structure does not allow it (also a ``ValueError``)
 ├── ``UnsupportedOptionError`` an option of ``generate`` cannot be used here (also a ``ValueError``)
 └── ``NumericalError``         the model returned NaN or infinite logits (also a ``RuntimeError``)
"""

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Most characters of a library's message that ours repeat; some messages list hundreds of classes.
_SHOWN = 200
# The packages whose code may lie between the user's line and a warning.
_INSIDE = ("hf_selfspec", "transformers", "torch")
# Warnings that were issued, which are not repeated until this is cleared, and most of them that are remembered.
issued: set[str] = set()
_MOST = 1024


class SelfSpecError(Exception):
    """Base class of all errors that this package raises on purpose."""


class SettingError(SelfSpecError, ValueError):
    """A setting has a value that is not allowed."""


class SettingTypeError(SelfSpecError, TypeError):
    """A setting has the wrong type."""


class UnsupportedModelError(SelfSpecError, ValueError):
    """The model's structure does not allow the requested settings."""


class UnsupportedOptionError(SelfSpecError, ValueError):
    """An option of ``generate`` that cannot be combined with self-speculative decoding."""


class NumericalError(SelfSpecError, RuntimeError):
    """The model returned NaN or infinite logits, so no token can be chosen."""


def unsupported(why: str, instead: str = "") -> UnsupportedModelError:
    """Returns the error for a model that drafts cannot serve: why, and what to do ``instead`` of plain ``generate``."""
    return UnsupportedModelError(f"{why}. {f'{instead}, or call' if instead else 'Call'} generate without `assistant`.")


def brief(error: object) -> str:
    """Returns a library's error, or a wrong value, as one short line."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def warn_once(message: str, ignore_numbers: bool = False) -> None:
    """Warns the user, once for each ``message``, or for all that differ only in their numbers."""
    key = re.sub(r"\d+", "#", message) if ignore_numbers else message
    if key not in issued and not _muted.depth:
        if len(issued) >= _MOST:
            issued.clear()
        issued.add(key)
        warnings.warn(message, UserWarning, stacklevel=_levels_inside())


class _Muted(threading.local):
    """Takes the place of a filter's pattern, and matches all warnings of threads that are muted."""

    depth = 0

    def match(self, text: str) -> bool:
        return self.depth > 0


_muted = _Muted()
_FILTER: Any = ("ignore", _muted, Warning, None, 0)


def left_to_plain(model: str, default_of: str, error: Exception) -> str:
    """Warns that plain ``generate`` serves a call of ``model``, and returns why, for the statistics."""
    why = str(error) if isinstance(error, SelfSpecError) else f"{type(error).__name__}: {brief(error)}"
    who = f"the SelfSpec {default_of}" if default_of else f"the SelfSpec of a call of {model}"
    warn_once(
        f"{who} cannot serve a call, so plain generate serves it: {why} (generate(assistant=False) asks for plain "
        "generate, without this warning.)",
        ignore_numbers=True,
    )
    return f"this SelfSpec cannot serve it ({why})"


@contextmanager
def only_warned(what: str, undo: Callable[[], object] = bool) -> Iterator[None]:
    """Turns an error in the block into a warning, after ``undo()``: it must not lose the text, which is complete."""
    try:
        yield
    except Exception as error:  # whatever it is, the text is complete
        undo()
        warn_once(f"{what} has failed, which does not change the text: {brief(repr(error))}", ignore_numbers=True)


@contextmanager
def muted() -> Iterator[None]:
    """Suppresses this thread's warnings, during work that the user does not see. They do not count as issued.

    ``warnings.catch_warnings`` would also change the filters of other threads.
    """
    filters: Any = warnings.filters
    with suppress(ValueError):
        filters.remove(_FILTER)
    filters.insert(0, _FILTER)  # stays there, since it matches nothing outside of such blocks
    try:
        _muted.depth += 1
        yield
    finally:
        _muted.depth -= 1


def _levels_inside() -> int:
    """Returns the number of stack frames from the caller's to that of the user's own line."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        frame, levels = frame.f_back, levels + 1
    return levels
