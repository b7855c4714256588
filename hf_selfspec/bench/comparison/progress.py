"""The progress of a comparison, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Progress(Protocol):
    """Shows the progress of calls."""

    def advance(self, what: str) -> None:
        """Counts one more call; ``what`` describes it."""


class Silence:
    """Shows nothing."""

    def advance(self, what: str) -> None:
        """Does nothing."""


@contextmanager
def shown(total: int, done: int, wanted: bool) -> Iterator[Progress]:
    """Shows a bar with the time left, if it is wanted.

    Args:
        total: number of calls in all.
        done: number of calls of an earlier run.
        wanted: whether a bar is shown.
    """
    if not wanted:
        yield Silence()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Bars(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bars:
        yield _Bar(bars, bars.add_task("", total=total, completed=done))


class _Bar:
    def __init__(self, bars: Bars, task: TaskID) -> None:
        self.bars, self.task = bars, task

    def advance(self, what: str) -> None:
        self.bars.update(self.task, advance=1, description=what)
