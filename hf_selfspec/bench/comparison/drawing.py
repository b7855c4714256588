"""Plots of what was measured, which are readable in print and for the colour-blind."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...pictures import new_figure
from .results import Json, estimate
from .tables import title
from .ways import COMPILED_GROUP, LOOKUP_GROUP, OURS_GROUP, PLAIN, PLAIN_GROUP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours (Color Universal Design, 2008), distinct with any colour vision, and a hatch for print.
_STYLES = {
    PLAIN_GROUP: ("#999999", ""),
    LOOKUP_GROUP: ("#E69F00", "///"),
    COMPILED_GROUP: ("#CC79A7", "..."),
    OURS_GROUP: ("#0072B2", ""),
}
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_WHAT = "Comparison.plot"
# The most characters of a way's name on an axis.
_LONGEST = 34
# The most ways in a plot of drafts, the fastest ones.
_DRAWN = 6


def speedups(condition: Json) -> Figure:
    """Draws a bar for each way with its interval, and a line at plain generate."""
    ways = _ranked(condition)
    figure = new_figure(_WHAT, 8, 1.1 + 0.36 * len(ways))
    axes = figure.subplots()
    for place, way in enumerate(ways):
        _bar(axes, place, way)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(ways)), [_short(way["name"]) for way in ways])
    axes.invert_yaxis()
    axes.set_xlabel("speed, plain generate = 1 (whiskers: 95 % interval)")
    axes.set_xlim(0, _right_end(ways))
    axes.set_title(title(condition), loc="left", fontsize="medium")
    _plain_frame(axes)
    return figure


def _bar(axes: Axes, place: int, way: Json) -> None:
    found = estimate(way["whole"]["ratio_of_means"])
    assert found is not None
    colour, hatch = _STYLES[way["group"]]
    axes.barh(place, found.value, color=colour, hatch=hatch, edgecolor="white", height=0.72)
    end = found.value
    if found.low is not None and found.high is not None and way["name"] != PLAIN:
        low, high = found.value - found.low, found.high - found.value
        axes.errorbar(found.value, place, xerr=[[low], [high]], color="black", capsize=3, linewidth=1)
        end = max(end, found.high)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.annotate(f"{found.value:.2f}", (end, place), (6, 0), textcoords="offset points", va="center", bbox=behind)


def _right_end(ways: list[Json]) -> float:
    ends = [way["whole"]["ratio_of_means"] for way in ways]
    return 1.15 * max(1.0, *(end["high"] or end["value"] for end in ends))


def by_kind(condition: Json) -> Figure | None:
    """Draws a point for each kind of prompt and way; ``None`` for a stream of one kind."""
    ways = [way for way in _ranked(condition) if way["name"] != PLAIN][:_DRAWN]
    kinds = list(condition["kinds"])
    if len(kinds) < 2 or not ways:
        return None
    figure = new_figure(_WHAT, 8, 1.5 + 0.34 * len(kinds))
    axes = figure.subplots()
    for number, way in enumerate(ways):
        points = [
            (found["decode"]["ratio_of_means"]["value"], place)
            for place, kind in enumerate(kinds)
            if (found := way["by_kind"].get(kind)) and found["decode"] is not None
        ]
        speeds, places = zip(*points, strict=True) if points else ((), ())
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        axes.plot(speeds, places, linestyle="", markersize=8, label=_short(way["name"]), **style)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(kinds)), [f"{kind} ({condition['kinds'][kind]})" for kind in kinds])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("speed of decoding, plain generate = 1 (in brackets: prompts)")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize="small", frameon=False)
    _plain_frame(axes)
    return figure


def acceptance(condition: Json) -> Figure | None:
    """Draws how often drafted tokens are kept by position, and how many a round keeps."""
    ways = [way for way in _ranked(condition) if way["acceptance"] and way["acceptance"]["num_accepted_tokens"]]
    if not ways:
        return None
    figure = new_figure(_WHAT, 8, 3.2)
    left, right = figure.subplots(1, 2)
    for number, way in enumerate(ways[:_DRAWN]):
        kept = way["acceptance"]
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        shares = kept["conditional_acceptance"]
        left.plot(range(1, len(shares) + 1), shares, label=_short(way["name"]), markersize=5, **style)
        lengths = np.array([int(length) for length in kept["acceptance_histogram"]])
        counts = np.array(list(kept["acceptance_histogram"].values()))
        at_least = [counts[lengths >= length].sum() / counts.sum() for length in range(max(lengths) + 1)]
        right.plot(range(len(at_least)), at_least, markersize=5, **style)
    left.set(xlabel="position in the draft", ylabel="kept, if all before were", ylim=(0, 1.03))
    right.set(xlabel="drafted tokens", ylabel="rounds that keep so many", ylim=(0, 1.03))
    figure.legend(loc="outside upper center", ncols=3, fontsize="small", frameon=False)
    for axes in (left, right):
        _whole_numbers(axes)
        _plain_frame(axes)
        axes.grid(alpha=0.3)
    return figure


def costs(found: Json) -> Figure:
    """Draws verify(n)/verify(1)."""
    figure = new_figure(_WHAT, 8, 2.8)
    axes = figure.subplots()
    for number, whose in enumerate(("transformers", "ours")):
        counts = [int(count) for count in found[whose]]
        style: dict[str, Any] = {
            "color": _COLOURS[1 - number],
            "marker": _MARKERS[number],
            "linestyle": ("--", "-")[number],
        }
        axes.plot(counts, list(found[whose].values()), label=f"{whose}' forwards" if not number else whose, **style)
    axes.set(xlabel="tokens that are verified together (n)", ylabel="verify(n) / verify(1)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    _plain_frame(axes)
    return figure


def pictures(results: Json) -> dict[str, Figure]:
    """Draws all plots, by the names of their files."""
    found: dict[str, Figure | None] = {}
    drawn: dict[str, Callable[[Json], Figure | None]] = {
        "speed-up": speedups,
        "by-kind": by_kind,
        "acceptance": acceptance,
    }
    for index, condition in enumerate(results["conditions"]):
        if condition["ways"]:
            found |= {f"{name}-{index}": draw(condition) for name, draw in drawn.items()}
    if results["verify_cost"] is not None:
        found["verify-cost"] = costs(results["verify_cost"])
    return {name: figure for name, figure in found.items() if figure is not None}


def as_svg(figure: Figure) -> bytes:
    """Returns the plot as an SVG file."""
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _ranked(condition: Json) -> list[Json]:
    """The ways, the fastest first."""
    known = [way for way in condition["ways"] if way["whole"] is not None]
    return sorted(known, key=lambda way: -way["whole"]["ratio_of_means"]["value"])


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plain_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
