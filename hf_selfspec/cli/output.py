"""What commands print besides their results: one line for an error or a warning, progress on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PROGRAM = "hf-selfspec"


def tell(message: object) -> None:
    """Prints a message as one line on stderr."""
    print(f"{PROGRAM}: {' '.join(str(message).split())}", file=sys.stderr)


@contextmanager
def brief_warnings() -> Iterator[None]:
    """Shows warnings without the lines of code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: tell(message)
        yield


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows a bar with the time left on stderr, if that is a terminal; yields a function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
