"""Draws the pictures of the README, for light and for dark pages.

    python examples/pictures.py [--results report/results.json] [--out examples/pictures]

The figures are those of ``benchmarks/results`` and of the demo model's card, or, with ``--results``, speeds by kind of
text from a file that ``hf-selfspec bench`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

EXAMPLES = Path(__file__).parent
RESULTS = EXAMPLES / "benchmarks" / "results"
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#818b98", "model": "#ddf4ff", "kept": "#aceebb", "wrong": "#ffcecb"},
    "dark": {"ink": "#f0f6fc", "faint": "#9198a1", "model": "#1f4a7a", "kept": "#196c2e", "wrong": "#8e1519"},
}
SERIES = ("#0969da", "#bc4c00", "#8250df")
Theme = dict[str, str]
# For each series of the second picture the speed-up of each kind of text.
Speeds = dict[str, dict[str, float]]


def how_it_works(theme: Theme) -> Figure:
    """One round: tokens are drafted, and one forward of the whole model verifies all of them."""
    figure = Figure(figsize=(8.6, 2.9))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 86), ylim=(0, 29))
    axes.axis("off")

    def box(x: float, y: float, width: float, text: str, fill: str, height: float = 4.4) -> None:
        shape = FancyBboxPatch(
            (x, y), width, height, "round,pad=0,rounding_size=0.7", lw=0.8, fc=fill, ec=theme["faint"]
        )
        axes.add_patch(shape)
        axes.text(x + width / 2, y + height / 2, text, color=theme["ink"], ha="center", va="center", size=9)

    def label(x: float, y: float, text: str, color: str = "ink", size: float = 9.5) -> None:
        axes.text(x, y, text, color=theme[color], va="center", size=size)

    words = ["def", "read", "(", "path", ")", ":"]
    label(1, 26.5, "plain generate")
    for place, word in enumerate(words):
        box(19 + 11 * place, 24.3, 10, f"forward → {word}", theme["model"])
    label(1, 17.2, "SelfSpec, draft")
    for place, word in enumerate(words[:4]):
        box(19 + 6.5 * place, 15, 5.5, word, theme["model"])
    box(19 + 6.5 * 4, 15, 5.5, "=", theme["model"])
    label(53, 18.4, "from earlier text, from the model's own logits,", "faint", 8.5)
    label(53, 15.9, "or from some of the model's own layers", "faint", 8.5)
    label(1, 10.2, "verification")
    box(19, 8, 31.5, "one forward of the whole model", theme["model"])
    label(53, 10.2, "all drafted tokens go through it at once", "faint", 8.5)
    label(1, 3.2, "text")
    for place, word in enumerate(words[:4]):
        box(19 + 6.5 * place, 1, 5.5, word, theme["kept"])
    box(19 + 6.5 * 4, 1, 5.5, ")", theme["model"])
    label(53, 4.4, "what the model would have chosen itself is kept;", "faint", 8.5)
    label(53, 1.9, "its own token takes the place of the first wrong one", "faint", 8.5)
    axes.plot([45.4, 50.2], [17.2, 17.2], color=theme["wrong"], lw=3)
    return figure


def speeds_by_kind(theme: Theme, speeds: Speeds, title: str) -> Figure:
    """A group of bars for each kind of text; 1 is plain generate."""
    figure = Figure(figsize=(8.6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    kinds = list(next(iter(speeds.values())))
    width = 0.8 / len(speeds)
    for number, (name, by_kind) in enumerate(speeds.items()):
        places = [place + (number - (len(speeds) - 1) / 2) * width for place in range(len(kinds))]
        bars = axes.bar(places, [by_kind[kind] for kind in kinds], width * 0.92, label=name, color=SERIES[number])
        axes.bar_label(bars, fmt="%.2f", size=7, color=theme["ink"], padding=1)
    axes.patch.set_visible(False)
    axes.margins(y=0.12)
    axes.axhline(1.0, color=theme["faint"], lw=1, ls="--")
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("times plain generate", color=theme["ink"])
    axes.set_title(title, color=theme["faint"], size=8.5, loc="left")
    axes.tick_params(colors=theme["ink"], labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme["faint"])
    axes.legend(frameon=False, labelcolor=theme["ink"], fontsize=9, ncols=len(speeds))
    return figure


def of_results(results: Path) -> tuple[Speeds, str]:
    """The speed-up of each method that bench has compared with plain generate, and how many prompts each kind has."""
    run = json.loads(results.read_text(encoding="utf-8"))
    methods = [method for method in run["methods"] if method["name"] != "plain"][: len(SERIES)]
    if len(run["about"]["prompts"]) < 2:
        raise SystemExit(f"{results} has one kind of prompts: give bench prompts with a column `kind`.")
    speeds = {method["name"]: values_of(method) for method in methods}
    prompts = ", ".join(f"{kind} {count}" for kind, count in run["about"]["prompts"].items())
    return speeds, f"whole calls; prompts: {prompts}"


def values_of(method: dict[str, Any]) -> dict[str, float]:
    return {kind: estimate["value"] for kind, estimate in method["by_kind"].items()}


def of_kinds() -> tuple[Speeds, str]:
    """The rows of the README's table by kind of text, or, where these have no kinds, the table in RESULTS.md."""
    runs = [json.loads(path.read_text(encoding="utf-8"))["bench"] for path in sorted(RESULTS.glob("speed-*.json"))]
    speeds = {run["about"]["dtype"]: values_of(run["methods"][1]) for run in runs if run["methods"][1]["by_kind"]}
    if speeds:
        prompts = ", ".join(f"{kind} {count}" for kind, count in runs[0]["about"]["prompts"].items())
        return speeds, f"SmolLM2-135M-Instruct, one CPU thread, whole calls; prompts: {prompts}"
    (table,) = json.loads((RESULTS / "kinds-of-text.json").read_text(encoding="utf-8"))["tables"]
    kinds = table["columns"][1:]
    speeds = {dtype: dict(zip(kinds, map(float, values), strict=True)) for dtype, *values in table["rows"]}
    return speeds, "SmolLM2-135M-Instruct, one CPU thread, decoding; 20 prompts a kind (summary: 8, chat: 19)"


def training(theme: Theme) -> Figure:
    """Loss, agreement and speed by exit: of the demo model, whose exits were trained, and of its twin."""
    card = (EXAMPLES / "demo_model" / "README.md").read_text(encoding="utf-8")
    rows = [
        [float(cell) for cell in row] for row in re.findall(r"^\| (\d+) \|" + r" ([\d.]+) \|" * 4, card, re.MULTILINE)
    ]
    layers, loss, agreement, twins_loss, twins_agreement = map(list, zip(*rows, strict=True))
    table = json.loads((RESULTS / "exits-by-layer.json").read_text(encoding="utf-8"))["tables"][0]["rows"]
    exits = [(int(row[0]), float(row[2])) for row in table if row[0] != "plain"]
    figure = Figure(figsize=(8.6, 2.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, title, ours, twins in zip(
        panels,
        ("loss, nats a token", "agreement with the last layer", "times plain generate"),
        ((layers, loss), (layers, agreement), tuple(zip(*exits, strict=True))),
        ((layers, twins_loss), (layers, twins_agreement), None),
        strict=True,
    ):
        axes.plot(*ours, color=SERIES[0], marker=".", label="trained exits")
        if twins is None:
            axes.axhline(1.0, color=theme["faint"], lw=1, ls="--", label="plain generate")
        else:
            axes.plot(*twins, color=SERIES[1], marker=".", label="twin without")
        axes.patch.set_visible(False)
        axes.set_title(title, color=theme["ink"], size=9, loc="left")
        axes.set_xlabel("exit layer", color=theme["ink"], size=8.5)
        axes.tick_params(colors=theme["ink"], labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme["faint"])
        axes.legend(frameon=False, labelcolor=theme["ink"], fontsize=8)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="results.json of hf-selfspec bench")
    parser.add_argument("--out", type=Path, default=EXAMPLES / "pictures")
    args = parser.parse_args(arguments)
    speeds, title = of_results(args.results) if args.results else of_kinds()
    pictures: dict[str, Callable[[Theme], Any]] = {
        "how": how_it_works,
        "kinds": lambda theme: speeds_by_kind(theme, speeds, title),
        "training": training,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    # Text stays text, and the same figures make the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_selfspec"}):
        for name, draw in pictures.items():
            for theme, colors in THEMES.items():
                path = args.out / f"{name}-{theme}.svg"
                draw(colors).savefig(path, transparent=True, metadata={"Date": None})
                print(path)


if __name__ == "__main__":
    main()
