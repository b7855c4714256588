"""What a round costs by its number of drafted tokens, and how fast decoding is at present, measured on the rounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

# Numbers of drafted tokens of a row for which the time of a round is kept; other numbers cost as much as the next
# larger one. The cost of a verification is a staircase: kernels for 1, 2, 3, 4, 8, 16 and 32 tokens differ.
SIZES = (0, 1, 2, 3, 7, 15, 31)
# What each doubling of the tokens of a forward, and each token, add to it where neither was measured, in units of a
# forward over one. On a CPU: SmolLM2-135M, float32, one thread of an AMD EPYC; elsewhere a forward is bound by reading
# its weights from memory, until there are many tokens.
_ON_CPU, _ELSEWHERE = (0.25, 1 / 32), (0.02, 0.003)
# How many times are kept for each size, and rounds between two looks at them. Disturbances only make a time longer, so
# the lower quartile counts; the first guess enters like one more measured time.
_KEPT, _REFRESHED = 9, 8
# After this many rounds without a size, one of its times is dropped, so that the size is tried again eventually.
_STALE = 128
# Plain rounds that are timed before anything is compared with them, and rounds after which another one is.
_PLAIN, _PLAIN_AGAIN = 2, 128
# The weight of the rounds before against the next one in the present speed: 0.98 to 0.995 were best on traces of 45
# texts; 0.9 lost 2 %.
_MEMORY = 0.99

# Returns how many seconds longer a forward takes over so many tokens than over one, if that is known.
Priced = Callable[[], Callable[[int], float] | None]


class CostCurve:
    """Times of rounds for one model on one device, batch size and range of context. One thread at a time may change it.

    Attributes:
        costs: seconds of a round of free drafts with 0, 1, 2, ... drafted tokens, their own work included.
        plain: seconds of a round in which nothing is done but to generate, which takes no longer than an empty draft.
        alone: what one of the rows would cost without the others, as a share of a round of all.
    """

    def __init__(self, on_cpu: bool, rows: int = 1, is_frozen: bool = False, priced: Priced | None = None) -> None:
        doubled, each = _ON_CPU if on_cpu else _ELSEWHERE
        self._rows, self._priced = rows, priced
        counts = [1, *(rows * (size + 1) for size in SIZES)]
        one, *self._forwards = [1.0 + doubled * math.log2(count) + each * (count - 1) for count in counts]
        self._is_frozen, self.alone = is_frozen, one / self._forwards[0]
        self._times: list[deque[float]] = [deque(maxlen=_KEPT) for _ in SIZES]
        self._plain: deque[float] = deque(maxlen=_KEPT)
        self._rounds, self._last = [0] * len(SIZES), [0] * len(SIZES)  # of each size; the number of its last round
        self._tokens = self._seconds = 0.0
        self._total = self._until_refresh = self._since_plain = 0
        self._refresh()

    @property
    def is_measured(self) -> bool:
        """Whether costs are in seconds: before a round was timed, and in a frozen curve, only their ratios count."""
        return any(self._times) or bool(self._plain)

    @property
    def wants_plain(self) -> bool:
        return not self._is_frozen and (len(self._plain) < _PLAIN or self._since_plain >= _PLAIN_AGAIN)

    @property
    def pace(self) -> float:
        """Present speed of decoding in tokens per second, all rows; at least one token for each plain round."""
        return max(self._tokens / self._seconds if self._seconds else 0.0, 1.0 / self.plain)

    def add_plain(self, tokens: float, seconds: float) -> None:
        """Records a round in which nothing was done but to generate ``tokens`` tokens."""
        if seconds > 0 and not self._is_frozen:
            if self._rounds[0]:
                self.see(tokens, seconds)
                self._since_plain = 0
                self._plain.append(seconds)
                priced = self._priced if len(self._plain) == _PLAIN else None
                if priced is not None and (added := priced()) is not None:
                    one, plain = added(self._rows), _lower_quartile(self._plain)
                    more = [(added(self._rows * (size + 1)) - one) / plain for size in SIZES]
                    self._forwards = [1.0 + max(seconds, 0.0) for seconds in more]
                    self.alone = min(max(1.0 - one / plain, 0.0), 1.0)
                self._refresh(with_costs=len(self._plain) <= _PLAIN)
            self._rounds[0] += 1  # the first round selects and warms up kernels

    def add(self, drafted: int, tokens: float, seconds: float) -> None:
        if self._is_frozen:
            return self.see(tokens, self.costs[min(drafted, SIZES[-1])])
        if seconds <= 0:
            return  # the system clock was set back
        if self.is_measured:  # otherwise costs are not in seconds yet
            self.see(tokens, seconds)
        if drafted > SIZES[-1]:
            return
        size = bisect_left(SIZES, drafted)
        self._rounds[size] += 1
        self._total += 1
        self._last[size] = self._total
        if self._rounds[size] > 1:  # as above
            self._times[size].append(seconds)
        self._until_refresh -= 1
        if is_due := self._until_refresh <= 0 or self._rounds[size] == 2:
            self._until_refresh = _REFRESHED
            for other, last in enumerate(self._last):
                if self._total - last >= _STALE and self._times[other]:
                    self._times[other].popleft()
                    self._last[other] = self._total
        self._refresh(with_costs=is_due)

    def see(self, tokens: float, seconds: float) -> None:
        self._since_plain += 1
        self._tokens = self._tokens * _MEMORY + tokens
        self._seconds = self._seconds * _MEMORY + seconds

    def _refresh(self, with_costs: bool = True) -> None:
        if with_costs:
            self.costs = self._measured()
        times = [_lower_quartile(of_kind) for of_kind in (self._plain, self._times[0]) if of_kind]
        self.plain = min(times, default=self.costs[0])

    def _measured(self) -> tuple[float, ...]:
        times = [self._times[0] or self._plain, *self._times[1:]]
        guesses = [seconds / self._forwards[0] for seconds in self._forwards]
        logs = [math.log(_lower_quartile(x) / guess) if x else 0.0 for x, guess in zip(times, guesses, strict=True)]
        counts = [len(of_size) for of_size in times]
        # How much slower than the guesses this machine is; sizes with more times count more.
        scale = sum(log * count for log, count in zip(logs, counts, strict=True)) / max(sum(counts), 1)
        steps = [
            guess * math.exp((count * log + scale) / (count + 1))
            for guess, log, count in zip(guesses, logs, counts, strict=True)
        ]
        # More tokens never cost less, so where times contradict that, the shortest one counts.
        steps = [min(steps[size:]) for size in range(len(steps))]
        return tuple(steps[bisect_left(SIZES, count)] for count in range(SIZES[-1] + 1))


def _lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]
