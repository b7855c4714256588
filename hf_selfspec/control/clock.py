"""The cost of a round by its number of drafted tokens, and the speed of decoding, both measured on the rounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

from ..lookup import Pace, VerifyCosts

# Numbers of drafted tokens of a row for which the time of a round is kept; other numbers cost as much as the next
# larger one. The cost of a verification is a staircase: kernels for 1, 2, 3, 4, 8, 16 and 32 tokens differ.
SIZES = (0, 1, 2, 3, 7, 15, 31)
# First guesses of the time of a forward by its number of tokens of all rows, in units of a forward over one; further
# tokens add as much as the last ones. On a CPU: SmolLM2-135M, float32, one thread of an AMD EPYC; elsewhere a forward
# is bound by reading its weights from memory, until there are many tokens.
_TOKENS = (1, 2, 3, 4, 8, 16, 32, 64)
_ON_CPU = (1.0, 1.3, 1.5, 1.65, 2.0, 2.2, 3.2, 6.4)
_ELSEWHERE = (1.0, 1.03, 1.04, 1.05, 1.07, 1.1, 1.15, 1.3)
# How much more further tokens add in batches, whose rows have different lengths: on 4 rows of SmolLM2, rounds with one
# and three drafted tokens took 1.39 to 1.88 times as long as one without a draft; token counts predict 1.21 and 1.33.
_IN_BATCHES = 2.0
# How many times are kept for each size, and rounds between two looks at them. Disturbances only make a time longer, so
# the lower quartile counts; the first guess enters like one more measured time.
_KEPT, _REFRESHED = 9, 8
# After this many rounds without a size, one of its times is dropped, so that the size is tried again eventually.
_STALE = 128


class RoundClock:
    """Times of rounds for one model on one device, batch size and range of context.

    Args:
        on_cpu: whether the first guesses are those for a CPU.
        rows: number of rows that rounds run over.
        is_frozen: nothing is timed, so that all processes of a parallel model make the same decisions.
    """

    def __init__(self, on_cpu: bool, rows: int = 1, is_frozen: bool = False) -> None:
        forwards = _ON_CPU if on_cpu else _ELSEWHERE
        one, *more = (_guessed(forwards, rows * (size + 1)) for size in SIZES)
        factor = _IN_BATCHES if rows > 1 else 1.0
        self._forwards = [one, *(one + factor * (seconds - one) for seconds in more)]
        self._guess = [seconds / one for seconds in self._forwards]
        self._is_frozen = is_frozen
        self._times: list[deque[float]] = [deque(maxlen=_KEPT) for _ in SIZES]
        self._rounds = [0] * len(SIZES)
        self._total = 0
        self._last = [0] * len(SIZES)
        self._pace = Pace()
        self._until_refresh = 0
        self._costs = self._measured()

    @property
    def costs(self) -> VerifyCosts:
        """Seconds of a round with 0, 1, 2, ... drafted tokens, see :attr:`is_measured`."""
        return self._costs

    @property
    def is_measured(self) -> bool:
        """Whether costs are in seconds: before a round was timed, and in a frozen clock, only their ratios count."""
        return any(self._times)

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self._costs.seconds[0]

    @property
    def pace(self) -> float:
        """Current speed of decoding in tokens per second, all rows; at least one token for each plain round."""
        return max(self._pace.per_second, 1.0 / self.plain)

    def add(self, drafted: int, tokens: int, seconds: float) -> None:
        """Records a round.

        Args:
            drafted: number of nodes of a row that were verified.
            tokens: number of tokens that all rows gained.
            seconds: time that the round took.
        """
        if self._is_frozen:
            seconds = self._costs.seconds[min(drafted, SIZES[-1])]
        if seconds <= 0:
            return  # the system clock was set back
        if self._is_frozen or self.is_measured:  # otherwise costs are not in seconds yet
            self._pace.see(tokens, seconds)
        if self._is_frozen or drafted > SIZES[-1]:
            return
        size = bisect_left(SIZES, drafted)
        self._rounds[size] += 1
        self._total += 1
        self._last[size] = self._total
        # The first round of a size selects and warms up kernels.
        if self._rounds[size] > 1:
            self._times[size].append(seconds)
        self._until_refresh -= 1
        if self._until_refresh <= 0 or self._rounds[size] == 2:
            self._until_refresh = _REFRESHED
            self._drop_stale()
            self._costs = self._measured()

    def begin_like(self, other: RoundClock) -> None:
        """Starts with the times of rounds over other rows, or another context, as one time of each size."""
        for times, theirs, mine, guessed in zip(
            self._times, other._times, self._forwards, other._forwards, strict=True
        ):
            if theirs and not self._is_frozen:
                times.append(median(theirs) * mine / guessed)
        self._costs = self._measured()

    def state(self) -> list[float]:
        """The measured times, 0 where there are none."""
        return [median(times) if times else 0.0 for times in self._times]

    def restore(self, state: list[float]) -> None:
        """Starts with what :meth:`state` returned, as one time of each size."""
        if len(state) != len(SIZES) or not all(0.0 <= float(seconds) < 1e6 for seconds in state):
            raise ValueError(f"{state!r} are not times of {len(SIZES)} sizes")
        for times, seconds in zip(self._times, state, strict=True):
            if seconds and not self._is_frozen:
                times.append(float(seconds))
        self._costs = self._measured()

    def _drop_stale(self) -> None:
        for size, last in enumerate(self._last):
            if self._total - last >= _STALE and self._times[size]:
                self._times[size].popleft()
                self._last[size] = self._total

    def _measured(self) -> VerifyCosts:
        logs = [
            math.log(sorted(times)[len(times) // 4] / guess) if times else 0.0
            for times, guess in zip(self._times, self._guess, strict=True)
        ]
        counts = [len(times) for times in self._times]
        # How much slower than the guesses this machine is; sizes with more times count more.
        scale = sum(log * count for log, count in zip(logs, counts, strict=True)) / max(sum(counts), 1)
        steps = [
            guess * math.exp((count * log + scale) / (count + 1))
            for guess, log, count in zip(self._guess, logs, counts, strict=True)
        ]
        # More tokens never cost less, so where times contradict that, the shorter one counts.
        for size in range(len(steps) - 2, -1, -1):
            steps[size] = min(steps[size], steps[size + 1])
        return VerifyCosts.of(lambda count: steps[bisect_left(SIZES, count)], SIZES[-1])


def _guessed(forwards: Sequence[float], tokens: int) -> float:
    """The time of a forward over ``tokens`` tokens, in units of a forward over one."""
    if tokens <= _TOKENS[-1]:
        return forwards[bisect_left(_TOKENS, tokens)]
    slope = (forwards[-1] - forwards[-2]) / (_TOKENS[-1] - _TOKENS[-2])
    return forwards[-1] + slope * (tokens - _TOKENS[-1])
