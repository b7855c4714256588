"""Which of two ways to make the same forward is faster, by times of both."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

Result = TypeVar("Result")

# Times of each way before one is chosen; what disturbs a time makes it longer, so the shortest counts.
_TIMES = 3


class Faster:
    """Takes two ways in turn until their times tell which is faster, and that one from then on.

    It stays with its choice, so that equal calls have equal results as long as the process lives.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self.is_first: bool | None = None

    def run(self, first: Callable[[], Result], second: Callable[[], Result]) -> Result:
        """The result of one of the ways; where both take as long it is the first one's."""
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
