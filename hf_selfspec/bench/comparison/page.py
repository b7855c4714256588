"""The report as Markdown, and as one HTML page that needs no other files."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape

from .results import Json
from .tables import (
    Table,
    Verdict,
    about_table,
    condition_tables,
    cost_table,
    left_out_table,
    title,
    verdict,
)

_TITLE = "Does self-speculation pay here?"
_ALT = {
    "speed-up": "Speed of each way, plain generate = 1",
    "by-kind": "Speed of decoding by kind of prompt",
    "acceptance": "Drafted tokens that are kept",
    "verify-cost": "Cost of verifying several tokens",
}
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .2rem; }
.verdict { border-left: .35rem solid #0072B2; background: #eef4f9; padding: .8rem 1.1rem; margin: 1rem 0; }
.verdict p { margin: .2rem 0; } .verdict .headline { font-size: 1.2rem; font-weight: 600; }
pre { background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto; margin: .6rem 0; }
.note { color: #444; font-size: .875rem; margin: .2rem 0 .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: right; vertical-align: top; }
th:first-child, td { white-space: nowrap; } .words td { white-space: normal; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
th { border-bottom: 2px solid #111; } tr.best td { font-weight: 700; background: #eef4f9; }
img { max-width: 100%; height: auto; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
@media print { details > * { display: block; } body { margin: 0; } }
"""


def markdown(results: Json) -> str:
    """Returns the whole report as Markdown."""
    parts = [f"# {_TITLE}", _subject(results)]
    for condition in results["conditions"]:
        found = verdict(condition)
        parts += [f"## {title(condition)[0].upper()}{title(condition)[1:]}", f"**{found.headline}**"]
        parts += [*found.details, *([f"```python\n{_call(found)}\n```"] if found.call else [])]
        parts += [table.markdown() for table in condition_tables(condition)]
    tables = (cost_table(results["verify_cost"]), left_out_table(results), about_table(results))
    return "\n\n".join([*parts, *(table.markdown() for table in tables if table is not None)]) + "\n"


def html(results: Json, pictures: Mapping[str, bytes]) -> str:
    """Returns one HTML page with the plots in it, which loads nothing.

    Args:
        results: what was measured.
        pictures: SVG files by name, none without matplotlib.
    """
    body = [f"<h1>{_TITLE}</h1>", f"<p>{escape(_subject(results))}</p>"]
    for index, condition in enumerate(results["conditions"]):
        body += _condition(index, condition, pictures)
    costs = cost_table(results["verify_cost"])
    if costs is not None:
        body += ["<h2>What the machine allows</h2>", _table(costs), _picture("verify-cost", "verify-cost", pictures)]
    tables = (left_out_table(results), about_table(results))
    body += ["<h2>Conditions</h2>", *(_table(table) for table in tables if table is not None)]
    if not pictures:
        body.append('<p class="note">Plots need matplotlib: pip install "hf_selfspec[plot]".</p>')
    head = f'<meta charset="utf-8"><title>{_TITLE}</title><style>{_STYLE}</style>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{viewport}{head}</head><body>\n{chr(10).join(body)}\n</body></html>\n'
    )


def _condition(index: int, condition: Json, pictures: Mapping[str, bytes]) -> list[str]:
    heading = title(condition)
    tables = condition_tables(condition)
    found = [f"<h2>{escape(heading[0].upper() + heading[1:])}</h2>", _verdict(verdict(condition))]
    found.append(_picture("speed-up", f"speed-up-{index}", pictures))
    found += [_table(table) for table in tables[:1]]
    found.append(_picture("by-kind", f"by-kind-{index}", pictures))
    details = [_picture("acceptance", f"acceptance-{index}", pictures), *(_table(table) for table in tables[1:])]
    found.append(
        "<details><summary>Kinds, drafts, latencies, first calls</summary>" + "\n".join(details) + "</details>"
    )
    return found


def _verdict(found: Verdict) -> str:
    lines = [f'<p class="headline">{escape(found.headline)}</p>', *(f"<p>{escape(line)}</p>" for line in found.details)]
    if found.call:
        lines.append(f"<pre><code>{escape(_call(found))}</code></pre>")
    return f'<div class="verdict">{"".join(lines)}</div>'


def _call(found: Verdict) -> str:
    imported = "from hf_selfspec import SelfSpec\n" if "SelfSpec" in found.call else ""
    return f"{imported}model.generate(**inputs, {found.call})"


def _subject(results: Json) -> str:
    about, settings = results["about"], results["settings"]
    count = results["conditions"][0]["prompts"] if results["conditions"] else 0
    kinds = ", ".join(results["conditions"][0]["kinds"]) if results["conditions"] else ""
    return (
        f"{about['model']} in {about['dtype']} on {about['machine']}; {count} prompts ({kinds}), up to "
        f"{settings['max_new_tokens']} new tokens, {'CPU time' if settings['clock'] == 'cpu' else 'wall-clock time'}."
    )


def _picture(kind: str, name: str, pictures: Mapping[str, bytes]) -> str:
    if name not in pictures:
        return ""
    data = base64.b64encode(pictures[name]).decode()
    return f'<p><img alt="{escape(_ALT[kind])}" src="data:image/svg+xml;base64,{data}"></p>'


def _table(table: Table) -> str:
    words = "" if table.head[0] == "way" and len(table.head) > 2 else ' class="words"'
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in table.head)}</tr>" if any(table.head) else ""
    rows = [
        f"<tr{' class=best' if index == table.best else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for index, row in enumerate(table.rows)
    ]
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"<h3>{escape(table.title)}</h3>{note}<div class=scroll><table{words}>{head}{''.join(rows)}</table></div>"
