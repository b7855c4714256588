"""What a round costs by its number of drafted tokens, measured on the rounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

# Numbers of drafted tokens of a row for which the time of a round is kept; other numbers cost as much as the next
# larger one. The cost of a verification is a staircase: kernels for 1, 2, 3, 4, 8, 16 and 32 tokens differ.
SIZES = (0, 1, 2, 3, 7, 15, 31)
# First guesses of the time of a forward by its number of tokens of all rows, in units of a forward over one. On a CPU:
# SmolLM2-135M, float32, one thread of an AMD EPYC; elsewhere a forward is bound by reading its weights from memory,
# until there are many tokens.
_TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 4096)
_ON_CPU = (1.0, 1.3, 1.5, 1.65, 2.0, 2.2, 3.2, 6.4, 410.0)
_ELSEWHERE = (1.0, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.3, 20.0)
# How much more further tokens add in batches, whose rows have different lengths: on 4 rows of SmolLM2, rounds with one
# and three drafted tokens took 1.39 to 1.88 times as long as one without a draft; token counts predict 1.21 and 1.33.
_IN_BATCHES = 2.0
# How many times are kept for each size, and rounds between two looks at them. Disturbances only make a time longer, so
# the lower quartile counts; the first guess enters like one more measured time.
_KEPT, _REFRESHED = 9, 8
# Plain rounds that are timed before anything is compared with them. After so many rounds one time of each size is
# dropped, so that plain rounds are timed again, and a size that seemed too dear is tried again eventually.
_PLAIN, _STALE = 3, 128


class CostCurve:
    """Times of rounds for one model on one device, batch size and range of context.

    Attributes:
        seconds: of a round with 0, 1, 2, ... free drafted tokens of a row, the work for these included.
        plain: seconds of a round in which nothing is done but to generate, which takes no longer than an empty draft.
        is_measured: whether these are seconds: before rounds were timed, and in a frozen curve, only ratios count.
    """

    def __init__(self, on_cpu: bool, rows: int = 1, is_frozen: bool = False, similar: CostCurve | None = None) -> None:
        guess = np.interp([rows * (size + 1) for size in SIZES], _TOKENS, _ON_CPU if on_cpu else _ELSEWHERE)
        guess += (_IN_BATCHES - 1.0) * (guess - guess[0]) * (rows > 1)
        self._guess: list[float] = guess.tolist()
        self._is_frozen = is_frozen
        self._rounds = 0
        # Times over the guesses, of plain rounds and of each size. After those of a similar curve kernels are warm, so
        # that the first round, which does not count, is over.
        self._plain: deque[float] = deque([math.inf] if similar else [], _PLAIN)
        self._times: list[deque[float]] = [
            deque([math.inf, _lower_quartile(theirs)] if len(theirs) > 1 else [], _KEPT)
            for theirs in (similar._times if similar else [()] * len(SIZES))
        ]
        self._measure()

    @property
    def wants_plain(self) -> bool:
        return len(self._plain) < _PLAIN and not self._is_frozen

    def add(self, drafted: int | None, seconds: float) -> None:
        """Records a round with so many drafted tokens, those above all sizes without its time; ``None`` for a plain
        round. The first one of a size, which selects and warms up kernels, counts from the second one on."""
        if self._is_frozen or seconds <= 0:  # or the system clock was set back
            return
        self._rounds += 1
        if self._rounds % _STALE == 0:
            for times in (self._plain, *self._times):
                if times:
                    times.popleft()
        if drafted is None or drafted <= SIZES[-1]:
            size = bisect_left(SIZES, drafted or 0)
            times = self._plain if drafted is None else self._times[size]
            times.append(seconds / self._guess[size])
            if len(times) <= _PLAIN or self._rounds % _REFRESHED == 0:
                self._measure()

    def _measure(self) -> None:
        plain, *ratios = [
            (len(times), _lower_quartile(times)) if len(times) > 1 else (0, 0.0)
            for times in (self._plain, *self._times)
        ]
        least = min([ratio for count, ratio in (plain, ratios[0]) if count], default=None)
        if not ratios[0][0]:
            ratios[0] = plain
        counted = sum(count for count, _ in ratios)
        self.is_measured = counted > 0
        # How much slower than the guesses this machine is; sizes with more times count more.
        scale = sum(count * ratio for count, ratio in ratios) / counted if counted else 1.0 / self._guess[0]
        steps = [
            guess * (count * ratio + scale) / (count + 1)
            for guess, (count, ratio) in zip(self._guess, ratios, strict=True)
        ]
        # More tokens never cost less, so where times contradict that, the shorter one counts.
        steps = list(accumulate(reversed(steps), min))[::-1]
        self.seconds = tuple(steps[bisect_left(SIZES, count)] for count in range(SIZES[-1] + 1))
        self.plain = self.seconds[0] if least is None else least * self._guess[0]


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]
