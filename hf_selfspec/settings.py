"""Checks of the settings that users give."""

from __future__ import annotations

import math

from .errors import SettingError, SettingTypeError

# What 64 bits hold; a larger number counts nothing.
LARGEST = 2**63 - 1
# Most tokens of a draft. The papers' drafts have at most 32. For each stop rule and token of its text, a probe replays
# with as many numbers, which is 20 MB in all at this length.
MOST_DRAFT = 1024
# Most layers of a model, and most numbers of a state or words of a vocabulary: ten times what the largest models have.
MOST_LAYERS = 4096
MOST_WIDTH = 2**22
# Most tokens on which a search tries a set, for which each call reserves memory: 64 times what the papers need at most.
MOST_WINDOW = 4096
# Most candidates at one depth of a tree, each of which the whole model runs over. SWIFT's tree has at most 10 of them.
MOST_CANDIDATES = 256


def check_count(name: str, value: object, least: int = 1, most: int = LARGEST) -> None:
    """Checks that ``value`` is a whole number from ``least`` to ``most``.

    Raises:
        SettingTypeError, SettingError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingTypeError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if value < least:
        raise SettingError(f"{name} must be at least {least}, got {_shown(value)}.")
    if value > most:
        raise SettingError(f"{name} must be at most {most}, got {_shown(value)}.")


def check_exit(who: str, setting: str, layer: int, layers: int, model: str = "the model") -> None:
    """Checks that a model of as many layers has that exit layer.

    Raises:
        SettingError, SettingTypeError: it has not.
    """
    check_count(f"{who}({setting})", layer)
    if layer >= layers:
        allowed = f"the exit layer must be between 1 and {layers - 1}" if layers > 1 else "it has no exit layer"
        plural = "" if layers == 1 else "s"
        raise SettingError(
            f"{who}({setting}={_shown(layer)}) is not possible: {model} has {layers} layer{plural}, so {allowed}."
        )


def check_share(name: str, value: object, zero: bool, one: bool) -> None:
    """Checks that ``value`` is a number between 0 and 1.

    Args:
        name: what the setting is called in messages.
        value: what was given.
        zero, one: whether 0 and 1 themselves are allowed.

    Raises:
        SettingTypeError, SettingError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingTypeError(f"{name} must be a number between 0 and 1, got {value!r}.")
    if not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        excluded = [end for end, allowed in (("0", zero), ("1", one)) if not allowed]
        ends = {0: "both included", 1: f"{''.join(excluded)} excluded", 2: "both excluded"}[len(excluded)]
        raise SettingError(f"{name} must lie between 0 and 1 ({ends}), got {_shown(value)}.")


def check_positive(name: str, value: object) -> None:
    """Checks that ``value`` is a finite number above 0.

    Raises:
        SettingTypeError, SettingError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingTypeError(f"{name} must be a number above 0, got {value!r}.")
    if not 0 < value < math.inf or value > LARGEST:
        raise SettingError(f"{name} must be a finite number above 0, got {_shown(value)}.")


def check_flag(name: str, value: object) -> None:
    """Checks that ``value`` is ``True`` or ``False``.

    Raises:
        SettingTypeError: it is not.
    """
    if not isinstance(value, bool):
        raise SettingTypeError(f"{name} must be True or False, got {value!r}.")


def _shown(value: float) -> str:
    """A number in a message; Python does not write whole numbers of thousands of digits."""
    return f"{value!r}" if isinstance(value, float) or abs(value) <= LARGEST else "a number that 64 bits do not hold"
