"""Checks of the settings that users give."""

from __future__ import annotations

import math

from .errors import SettingError, SettingTypeError


def check_count(name: str, value: object) -> None:
    """Checks that ``value`` is a whole number of at least 1.

    Raises:
        SettingTypeError, SettingError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingTypeError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if value < 1:
        raise SettingError(f"{name} must be at least 1, got {value!r}.")


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
    if math.isnan(value) or not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        excluded = [end for end, allowed in (("0", zero), ("1", one)) if not allowed]
        ends = {0: "both included", 1: f"{''.join(excluded)} excluded", 2: "both excluded"}[len(excluded)]
        raise SettingError(f"{name} must lie between 0 and 1 ({ends}), got {value!r}.")
