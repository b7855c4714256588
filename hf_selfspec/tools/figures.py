"""Tables as text and figures of reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import SettingError, SettingTypeError
from ..learned.files import path_of, reported
from ..validation import StrPath

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """Returns a table with aligned columns; ``right`` aligns all but the first one on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    sides = [str.ljust, *[str.rjust if right else str.ljust] * (len(widths) - 1)]
    lines = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def new_figure(what: str, width: float, height: float) -> Figure:
    """Returns a figure that no window shows and that is not registered with pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError(
            f"{what} draws with matplotlib, which could not be imported. Run `pip install matplotlib`, or print the "
            "report instead."
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def saved(what: str, figure: Figure, path: StrPath | None) -> Figure:
    """Returns the figure, saved in the format that the suffix of ``path`` names, PNG where it has none."""
    if path is None:
        return figure
    if not isinstance(path, (str, os.PathLike)):
        raise SettingTypeError(f"{what}(path) must be a path or None, got {path!r}.")
    with reported(path):
        try:
            figure.savefig(path_of(path), dpi=_DPI)
        except ValueError as error:  # names the formats that matplotlib knows
            raise SettingError(f"{what}(path={os.fspath(path)!r}): {error}.") from error
    return figure
