"""Checks of the settings that users give, and how the command line takes them."""

import os

from .errors import SettingError, SettingTypeError

# A path as users give it.
StrPath = str | os.PathLike[str]
# The largest number that 64 bits hold; no count needs more.
LARGEST = 2**63 - 1
# Maximum number of tokens in a draft. The papers' drafts have at most 32.
MOST_DRAFT = 1024
# Maximum number of tokens on which a search tries a set; each call reserves memory for them. 64 times the papers' most.
MOST_WINDOW = 4096
# Maximum number of candidates at one depth of a tree; the whole model runs over each. SWIFT's tree has at most 10.
MOST_CANDIDATES = 256


def check_count(name: str, value: object, least: int = 1, most: int = LARGEST) -> None:
    """Checks that ``value`` is a whole number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingTypeError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if value < least:
        raise SettingError(f"{name} must be at least {least}, got {value!r}.")
    if value > most:
        raise SettingError(f"{name} must be at most {most}, got {value!r}.")


def check_exit(who: str, setting: str, layer: int, layers: int, model: str = "the model") -> None:
    """Checks that a model with ``layers`` layers has the exit layer ``layer``."""
    check_count(f"{who}({setting})", layer)
    if layer >= layers:
        allowed = f"the exit layer must be between 1 and {layers - 1}" if layers > 1 else "it has no exit layer"
        plural = "" if layers == 1 else "s"
        raise SettingError(
            f"{who}({setting}={layer}) is not possible: {model} has {layers} layer{plural}, so {allowed}."
        )


def check_share(name: str, value: object, zero: bool, one: bool) -> None:
    """Checks that ``value`` is a number between 0 and 1, which are allowed themselves with ``zero`` and ``one``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingTypeError(f"{name} must be a number between 0 and 1, got {value!r}.")
    if not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        excluded = [end for end, allowed in (("0", zero), ("1", one)) if not allowed]
        ends = {0: "both included", 1: f"{''.join(excluded)} excluded", 2: "both excluded"}[len(excluded)]
        raise SettingError(f"{name} must lie between 0 and 1 ({ends}), got {value!r}.")


def check_flag(name: str, value: object) -> None:
    """Checks that ``value`` is ``True`` or ``False``."""
    if not isinstance(value, bool):
        raise SettingTypeError(f"{name} must be True or False, got {value!r}.")
