"""Chooses the faster of two ways to run the same forward, by timing both."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

Result = TypeVar("Result")

# Times of each way before one is chosen; disturbances only make a time longer, so the shortest counts.
_TIMES = 3


class Faster:
    """Alternates between two ways until their times show which is faster, then always uses that one.

    The choice is final, so that equal calls have equal results as long as the process lives.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self.is_first: bool | None = None

    def run(self, first: Callable[[], Result], second: Callable[[], Result]) -> Result:
        """Returns the result of one of the ways; if both take equally long, that of the first."""
        if self.is_first is not None:
            return first() if self.is_first else second()
        mine, other = self._seconds
        turn = first if len(mine) <= len(other) else second
        begun = self._clock()
        result = turn()
        (mine if turn is first else other).append(self._clock() - begun)
        if len(other) >= _TIMES:
            self.is_first = min(mine) <= min(other)
        return result

    @property
    def shortest(self) -> tuple[float, float]:
        """Seconds of both ways, after the choice."""
        return min(self._seconds[0]), min(self._seconds[1])
