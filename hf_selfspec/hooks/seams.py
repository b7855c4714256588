"""The places where transformers is changed, and how that is undone."""

from collections.abc import Callable
from typing import Any

_ORIGINAL = "_hf_selfspec_original"

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_seams: list[tuple[type, str, Wrap]] = []
_is_installed = True


def add_seam(owner: type, name: str, wrap: Wrap) -> None:
    """Wraps a method of transformers, now and at each :func:`install`."""
    _seams.append((owner, name, wrap))
    if _is_installed:
        install()


def install() -> None:
    """Gives ``generate`` of all transformers models the argument ``assistant``, and ``Trainer`` our training callbacks.

    Pipelines pass the argument on, including those for images.

    Happens by itself when a name of the package is first used. Calls and trainings that use neither are not affected.
    Calling this again changes nothing; :func:`uninstall` undoes it.
    """
    global _is_installed
    _is_installed = True
    for owner, name, wrap in _seams:
        original = getattr(owner, name)
        if not hasattr(original, _ORIGINAL):
            wrapped = wrap(original)
            setattr(wrapped, _ORIGINAL, original)
            setattr(owner, name, wrapped)


def uninstall() -> None:
    """Undoes :func:`install`.

    ``generate(custom_generate=SelfSpec())`` still works; callbacks, and a ``SelfSpec`` that is attached or in a
    generation config, have no effect until the next :func:`install`.
    """
    global _is_installed
    _is_installed = False
    for owner, name, _ in _seams:
        if (original := getattr(getattr(owner, name), _ORIGINAL, None)) is not None:
            setattr(owner, name, original)
