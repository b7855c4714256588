"""Tables of reports as text."""

from collections.abc import Sequence


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """Returns a table with aligned columns; ``right`` aligns all but the first one on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    sides = [str.ljust, *[str.rjust if right else str.ljust] * (len(widths) - 1)]
    lines = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in (head, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)
