"""Tables as text."""

from collections.abc import Sequence


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """Returns a table with aligned columns; ``right`` aligns all but the first one on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        first, *others = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if right:
            others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)
