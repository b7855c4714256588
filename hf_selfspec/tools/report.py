"""The report: conclusions and tables of what was measured, as text and as Markdown with pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from .methods import COMPILED_GROUP, LAYERS, LOOKUP_GROUP, OURS_GROUP, PLAIN, PLAIN_GROUP
from .plots import new_figure
from .results import FEWEST, Json
from .tables import as_text

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
_NOTHING = "–"
_OF_ALL = (
    "Speed-up: mean of the prompts' tokens per second over plain generate's (Spec-Bench's protocol), whole calls. By "
    "totals: all tokens over all seconds. Decoding: after the first token. Tokens a round: with the bonus token."
)
_OF_DRAFTS = "By position: how often a token was kept if those before it were; an ended draft counts as not kept."
_OF_FIRST = (
    "The first prompt of the stream, which the figures above leave out if the stream runs once; they also leave out "
    "prompts at which a run was restarted."
)


class Table(NamedTuple):
    """A table with a title, a note on its columns, and the row to mark, if any."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None

    def markdown(self) -> str:
        rows = [[cell.replace("|", "/") for cell in row] for row in self.rows]
        if self.best is not None:
            rows[self.best] = [cell and f"**{cell}**" for cell in rows[self.best]]
        return as_text(self.head, rows, markdown=True)

    def text(self) -> str:
        return as_text(self.head, self.rows)


class Verdict(NamedTuple):
    """A conclusion in one sentence, further ones, and the fastest method's call of ``generate`` if it pays."""

    headline: str
    details: Sequence[str]
    call: str


def title(condition: Json) -> str:
    """The name of the condition."""
    temperature = condition["temperature"]
    return f"{f'temperature {temperature:g}' if temperature else 'greedy'}, batch {condition['batch_size']}"


def verdict(condition: Json) -> Verdict:
    """Returns whether self-speculation pays under a condition."""
    methods = {method["name"]: method for method in condition["methods"]}
    best = methods.pop(condition["best"])
    is_plain, speedup = best["name"] == PLAIN, best["whole"]["ratio_of_means"]
    lossless = sorted((method for method in methods.values() if method["is_lossless"]), key=_value, reverse=True)
    rivals = {"The fastest SelfSpec": OURS_GROUP, "The best setting of prompt lookup": LOOKUP_GROUP}
    details = []
    for what, group in rivals.items():
        rival = next((method for method in lossless if method["group"] == group != best["group"]), None)
        if rival is not None:
            details.append(f"{what}, {rival['name']}, runs at {_value(rival):.2f} times the speed of plain generate.")
    if best["group"] == OURS_GROUP and LAYERS in methods and (layers := _value(methods[LAYERS])):
        alone = f"drafts alone {_value(best) / layers:.2f} and its linear layers, of plain generate too, {layers:.2f}"
        details.append(f"Of that, {alone}.")
    low = None if is_plain else speedup["low"]
    close = [method for method in lossless if low is not None and method["name"] != PLAIN and _value(method) >= low]
    if close:
        names = ", ".join(map(_with_value, close))
        details.append(f"These prompts do not distinguish its speed from that of {names}.")
    if best["equal_ids"] is not None and not is_plain:
        near_ties = "; where they differ, both tokens' logits are within rounding of the model's highest"
        near_ties = near_ties if best["equal_ids"]["differences"] else ""
        details.append(f"The ids of {best['name']} are plain generate's in {_equal(best)}{near_ties}.")
    lossy = [method for method in methods.values() if not method["is_lossless"] and _value(method) > _value(best)]
    for method in lossy:
        where = "" if method["equal_ids"] is None else f" (the ids are the same in {_equal(method)})"
        details.append(f"{_with_value(method)} does not count: it does not write the model's own text{where}.")
    count = condition["prompts"]
    if count < FEWEST:
        counted = "1 prompt counts" if count == 1 else f"{count} prompts count"
        details.append(f"Only {counted}, too few for an interval: give more.")
    fastest = f"the fastest, {best['name']}, runs at {speedup['value']:.2f} times the speed of plain generate"
    if is_plain:
        which = "No method that writes the model's own text" if lossy else "Nothing that was measured"
        return Verdict(f"{which} is faster than plain generate here.", details, "")
    if low is None:
        return Verdict(f"Too few prompts to call it a gain: {fastest}.", details, "")
    if low <= 1:
        return Verdict(f"No clear gain: {fastest} ({_interval(speedup)}).", details, "")
    speeds = [method["output_token_throughput"]["value"] for method in (best, methods[PLAIN])]
    interval = f"{speedup['value']:.2f} times as fast as plain generate (95 % interval {_interval(speedup)})"
    headline = f"{best['name']} is {interval}: {speeds[0]:.1f} tokens per second instead of {speeds[1]:.1f}."
    imported = "from hf_selfspec import SelfSpec\n" if "SelfSpec" in best["call"] else ""
    return Verdict(headline, details, f"{imported}model.generate(**inputs, {best['call']})")


def _value(method: Json) -> float:
    return 0.0 if method["whole"] is None else float(method["whole"]["ratio_of_means"]["value"])


def _with_value(method: Json) -> str:
    return f"{method['name']} ({_value(method):.2f})"


def _equal(method: Json) -> str:
    return f"{method['equal_ids']['equal']} of {method['equal_ids']['texts']} texts"


def _interval(estimate: Json) -> str:
    return "" if estimate["low"] is None else f"{estimate['low']:.2f} to {estimate['high']:.2f}"


# Columns of tables with a row for each method: where the figure stands in the results, and its format.
_ALL = {
    "speed-up": ("whole.ratio_of_means.value", ".2f"),
    "95 % interval": ("whole.ratio_of_means", "interval"),
    "by totals": ("whole.ratio_of_totals.value", ".2f"),
    "decoding": ("decode.ratio_of_means.value", ".2f"),
    "tokens/s": ("output_token_throughput.value", ".1f"),
    "tokens a round": ("acceptance.mean_acceptance_length", ".2f"),
    "accepted": ("acceptance.draft_acceptance_rate", ".0%"),
    "same ids": ("equal_ids", "of"),
}
_DRAFTS = {
    "rounds": ("acceptance.num_rounds", "d"),
    "drafted": ("acceptance.num_draft_tokens", "d"),
    "kept": ("acceptance.num_accepted_tokens", "d"),
    "by position": ("acceptance.conditional_acceptance", "list"),
}
_LATENCY = {
    **{name: (name, "ms") for name in ("time_to_first_token", "inter_token_latency", "request_latency")},
    "output_sequence_length": ("output_sequence_length", ".0f"),
}
_FIRST = {
    "seconds": ("first_call.request_latency", ".2f"),
    "speed-up there": ("first_call.ratio", ".2f"),
}
_FORMS: dict[str, Callable[[Any], str]] = {
    "interval": _interval,
    "of": lambda equal: f"{equal['equal']}/{equal['texts']}",
    "list": lambda shares: " ".join(f"{share:.2f}" for share in shares[:8]),
    "ms": lambda seconds: f"{1e3 * seconds:.1f}",
    "MiB": lambda size: f"{size / 2**20:,.0f}",
}


def condition_tables(condition: Json) -> list[Table]:
    """All tables of one condition."""
    methods = condition["methods"]
    drafting = [method for method in methods if method["acceptance"]]
    tables = [
        main_table(condition),
        _by_group("Speed-up by kind of prompt", methods, "by_kind"),
        _by_group("Texts that repeat themselves, and others", methods, "by_looping"),
        _by_method("Drafts", _OF_DRAFTS, drafting, _DRAFTS),
        _by_method("Latency", "Means in milliseconds.", methods, _LATENCY),
        _by_method("First calls", _OF_FIRST, methods, _FIRST),
        _differences(methods),
    ]
    return [table for table in tables if table.rows]


def main_table(condition: Json) -> Table:
    """A row for each method, with the peak memory where the device reports it."""
    methods = condition["methods"]
    has_memory = any(method["peak_memory_bytes"] for method in methods)
    columns = {**_ALL, "peak MiB": ("peak_memory_bytes", "MiB")} if has_memory else _ALL
    best = [method["name"] for method in methods].index(condition["best"])
    return _by_method("All methods", _OF_ALL, methods, columns)._replace(best=best)


def _by_method(title: str, note: str, methods: Sequence[Json], columns: Mapping[str, tuple[str, str]]) -> Table:
    rows = [[method["name"], *(_cell(method, *column) for column in columns.values())] for method in methods]
    return Table(title, note, ["method", *columns], rows)


def _cell(method: Json, path: str, form: str) -> str:
    value: Any = method
    for name in path.split("."):
        value = None if value is None else value[name]
    if value is None:
        return _NOTHING
    return _FORMS[form](value) if form in _FORMS else format(value, form)


def _by_group(title: str, methods: Sequence[Json], groups: str) -> Table:
    plain, *others = methods
    rows = []
    for group, figures in plain[groups].items():
        ratios = [_cell(method[groups][group], "decode.ratio_of_means.value", ".2f") for method in others]
        rows.append([group, str(figures["prompts"]), *ratios])
    head = ["kind", "prompts", *(method["name"] for method in others)]
    return Table(title, "Decoding, ratio of means.", head, rows)


def _differences(methods: Sequence[Json]) -> Table:
    rows = []
    for method in methods:
        for difference in (method["equal_ids"] or {}).get("differences", ()):
            place = [str(difference[name]) for name in ("prompt", "row", "position")]
            is_near = "yes" if difference["near_tie"] else "no"
            rows.append([method["name"], *place, f"{difference['margin']:.2g}", is_near])
    note = "Where ids differ from plain generate's, and how far the lower token's logit is below the model's highest."
    head = ["method", "prompt", "row", "new token", "gap to the highest", "within rounding"]
    return Table("Texts that differ", note, head, rows)


def last_tables(results: Json) -> list[Table]:
    """Methods that were not measured; model, machine, versions and settings."""
    left_out = Table("Not measured", "", ["method", "why"], list(results["left_out"].items()))
    rows = [[name, _shown(value)] for part in ("about", "settings") for name, value in results[part].items()]
    about = Table("Model, machine and settings", "", ["what", "value"], rows)
    return [left_out, about] if left_out.rows else [about]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(entry)}" for name, entry in value.items()) or _NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or _NOTHING
    return _NOTHING if value is None else str(value)


def markdown(results: Json, pictures: Sequence[str] = ()) -> str:
    """Returns the whole report as Markdown, with the names of a picture for each condition."""
    parts = [f"# {_TITLE}", _subject(results)]
    for index, condition in enumerate(results["conditions"]):
        conclusion = verdict(condition)
        parts += [f"## {title(condition)}", f"**{conclusion.headline}**", *conclusion.details]
        parts += [f"```python\n{conclusion.call}\n```"] if conclusion.call else []
        parts += [f"![Speed of each method, plain generate = 1]({name})" for name in pictures[index : index + 1]]
        parts += [f"### {table.title}\n\n{table.note}\n\n{table.markdown()}" for table in condition_tables(condition)]
    parts += [f"### {table.title}\n\n{table.markdown()}" for table in last_tables(results)]
    parts += [] if pictures else ['Plots need matplotlib: pip install "hf_selfspec[plot]".']
    return "\n\n".join(parts) + "\n"


def _subject(results: Json) -> str:
    about, settings, first = results["about"], results["settings"], results["conditions"][0]
    return (
        f"{about['model']} in {about['dtype']} on {about['machine']}; {first['prompts']} prompts "
        f"({', '.join(first['kinds'])}), up to {settings['max_new_tokens']} new tokens, {settings['clock']} time."
    )


def speedups(condition: Json) -> Figure:
    """Draws a bar for each method with its interval, and a line at plain generate."""
    timed = [method for method in condition["methods"] if method["whole"] is not None]
    methods = sorted(timed, key=_value, reverse=True)
    figure = new_figure("Comparison.plot", 8, 1.1 + 0.36 * len(methods))
    axes, ends = figure.subplots(), [1.0]
    for place, method in enumerate(methods):
        (colour, hatch), speedup = _STYLES[method["group"]], method["whole"]["ratio_of_means"]
        end = value = speedup["value"]
        axes.barh(place, value, color=colour, hatch=hatch, edgecolor="white", height=0.72)
        if speedup["low"] is not None and method["name"] != PLAIN:
            errors = [[value - speedup["low"]], [speedup["high"] - value]]
            axes.errorbar(value, place, xerr=errors, color="black", capsize=3, linewidth=1)
            end = max(value, speedup["high"])
        axes.annotate(f"{value:.2f}", (end, place), (6, 0), textcoords="offset points", va="center")
        ends.append(end)
    axes.set_yticks(range(len(methods)), [shorten(method["name"], _LONGEST, placeholder="…") for method in methods])
    axes.set(xlim=(0, 1.15 * max(ends)), xlabel="speed, plain generate = 1 (whiskers: 95 % interval)")
    axes.set_title(title(condition), loc="left", fontsize="medium")
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure
