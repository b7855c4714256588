"""Writes the tables of the README and of RESULTS from the files in ``results``, below their marks.

    python examples/benchmarks/tables.py

A file, which ``all.py`` writes, has the command that makes it, the day, the machine, and ``tables`` as a script printed
them, or ``bench``, what ``hf-selfspec bench`` found. In a document ``<!-- NAME -->`` stands above what is made of
NAME.json, ``<!-- speeds NAME* -->`` above a table with a row for each file, and ``<!-- kinds NAME* -->`` above one with
the kinds of text, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = tuple(Path(__file__).parents[2] / name for name in ("README.md", "examples/RESULTS.md"))
# A mark, the line about what follows, and the tables.
_MARKED = re.compile(r"(<!-- (?:(\w+) )?([\w*-]+) -->\n)(?:2.*\n\n)?(?:(?:\*\*.*:\n\n)?(?:\|.*\n)+\n?)*\n*")
_NOTHING = "–"
_KINDS = {"qa": "questions"}


def read(name: str) -> dict[str, Any]:
    """The one file of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows]) + "\n"


def tables_in(printed: str) -> list[dict[str, Any]]:
    """The Markdown tables of what a script printed, with the heading above each."""
    found: list[dict[str, Any]] = []
    title = ""
    for part in re.split(r"\n\s*\n", printed):
        lines = [line.strip() for line in part.strip().splitlines()]
        if lines and lines[0].startswith("#"):
            title = lines.pop(0).lstrip("# ")
        if len(lines) > 2 and all(line.startswith("|") for line in lines):
            columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            found.append({"title": title, "columns": columns, "rows": rows})
    return found


def estimate(speedup: dict[str, Any]) -> str:
    """A speed-up with its interval."""
    interval = "" if speedup["low"] is None else f" ({speedup['low']:.2f} to {speedup['high']:.2f})"
    return f"{speedup['value']:.2f}{interval}"


def of_bench(bench: dict[str, Any]) -> str:
    """A row for each method."""
    kinds = list(bench["methods"][0]["by_kind"])
    rows = []
    for method in bench["methods"][1:]:
        drafts = method["drafts_alone"]
        row = [f"`{method['name']}`", estimate(method["speedup"]), _NOTHING if drafts is None else f"{drafts:.2f}"]
        row += [_NOTHING if method["equal_ids"] is None else f"{method['equal_ids']}/{method['texts']}"]
        rows.append([*row, *(f"{method['by_kind'][kind]['value']:.2f}" for kind in kinds)])
    return markdown(["way", "whole calls", "drafts alone", "same ids", *(_KINDS.get(k, k) for k in kinds)], rows)


def of_file(result: dict[str, Any]) -> str:
    """The day, the machine and the command of a result, and its tables."""
    parts = [f"{result['day']}, {result['machine']}. `{result['command']}`\n"]
    if "bench" in result:
        parts.append(of_bench(result["bench"]))
    for table in result.get("tables", ()):
        if len(result["tables"]) > 1:
            parts.append(f"**{table['title']}**:\n")
        parts.append(markdown(table["columns"], table["rows"]))
    return "\n".join(parts)


def row_of(result: dict[str, Any], link: str, with_kinds: bool) -> list[str]:
    """Of one bench: dtype and machine, our speed-up, that of drafts alone, the best of transformers' own ways."""
    about, others = result["bench"]["about"], result["bench"]["methods"][1:]
    ours = next(method for method in others if method["name"] in ("SelfSpec()", "selfspec"))
    theirs = [each for each in others if not each["is_ours"] and each["name"] != "plain-linears"]
    best = max(theirs, key=lambda each: each["speedup"]["value"], default=None)
    whole = estimate(ours["speedup"])
    # Only float32 on a CPU has other linear layers; without these all of the gain is drafts.
    without = _NOTHING if about["dtype"] == "float32" else "the same"
    alone = f"{ours['drafts_alone']:.2f}" if ours["drafts_alone"] else without
    machine = re.sub(r"^([^,(]*?)(?: \(.*?torch uses (\w+)\))?,.*$", r"\1 \2", about["machine"]).strip()
    row = [f"[{about['dtype']}, {machine}]({link}), {result['day']}", whole]
    if with_kinds:
        row += [f"{kind['value']:.2f}" for kind in ours["by_kind"].values()]
        return [*row, f"{ours['equal_ids']}/{ours['texts']}"]
    named = _NOTHING if best is None else f"{estimate(best['speedup'])}, {best['name'].partition('(')[0]}"
    return [*row, alone, named, f"{result['bench']['prompts']}"]


def speeds(pattern: str, place: Path, with_kinds: bool = False) -> str:
    """A row for each file whose name matches, with a link from a document's place."""
    rows, kinds = [], list[str]()
    for path in sorted(RESULTS.glob(f"{pattern}.json")):
        result = read(path.stem)
        rows.append(row_of(result, path.relative_to(place).as_posix(), with_kinds))
        kinds = [_KINDS.get(kind, kind) for kind in result["bench"]["methods"][0]["by_kind"]]
    ours = ["whole calls", *kinds, "same ids"]
    if not with_kinds:
        ours = ["`SelfSpec()`, whole calls", "its drafts alone", "transformers' best", "prompts"]
    return markdown(["dtype, machine", *ours], rows)


def rendered(document: str, place: Path) -> str:
    """A document in a place, with what the results say now below its marks."""

    def below(match: re.Match[str]) -> str:
        mark, how, name = match.groups()
        return f"{mark}{of_file(read(name)) if how is None else speeds(name, place, how == 'kinds')}\n"

    return _MARKED.sub(below, document)


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(rendered(path.read_text(encoding="utf-8"), path.parent), encoding="utf-8")


if __name__ == "__main__":
    main()
