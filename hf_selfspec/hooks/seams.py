"""The places where transformers is changed, and how that is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ORIGINAL = "_hf_selfspec_original"


@dataclass(frozen=True)
class _Seam:
    owner: type
    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def put_on(self) -> None:
        original = getattr(self.owner, self.name)
        if not hasattr(original, _ORIGINAL):
            wrapped = self.wrap(original)
            setattr(wrapped, _ORIGINAL, original)
            setattr(self.owner, self.name, wrapped)

    def take_off(self) -> None:
        original = getattr(getattr(self.owner, self.name), _ORIGINAL, None)
        if original is not None:
            setattr(self.owner, self.name, original)


_seams: list[_Seam] = []
_is_installed = True


def add_seam(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a method of transformers, now and at each :func:`install`."""
    _seams.append(_Seam(owner, name, wrap))
    if _is_installed:
        _seams[-1].put_on()


def install() -> None:
    """Gives ``generate`` of all transformers models the argument ``assistant``, and ``Trainer`` our training callbacks.

    Pipelines pass the argument on, including those for images.

    Happens by itself when a name of the package is first used. Calls and trainings that use neither are not affected.
    Calling this again changes nothing; :func:`uninstall` undoes it.
    """
    global _is_installed
    _is_installed = True
    for seam in _seams:
        seam.put_on()


def uninstall() -> None:
    """Undoes :func:`install`.

    ``generate(custom_generate=SelfSpec())`` still works; callbacks, and a ``SelfSpec`` that is attached or in a
    generation config, have no effect until the next :func:`install`.
    """
    global _is_installed
    _is_installed = False
    for seam in _seams:
        seam.take_off()
