"""Names of repositories on the Hub, and a quick check of whether one exists."""

from __future__ import annotations

import re
from collections.abc import Callable

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from ..errors import brief

_NAME = r"\w[\w.-]*(/\w[\w.-]*)?"
# Errors that mean that the Hub did not answer. The Hub's errors derive from those of its HTTP library, which differs
# between versions.
NO_ANSWER: tuple[type[Exception], ...] = (
    OSError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)
# Seconds within which the Hub has to answer. Downloads retry for half a minute before they give up.
_PATIENCE = 10.0


def is_name(text: str) -> bool:
    """Returns whether a repository can have this name."""
    return re.fullmatch(_NAME, text) is not None


def hub_error(ask: Callable[..., object], name: str) -> str:
    """Returns why ``HfApi``'s ``dataset_info`` or ``model_info`` finds no such repository; empty in offline mode."""
    if constants.HF_HUB_OFFLINE:
        return ""
    try:
        ask(name, timeout=_PATIENCE)
    except NO_ANSWER as error:
        return brief(error)
    return ""
