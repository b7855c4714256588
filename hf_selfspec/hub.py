"""Names of repositories on the Hub, and whether one is there, known within seconds."""

from __future__ import annotations

import re
from collections.abc import Callable

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from .errors import brief

_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"
# What no answer is. A base of the Hub's own errors is that of its HTTP library, which differs between its versions.
NO_ANSWER: tuple[type[Exception], ...] = (
    OSError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)
# Seconds that the Hub has to answer. Downloads try again for half a minute before they give up.
_PATIENCE = 10.0


def is_name(text: str) -> bool:
    """Whether a repository can have this name."""
    return re.fullmatch(_NAME, text) is not None


def trouble(ask: Callable[..., object], name: str) -> str:
    """Why a repository cannot be loaded from the Hub; empty where it can, or where the Hub must not be contacted.

    Args:
        ask: ``dataset_info`` or ``model_info`` of ``HfApi``.
        name: of the repository.
    """
    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        ask(name, timeout=_PATIENCE)
    except NO_ANSWER as error:
        return brief(error)
    return ""
