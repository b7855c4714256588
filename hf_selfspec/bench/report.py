"""The report as Markdown, and as one HTML page with plots that needs no other files, by ``report.html.jinja``."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from textwrap import shorten
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..reports.plots import new_figure
from .methods import COMPILED_GROUP, LOOKUP_GROUP, OURS_GROUP, PLAIN, PLAIN_GROUP
from .results import Json
from .tables import condition_tables, last_tables, title, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE = "Does self-speculation pay here?"
# Okabe and Ito's colours (Color Universal Design, 2008), distinct with any colour vision, and a hatch for print.
_STYLES = {
    PLAIN_GROUP: ("#999999", ""),
    LOOKUP_GROUP: ("#E69F00", "///"),
    COMPILED_GROUP: ("#CC79A7", "..."),
    OURS_GROUP: ("#0072B2", ""),
}
# The most characters of a method's name on an axis.
_LONGEST = 34


def markdown(results: Json) -> str:
    """Returns the whole report as Markdown."""
    parts = [f"# {_TITLE}", _subject(results)]
    for condition in results["conditions"]:
        found = verdict(condition)
        parts += [f"## {title(condition)}", f"**{found.headline}**", *found.details]
        parts += [f"```python\n{found.call}\n```"] if found.call else []
        parts += [f"### {table.title}\n\n{table.note}\n\n{table.markdown()}" for table in condition_tables(condition)]
    parts += [f"### {table.title}\n\n{table.markdown()}" for table in last_tables(results)]
    return "\n\n".join(parts) + "\n"


def html(results: Json, pictures: Mapping[str, bytes]) -> str:
    """Returns one HTML page with the plots in it, SVG files by name, which loads nothing."""
    loader = PackageLoader("hf_selfspec.bench")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("report.html.jinja").render(
        title=_TITLE,
        subject=_subject(results),
        conditions=[(title(one), verdict(one), condition_tables(one)) for one in results["conditions"]],
        last=last_tables(results),
        pictures={name: base64.b64encode(data).decode() for name, data in pictures.items()},
    )


def _subject(results: Json) -> str:
    about, settings, first = results["about"], results["settings"], results["conditions"][0]
    return (
        f"{about['model']} in {about['dtype']} on {about['machine']}; {first['prompts']} prompts "
        f"({', '.join(first['kinds'])}), up to {settings['max_new_tokens']} new tokens, {settings['clock']} time."
    )


def speedups(condition: Json) -> Figure:
    """Draws a bar for each method with its interval, and a line at plain generate."""
    known = [method for method in condition["methods"] if method["whole"] is not None]
    methods = sorted(known, key=lambda method: -method["whole"]["ratio_of_means"]["value"])
    figure = new_figure("Comparison.plot", 8, 1.1 + 0.36 * len(methods))
    axes = figure.subplots()
    for place, method in enumerate(methods):
        found = method["whole"]["ratio_of_means"]
        colour, hatch = _STYLES[method["group"]]
        axes.barh(place, found["value"], color=colour, hatch=hatch, edgecolor="white", height=0.72)
        end = found["value"]
        if found["low"] is not None and method["name"] != PLAIN:
            errors = [[end - found["low"]], [found["high"] - end]]
            axes.errorbar(end, place, xerr=errors, color="black", capsize=3, linewidth=1)
            end = max(end, found["high"])
        axes.annotate(f"{found['value']:.2f}", (end, place), (6, 0), textcoords="offset points", va="center")
    ends = [method["whole"]["ratio_of_means"] for method in methods]
    axes.set_yticks(range(len(methods)), [shorten(method["name"], _LONGEST, placeholder="…") for method in methods])
    axes.set(xlim=(0, 1.15 * max(1.0, *(end["high"] or end["value"] for end in ends))))
    axes.set_xlabel("speed, plain generate = 1 (whiskers: 95 % interval)")
    axes.set_title(title(condition), loc="left", fontsize="medium")
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def as_svg(figure: Figure) -> bytes:
    """Returns the plot as an SVG file."""
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
