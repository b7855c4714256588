"""What a comparison of methods has shown: figures with intervals, a table, a conclusion and a picture.

A method's figure is Spec-Bench's (arXiv 2401.07851, ``evaluation/speed.py``): the mean of the prompts' new tokens per
second, over that of plain ``generate``, so that long answers count no more than short ones. Intervals are 95 %
percentile intervals of the bootstrap over prompts (Efron and Tibshirani, An Introduction to the Bootstrap, §13.3): a
method and plain ``generate`` are resampled together, so that differences between prompts cancel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SettingError
from ..learned.files import check_folder, path_of, reported, written_whole
from ..validation import StrPath
from .figures import as_text
from .methods import LAYERS, PLAIN, Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The fewest prompts for an interval. With few prompts the bootstrap's intervals are too narrow: for means of lognormal
# speeds (σ = 0.3) they cover the true mean in 79 % of cases with 4 prompts, in 88 % with 10, in 93 % with 20 (1,500
# simulated cases).
FEWEST = 10
_DRAWS, _SEED = 2000, 0
# Okabe and Ito's colours (Color Universal Design, 2008), distinct with any colour vision.
_PLAINS_COLOUR, _THEIR_COLOUR, _OUR_COLOUR = "#999999", "#E69F00", "#0072B2"
# The most characters of a method's name on an axis.
_LONGEST = 34
_NOTHING, _DPI = "–", 120
_NOTE = (
    "Speed-up: how many times plain generate's tokens per second; whole calls, mean of all prompts but the first.\n"
    "Drafts alone: the same, beside plain generate with our linear layers. Tokens a round include the bonus token."
)
Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One timed call of ``generate``; ``ids`` are the new ones of each row, up to the end of its text."""

    kind: str
    ids: list[list[int]]
    seconds: float
    # Of a ``SelfSpec`` that served it: rounds, drafted and accepted tokens, siblings.
    rounds: tuple[int, int, int, int] | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def measures(
    methods: Sequence[Method], calls: Mapping[str, Sequence[Call]], differing: Mapping[str, Sequence[Json]]
) -> Json:
    """Returns the figures of each method by its calls, one for each batch, and the name of the fastest; where greedy
    texts of a method differ from plain ``generate``'s is in ``differing``."""
    first = 1 if len(calls[PLAIN]) > 1 else 0
    plain, figures = calls[PLAIN][first:], list[Json]()
    for method in methods:
        mine = calls[method.name][first:]
        kinds = dict.fromkeys(call.kind for call in plain)
        of_kinds = {kind: [pair for pair in zip(plain, mine, strict=True) if pair[0].kind == kind] for kind in kinds}
        rounds = [call.rounds for call in mine if call.rounds is not None]
        count, drafted, accepted, siblings = map(sum, zip(*rounds, strict=True)) if rounds else (0, 0, 0, 0)
        texts = [text for call in calls[method.name] for text in call.ids]
        expected = [text for call in calls[PLAIN] for text in call.ids]
        figures.append(
            {
                "name": method.name,
                "is_ours": method.make is not None,
                "speedup": speedup(plain, mine),
                "by_kind": {kind: speedup(*zip(*pairs, strict=True)) for kind, pairs in of_kinds.items()},
                "tokens_per_second": float(np.mean([call.tokens / call.seconds for call in mine])),
                "tokens_a_round": 1 + accepted / count if count else None,
                "acceptance_rate": (accepted - siblings) / drafted if drafted else None,
                "texts": len(texts),
                "equal_ids": sum(map(list.__eq__, texts, expected)) if differing else None,
                "differences": list(differing.get(method.name, ())),
            }
        )
    layers = next((each["speedup"]["value"] for each in figures if each["name"] == LAYERS), None)
    for each in figures:
        each["drafts_alone"] = each["speedup"]["value"] / layers if layers and each["is_ours"] else None
    exact = [each for each in figures if _is_exact(each) and each["name"] != LAYERS]
    best = max(exact, key=lambda each: each["speedup"]["value"])["name"]
    return {"prompts": len(plain), "methods": figures, "best": best}


def _is_exact(figures: Json) -> bool:
    return all(difference["near_tie"] for difference in figures["differences"])


def speedup(plain: Sequence[Call], calls: Sequence[Call]) -> Json:
    """How much faster calls are than plain generate's, with an interval where there are prompts enough."""
    speeds = np.array([[call.tokens / call.seconds for call in each] for each in (calls, plain)])
    value, low, high = float(np.divide(*speeds.mean(-1))), None, None
    if (count := speeds.shape[1]) >= FEWEST:
        drawn = np.random.default_rng(_SEED).integers(count, size=(_DRAWS, count))
        low, high = np.quantile(np.divide(*speeds[:, drawn].mean(-1)), (0.025, 0.975)).tolist()
    return {"value": value, "low": low, "high": high}


@dataclass(frozen=True)
class Comparison:
    """How fast methods of generating are on one model and stream of prompts.

    ``str(comparison)`` is a table and a sentence on what is fastest; :meth:`plot` draws it, :meth:`save` writes a
    report.

    Attributes:
        results: everything, as in the file ``results.json``.
    """

    results: Mapping[str, Any]

    @property
    def best(self) -> str:
        """Name of the fastest method that writes the model's own text."""
        return str(self.results["best"])

    def plot(self, path: StrPath | None = None) -> Figure:
        """Draws the speed of each method, with intervals.

        Args:
            path: where to save the plot, in the format that its suffix names, e.g. ``speed.png``.

        Returns:
            The figure, which is not shown and not registered with pyplot.

        Raises:
            SettingError: matplotlib is not installed, or ``path`` cannot be written.
            ValueError: matplotlib does not know the format.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise SettingError(
                "Comparison.plot draws with matplotlib, which could not be imported. Run `pip install matplotlib`, or "
                "print the comparison instead."
            ) from error
        methods = sorted(self.results["methods"], key=_value)
        figure = Figure(figsize=(8, 1.1 + 0.36 * len(methods)), layout="constrained")
        axes, ends = figure.subplots(), [1.0]
        for place, method in enumerate(methods):
            theirs = _PLAINS_COLOUR if method["name"] in (PLAIN, LAYERS) else _THEIR_COLOUR
            end = value = _value(method)
            axes.barh(place, value, color=_OUR_COLOUR if method["is_ours"] else theirs, height=0.72)
            low, high = method["speedup"]["low"], method["speedup"]["high"]
            if low is not None and method["name"] != PLAIN:
                axes.errorbar(value, place, xerr=[[value - low], [high - value]], color="black", capsize=3, linewidth=1)
                end = max(value, high)
            axes.annotate(f"{value:.2f}", (end, place), (6, 0), textcoords="offset points", va="center")
            ends.append(end)
        axes.set_yticks(range(len(methods)), [shorten(method["name"], _LONGEST, placeholder="…") for method in methods])
        axes.set(xlim=(0, 1.15 * max(ends)), xlabel="speed, plain generate = 1 (whiskers: 95 % interval)")
        axes.axvline(1, color="black", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        if path is not None:
            with reported(path):
                figure.savefig(path_of(path), dpi=_DPI)
        return figure

    def save(self, folder: StrPath) -> None:
        """Writes ``results.json``, and ``report.md`` with a picture where there is matplotlib.

        Raises:
            SettingError: the folder cannot be written.
        """
        check_folder("the folder of results", folder)
        directory, picture = path_of(folder), "![Speed of each method](speed.png)\n\n"
        with reported(directory):
            directory.mkdir(parents=True, exist_ok=True)
        try:
            self.plot(directory / "speed.png")
        except SettingError:  # there is no matplotlib
            picture = ""
        texts = {
            "results.json": json.dumps(self.results, indent=1, allow_nan=False) + "\n",
            "report.md": f"# Does self-speculation pay here?\n\n{picture}```\n{self}\n```\n",
        }
        for name, text in texts.items():
            with reported(directory / name), written_whole(directory / name) as unfinished:
                unfinished.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        left_out = [f"Not measured: {name}, since {why}." for name, why in self.results["left_out"].items()]
        about = ", ".join(f"{name} {value}" for name, value in self.results["about"].items())
        return "\n".join([self._table(), "", *self._verdict(), "", _NOTE, *left_out, about])

    def _table(self) -> str:
        """A row for each method, with a column for each kind of prompts where there are several."""
        methods = self.results["methods"]
        kinds = list(methods[0]["by_kind"]) if len(methods[0]["by_kind"]) > 1 else []
        head = ["method", "speed-up", "95 % interval", "drafts alone", "tokens/s", "tokens a round", "accepted"]
        rows = []
        for method in methods:
            numbers = [(method["drafts_alone"], ".2f"), (method["tokens_per_second"], ".1f")]
            numbers += [(method["tokens_a_round"], ".2f"), (method["acceptance_rate"], ".0%")]
            rows.append(
                [
                    method["name"],
                    f"{_value(method):.2f}",
                    _interval(method["speedup"]),
                    *(_NOTHING if number is None else format(number, form) for number, form in numbers),
                    _NOTHING if method["equal_ids"] is None else f"{method['equal_ids']}/{method['texts']}",
                    *(f"{method['by_kind'][kind]['value']:.2f}" for kind in kinds),
                ]
            )
        return as_text([*head, "same ids", *kinds], rows)

    def _verdict(self) -> list[str]:
        """Whether self-speculation pays, and which methods do not count."""
        best = next(method for method in self.results["methods"] if method["name"] == self.best)
        headline, low = f"{self.best} is {_value(best):.2f} times as fast as plain generate", best["speedup"]["low"]
        if self.best == PLAIN:
            headline = "Nothing that writes the model's own text is faster than plain generate here."
        elif low is None:
            headline += f", but {self.results['prompts']} prompts are too few for an interval: give more."
        elif low <= 1:
            headline += f", which may be chance (95 %: {_interval(best['speedup'])})."
        else:
            headline += f" (95 %: {_interval(best['speedup'])})."
        wrong = [method["name"] for method in self.results["methods"] if not _is_exact(method)]
        return [headline, *(f"{name} does not count: it does not write the model's own text." for name in wrong)]


def _value(method: Json) -> float:
    return float(method["speedup"]["value"])


def _interval(estimate: Json) -> str:
    return _NOTHING if estimate["low"] is None else f"{estimate['low']:.2f} to {estimate['high']:.2f}"
