"""What commands print besides their results: one line for an error or a warning, progress on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAM = "hf-selfspec"


def tell(message: object) -> None:
    """One line on stderr, whatever the message was."""
    print(f"{PROGRAM}: {' '.join(str(message).split())}", file=sys.stderr)


@contextmanager
def brief_warnings() -> Iterator[None]:
    """Warnings without the lines of code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: tell(message)
        yield
