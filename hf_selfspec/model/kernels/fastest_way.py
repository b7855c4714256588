"""Which of several ways to compute the same thing is the fastest here: each is timed where it is needed."""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch

from ..transfer import wait_for

# How often each way is timed before one is chosen. Disturbances, and what libraries prepare in a first run, only make a
# time longer, so the shortest counts.
_TIMES = 3

Result = TypeVar("Result")


def device_clock(device: torch.device) -> Callable[[], float]:
    """Returns a clock that waits for a device, so that it measures more than launches there."""

    def settled() -> float:
        wait_for(device)
        return perf_counter()

    return perf_counter if device.type == "cpu" else settled


class FastestWay:
    """Chooses among ways by their times, once: equal calls then have equal results."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock  # returns seconds, once its device has done all its work
        self.seconds: list[list[float]] = []  # of each way
        self.chosen: int | None = None  # the place of the fastest way, ``None`` until it is known

    def of(self, *ways: Callable[[], Result]) -> Result:
        """Returns the result of the fastest way, or of one after the other until that is known."""
        if self.chosen is not None:
            return ways[self.chosen]()
        runs = [len(seconds) for seconds in self.seconds] or [0]
        result = self._timed(ways, runs.index(min(runs)))
        if min(map(len, self.seconds)) >= _TIMES:
            self.chosen = min(range(len(ways)), key=lambda place: min(self.seconds[place]))
        return result

    def results(self, *ways: Callable[[], Result]) -> list[Result]:
        """Returns the results of all ways, each timed."""
        return [self._timed(ways, place) for place in range(len(ways))]

    def _timed(self, ways: tuple[Callable[[], Result], ...], place: int) -> Result:
        self.seconds = self.seconds or [[] for _ in ways]
        begun = self.clock()
        result = ways[place]()
        self.seconds[place].append(self.clock() - begun)
        return result
