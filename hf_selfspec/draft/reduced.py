"""Sources whose drafts may be made of some tokens alone (FR-Spec)."""

from __future__ import annotations

from typing import Any

from ..model.head_rows import HeadRows
from ..parts.part import part_of
from ..parts.reduced_head import ReducedHead
from .source import Session


def take_head(source: Any, name: str) -> None:
    """Reads the setting ``head`` of a frozen source while it is made.

    Raises:
        SettingError, SettingTypeError: it is no reduced head, nor the place of one.
    """
    if source.head is None:
        return
    kept, module = part_of(f"{name}(head)", source.head, ReducedHead)
    object.__setattr__(source, "head", kept)
    object.__setattr__(source, "_reduced", module)


def head_rows(source: Any, session: Session) -> HeadRows | None:
    """What runs in the place of the model's head in one generation, ``None`` for that.

    Raises:
        UnsupportedModelError: the model has no head of which there are rows.
    """
    if source.head is None:
        return None
    reduced: ReducedHead = source.__dict__["_reduced"]
    return HeadRows(session.target.model, reduced.tokens)
