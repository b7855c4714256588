"""Tables as text and figures of reports; the plot of what a ``SelfSpec`` did: search, speed, shares of time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SettingError, SettingTypeError
from ..learned.files import path_of, reported
from ..search.skip_search import SkipSearch
from ..stats import GenerationStats
from ..validation import StrPath

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PHASES = ("prefill", "draft", "verify", "search", "other")
# Tokens over which speed is averaged.
_SPAN = 64
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


def plot(calls: Sequence[GenerationStats], search: SkipSearch | None, path: StrPath | None = None) -> Figure:
    """Draws a search's skipped blocks (SWIFT, Figure 12), matchness and speed (Figure 6) and time by module (8)."""
    figure = new_figure("SelfSpec.plot", 13 if search else 9, 3.6)
    panels = list(figure.subplots(1, 3 if search else 2, width_ratios=[4, 4, 2] if search else [4, 2]))
    if search is not None:
        _sets(panels.pop(0), search)
    _speed(panels[0], calls, search)
    _time(panels[1], calls)
    return saved("SelfSpec.plot", figure, path)


def _sets(axes: Axes, search: SkipSearch) -> None:
    changes = list(search.best_sets)
    last = max(len(search.trials), changes[-1][0] + 1)
    for index, (step, plan) in enumerate(changes):
        end = changes[index + 1][0] if index + 1 < len(changes) else last
        for skipped, shift, color in ((plan.skipped_attention, 0.0, "C0"), (plan.skipped_mlp, 0.45, "C1")):
            for layer in skipped:
                axes.broken_barh([(step, max(end - step, 0.5))], (layer + shift, 0.4), color=color, linewidth=0)
    axes.set(xlabel="step of the search", ylabel="layer", ylim=(0, search.space.num_layers), xlim=(0, last))
    axes.set_title("skipped attention (blue) and MLP (orange)", fontsize="medium")


def _speed(axes: Axes, calls: Sequence[GenerationStats], search: SkipSearch | None) -> None:
    tokens, seconds = [0], [0.0]
    for call in calls:
        start, begun = tokens[-1], seconds[-1]
        for count, time in call.timeline:
            if start + count - tokens[-1] >= _SPAN:
                tokens.append(start + count)
                seconds.append(begun + time)
        if start + call.tokens > tokens[-1]:
            tokens.append(start + call.tokens)
            seconds.append(begun + call.total_seconds)
    if len(tokens) > 1:
        axes.plot(tokens[1:], np.diff(tokens) / np.diff(seconds), color="C2", label="tokens per second")
    axes.set(xlabel="generated tokens", ylabel="tokens per second", ylim=(0, None))
    if search is not None and search.trials:
        other = axes.twinx()
        places = [trial.generated for trial in search.trials]
        other.plot(places, search.history, ".", color="C3", alpha=0.4, label="matchness of a trial")
        other.set(ylabel="matchness", ylim=(0, 1.02))
        axes.set_title("speed (green), matchness of trials (red)", fontsize="medium")
    axes.grid(alpha=0.3)


def _time(axes: Axes, calls: Sequence[GenerationStats]) -> None:
    spent = [sum(getattr(call, f"{name}_seconds") for call in calls) for name in _PHASES]
    total = sum(spent) or 1.0
    bars = axes.barh(range(len(spent)), [part / total for part in spent], tick_label=list(_PHASES))
    axes.bar_label(bars, [f"{part / total:.1%}" for part in spent], padding=3, fontsize="small")
    axes.set(xlabel="share of time", xlim=(0, 1.15))
    axes.invert_yaxis()
