"""What a model's layers and exits are worth."""

import io
from collections.abc import Sequence

import rich.box
import rich.table
from rich.console import Console


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False, right: bool = False) -> str:
    """Returns a table with aligned columns, or in Markdown; ``right`` aligns all but the first column on the right."""
    box = rich.box.MARKDOWN if markdown else None
    table = rich.table.Table(box=box, pad_edge=markdown, padding=(0, 1 if markdown else 2, 0, int(markdown)))
    for place, name in enumerate(head):
        table.add_column(name, no_wrap=True, justify="right" if right and place else "left")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=100_000, markup=False, emoji=False, highlight=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())
