"""Classes of settings that files may name: drafts, stop rules, trees and searches, including a user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import hf_selfspec

from ..errors import SettingError, SettingTypeError

# The settings that may hold a registered class, by their names in a file. ``rule`` is the rule inside another rule.
Place = Literal["draft", "stop", "rule", "tree", "search"]
# Settings that hold a list of a place's classes.
_LISTS: dict[str, Place] = {"sources": "draft"}

_places: dict[str, dict[str, type]] = {}
_T = TypeVar("_T", bound=type)


def register(*places: Place) -> Callable[[_T], _T]:
    """Lets a frozen dataclass of settings be saved and loaded by its name.

    ``SelfSpec.save_pretrained`` writes the name and the fields of a draft, stop rule or tree; ``from_pretrained`` makes
    the object again if a class of that name is registered in that process. No file makes Python import a module, so the
    module that defines the class has to be imported first::

        @hf_selfspec.register("draft")
        @dataclass(frozen=True)
        class MyDraft(hf_selfspec.DraftSource): ...

    Args:
        places: the settings that may hold it: ``"draft"``, ``"stop"``, ``"tree"``.

    Raises:
        SettingTypeError: the class is not a dataclass.
        SettingError: another class of this name is registered there, or there is no such setting.
    """
    if not places or not all(place in get_args(Place) for place in places):
        raise SettingError(
            f"register(*places) takes the settings that may hold the class, got {places!r}. Write "
            'register("draft"), register("stop") or register("tree") above the class.'
        )

    def add(kind: _T) -> _T:
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            raise SettingTypeError(f"register takes a dataclass of settings, got {kind!r}.")
        for place in places:
            known = _places.setdefault(place, {}).setdefault(kind.__name__, kind)
            if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
                raise SettingError(
                    f"{kind.__module__}.{kind.__qualname__} cannot be registered: {known.__module__}."
                    f"{known.__qualname__} has this name already. Give your class another name."
                )
            _places[place][kind.__name__] = kind  # a module that is reloaded defines its class again
        return kind

    return add


def is_registered(kind: type) -> bool:
    """Returns whether settings of exactly this class can be saved."""
    return any(kinds.get(kind.__name__) is kind for kinds in _places.values())


def class_named(name: str) -> type | None:
    """Returns the registered class of that name, for any setting; ``None`` if there is none."""
    _import(name)
    return next((kinds[name] for kinds in _places.values() if name in kinds), None)


def registered(setting: str, name: object) -> type | None:
    """Returns the class of that name that the setting may hold, ``None`` if there is none."""
    _import(name)
    kinds = _places.get(_LISTS.get(setting, setting), {})
    return kinds.get(name) if isinstance(name, str) else None


def _import(name: object) -> None:
    """Imports a public class of this package, which registers it."""
    if name in hf_selfspec.__all__:
        getattr(hf_selfspec, str(name))
