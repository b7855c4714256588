"""Tables of what was measured, for any format of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .protocol import FEWEST
from .results import Json, estimate
from .ways import LOOKUP_GROUP, OURS_GROUP, PLAIN, PLAIN_GROUP

_NOTHING = "–"
_MIB = 2**20


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        title: title of the table.
        note: meaning of its columns.
        head, rows: cells.
        best: the row to mark, if any.
    """

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [f"### {self.title}", "", *([self.note, ""] if self.note else [])]
        lines += [f"| {' | '.join(self.head)} |", "|---" * len(self.head) + "|"]
        shown = [
            [f"**{cell}**" if index == self.best and cell else cell for cell in row]
            for index, row in enumerate(self.rows)
        ]
        return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in shown)])

    def text(self) -> str:
        """The table as plain text with aligned columns."""
        cells = [list(self.head), *map(list, self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.head))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a comparison.

    Attributes:
        headline: the conclusion in one sentence.
        details: further sentences.
        call: arguments of ``generate`` for the fastest way, empty if none is recommended.
    """

    headline: str
    details: Sequence[str]
    call: str


def title(condition: Json) -> str:
    """The name of the condition."""
    drawn = "greedy" if condition["temperature"] == 0 else f"temperature {condition['temperature']:g}"
    return f"{drawn}, batch {condition['batch_size']}"


def verdict(condition: Json) -> Verdict:
    """Returns whether self-speculation pays under a condition."""
    if not condition["ways"]:
        return Verdict("Nothing was measured yet.", [], "")
    ways = {way["name"]: way for way in condition["ways"]}
    best = ways[condition["best"]]
    others = [_compared(ways, name) for name in dict.fromkeys(_rivals(condition, ways)) if name != best["name"]]
    lossy = [_other_text(way) for way in ways.values() if _is_faster_otherwise(way, best)]
    details = [*filter(None, [*others, _as_fast(ways, best), _ids_of(best), *lossy, _few(condition)])]
    if best["name"] == PLAIN:
        which = "No way that writes the model's own text" if lossy else "Nothing that was measured"
        return Verdict(f"{which} is faster than plain generate here.", details, "")
    found = estimate(best["whole"]["ratio_of_means"])
    assert found is not None
    fastest = f"the fastest, {best['name']}, runs at {found.value:.2f} times the speed of plain generate"
    if found.low is None:
        return Verdict(f"Too few prompts to call it a gain: {fastest}.", details, "")
    if found.low <= 1:
        return Verdict(f"No clear gain: {fastest} ({found.interval}).", details, "")
    speeds = [ways[name]["output_token_throughput"]["value"] for name in (best["name"], PLAIN)]
    head = f"{best['name']} is {found.value:.2f} times as fast as plain generate (95 % interval {found.interval}): "
    return Verdict(f"{head}{speeds[0]:.1f} tokens per second instead of {speeds[1]:.1f}.", details, best["call"])


def _is_faster_otherwise(way: Json, best: Json) -> bool:
    """Whether a way is faster than the best one, but writes another text."""
    if way["is_lossless"] or way["whole"] is None:
        return False
    return bool(way["whole"]["ratio_of_means"]["value"] > best["whole"]["ratio_of_means"]["value"])


def _other_text(way: Json) -> str:
    equal = way["equal_ids"]
    where = "" if equal is None else f" (the ids are the same in {equal['equal']} of {equal['texts']} texts)"
    return f"{way['name']} ({_ratio(way['whole'])}) does not count: it does not write the model's own text{where}."


def _as_fast(ways: Mapping[str, Json], best: Json) -> str:
    """Ways whose speed these prompts cannot distinguish from the fastest one's."""
    found = estimate(best["whole"]["ratio_of_means"])
    if found is None or found.low is None or best["name"] == PLAIN:
        return ""
    close = [
        f"{name} ({_ratio(way['whole'])})"
        for name, way in ways.items()
        if name not in (best["name"], PLAIN) and way["whole"] and way["is_lossless"]
        if way["whole"]["ratio_of_means"]["value"] >= found.low
    ]
    return f"These prompts do not distinguish its speed from that of {', '.join(close)}." if close else ""


def _rivals(condition: Json, ways: Mapping[str, Json]) -> list[str]:
    """The fastest ``SelfSpec`` and the best setting of prompt lookup."""
    known = [way for way in ways.values() if way["whole"] is not None and way["is_lossless"]]
    mine = [way for way in known if way["group"] == OURS_GROUP]
    best = max(mine, key=lambda way: way["whole"]["ratio_of_means"]["value"])["name"] if mine else None
    return [name for name in (best, condition["best_prompt_lookup"]) if name is not None]


def _compared(ways: Mapping[str, Json], name: str) -> str:
    what = "The best setting of prompt lookup" if ways[name]["group"] == LOOKUP_GROUP else "The fastest SelfSpec"
    return f"{what}, {name}, runs at {_ratio(ways[name]['whole'])} times the speed of plain generate."


def _ids_of(way: Json) -> str:
    equal = way["equal_ids"]
    if equal is None or way["group"] == PLAIN_GROUP:
        return ""
    said = f"The ids of {way['name']} are plain generate's in {equal['equal']} of {equal['texts']} texts"
    if not equal["parted"]:
        return f"{said}."
    return f"{said}; where they differ, both tokens' logits are within rounding of the model's highest."


def _few(condition: Json) -> str:
    if condition["prompts"] >= FEWEST:
        return ""
    what = "1 prompt counts" if condition["prompts"] == 1 else f"{condition['prompts']} prompts count"
    return f"Only {what}, too few for an interval: give more."


def condition_tables(condition: Json) -> list[Table]:
    """All tables of one condition."""
    if not condition["ways"]:
        return []
    found = [main_table(condition), _kinds(condition, "by_kind", "Speed-up by kind of prompt")]
    found += [_kinds(condition, "by_looping", "Texts that repeat themselves, and others"), _acceptance(condition)]
    found += [_latencies(condition), _first_calls(condition), _clocks(condition), _parted(condition)]
    return [table for table in found if table is not None and table.rows]


def main_table(condition: Json) -> Table:
    """A row for each way."""
    has_memory = any(way["peak_memory_bytes"] is not None for way in condition["ways"])
    rows = []
    for way in condition["ways"]:
        means = estimate(way["whole"] and way["whole"]["ratio_of_means"])
        kept, equal, speed = way["acceptance"], way["equal_ids"], way["output_token_throughput"]
        cells = [
            way["name"],
            _NOTHING if means is None else f"{means.value:.2f}",
            means.interval if means is not None and way["name"] != PLAIN else "",
            _ratio(way["whole"], "ratio_of_totals"),
            _ratio(way["decode"]),
            _number(speed and speed["value"], ".1f"),
            _number(kept and kept["mean_acceptance_length"], ".2f"),
            _number(kept and kept["draft_acceptance_rate"], ".0%"),
            f"{equal['equal']}/{equal['texts']}" if equal else _NOTHING,
        ]
        memory = [_number(way["peak_memory_bytes"] and way["peak_memory_bytes"] / _MIB, ",.0f")] if has_memory else []
        rows.append(cells + memory)
    names = [way["name"] for way in condition["ways"]]
    head = ["way", "speed-up", "95 % interval", "by totals", "decoding", "tokens/s", "tokens a round", "accepted"]
    note = (
        "Speed-up: mean of the prompts' tokens per second over plain generate's (Spec-Bench's protocol), whole calls. "
        "By totals: all tokens over all seconds. Decoding: after the first token. Tokens a round: "
        "mean_acceptance_length, with the bonus token."
    )
    head += ["same ids", *(["peak MiB"] if has_memory else [])]
    note += "" if has_memory else " Peak memory was not measured (on a CPU --memory measures it)."
    return Table("All ways", note, head, rows, names.index(condition["best"]))


def _kinds(condition: Json, groups: str, heading: str) -> Table | None:
    plain = next(way for way in condition["ways"] if way["name"] == PLAIN)
    kinds = list(plain[groups])
    if not kinds:
        return None
    ways = [way for way in condition["ways"] if way["name"] != PLAIN]
    rows = [
        [kind, str(plain[groups][kind]["prompts"]), *(_ratio(way[groups][kind]["decode"]) for way in ways)]
        for kind in kinds
    ]
    return Table(heading, "Decoding, ratio of means.", ["kind", "prompts", *(way["name"] for way in ways)], rows)


def _acceptance(condition: Json) -> Table:
    rows = []
    for way in condition["ways"]:
        kept = way["acceptance"]
        if kept is not None:
            places = " ".join(f"{share:.2f}" for share in kept["conditional_acceptance"][:8])
            counts = _number(kept["num_draft_tokens"], "d"), str(kept["num_accepted_tokens"])
            free = _number(kept["simulated_free_verification"], ".2f")
            rows.append([way["name"], str(kept["num_rounds"]), *counts, places or _NOTHING, free])
    note = (
        "By position: how often a drafted token was kept if those before it were (a draft that had ended counts as not "
        "kept). If verification were free: tokens a round if a forward over up to 32 tokens cost as much as one over "
        "one token, simulated from the rounds."
    )
    return Table("Drafts", note, ["way", "rounds", "drafted", "kept", "by position", "if verification were free"], rows)


def _latencies(condition: Json) -> Table:
    names = ("time_to_first_token", "inter_token_latency", "request_latency")
    rows = []
    for way in condition["ways"]:
        milliseconds = [_number(way[name] and 1e3 * way[name], ".1f") for name in names]
        rows.append([way["name"], *milliseconds, _number(way["output_sequence_length"], ".0f")])
    return Table("Latency", "Means in milliseconds.", ["way", *names, "output_sequence_length"], rows)


def _first_calls(condition: Json) -> Table:
    rows = []
    for way in condition["ways"]:
        first = way["first_call"]
        if first is None:
            continue
        graphs = (
            f"{way['compiled_graphs']} in {way['calls_with_compiling']} calls" if way["compiled_graphs"] else "none"
        )
        fresh = [one["ratio"] for one in way["fresh_calls"]]
        anew = f"{sum(fresh) / len(fresh):.2f} ({len(fresh)} calls)" if fresh else _NOTHING
        rows.append([way["name"], f"{first['request_latency']:.2f}", f"{first['ratio']:.2f}", anew, graphs])
    note = (
        "The first prompt of the stream, which the figures above leave out if the stream runs once; they also leave "
        "out prompts at which a run was restarted. New SelfSpec: each prompt with a SelfSpec that knows nothing yet."
    )
    head = ["way", "seconds", "speed-up there", "speed-up, new SelfSpec", "graphs compiled"]
    return Table("First calls", note, head, rows)


def _clocks(condition: Json) -> Table:
    rows = [[way["name"], _ratio(way["whole_wall"]), _ratio(way["whole_cpu"])] for way in condition["ways"]]
    note = "The same ratios by wall time and by the CPU time of the process; they are far apart on a disturbed machine."
    return Table("Two clocks", note, ["way", "wall", "CPU time"], rows)


def _parted(condition: Json) -> Table:
    rows = []
    for way in condition["ways"]:
        for one in (way["equal_ids"] or {}).get("parted", ()):
            place = [str(one[name]) for name in ("prompt", "row", "position")]
            rows.append([way["name"], *place, f"{one['margin']:.2g}", "yes" if one["near_tie"] else "no"])
    note = "Where ids differ from plain generate's, and how far the lower token's logit is below the model's highest."
    head = ["way", "prompt", "row", "new token", "gap to the highest", "within rounding"]
    return Table("Texts that differ", note, head, rows)


def cost_table(costs: Json | None) -> Table | None:
    """Times of forwards over several tokens, relative to forwards over one."""
    if costs is None:
        return None
    counts = list(costs["ours"])
    rows = [[whose, *(f"{costs[whose][count]:.2f}" for count in counts)] for whose in ("transformers", "ours")]
    note = f"verify(n)/verify(1) after {costs['context']} tokens, each relative to its own forward over one token."
    return Table("Cost of verifying n tokens", note, ["forwards", *counts], rows)


def left_out_table(results: Json) -> Table | None:
    """Ways that were not measured."""
    rows = [[one["name"], one["why"]] for one in results["left_out"]]
    return Table("Not measured", "", ["way", "why"], rows) if rows else None


def about_table(results: Json) -> Table:
    """Model, machine, versions and settings."""
    rows = [[name, _shown(value)] for part in ("about", "settings") for name, value in results[part].items()]
    return Table("Model, machine and settings", "", ["", ""], rows)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items()) or _NOTHING
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or _NOTHING
    return _NOTHING if value is None else str(value)


def _ratio(found: Json | None, what: str = "ratio_of_means") -> str:
    return _NOTHING if found is None else f"{found[what]['value']:.2f}"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
