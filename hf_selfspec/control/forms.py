"""Which of two forms of the same drafts is faster: step by step, or all steps at once. Measured on the rounds."""

from __future__ import annotations

from collections import deque
from threading import Lock

from .clock import SIZES, RoundClock

# Rounds of each form before they are compared, and whose sizes count in that.
_TRIED, _COMPARED = 12, 64
# Rounds after which the slower form is tried again; twice as many each time.
_AGAIN = 256
# The share of drafting that steps must spend outside of their graphs before a graph of all of them is made, which takes
# up to a minute. Measured on one thread of an AMD EPYC: 0.26 to 0.31 with 4 layers of width 64 (backend inductor), 0.03
# with 8 layers of SmolLM2-135M (backend eager).
_LEAST_OVERHEAD = 0.1


class Forms:
    """Rounds of both forms for one kind of draft.

    All steps at once spare what Python does between them, and run steps that a short draft does not need. So rounds are
    compared as a whole, at the lengths that drafts have.

    Args:
        on_cpu, rows: see :class:`RoundClock`.

    Attributes:
        vocabulary: numbers that a token is drawn by, as steps have shown.
    """

    def __init__(self, on_cpu: bool, rows: int) -> None:
        self._clocks = {at_once: RoundClock(on_cpu, rows) for at_once in (False, True)}
        self._rounds = dict.fromkeys(self._clocks, 0)
        self._sizes: deque[int] = deque(maxlen=_COMPARED)
        self._outside = self._drafting = 0.0
        self._waiting, self._patience = 0, _AGAIN
        self.vocabulary = 0
        self._lock = Lock()  # threads that generate with a model share what is known

    def at_once(self) -> bool:
        """Whether the next draft is to be made at once."""
        with self._lock:
            return self._decided()

    def _decided(self) -> bool:
        if self._rounds[False] < _TRIED or self._outside < _LEAST_OVERHEAD * self._drafting:
            return False
        if self._rounds[True] < _TRIED:
            return True
        faster = self._seconds(True) < self._seconds(False)
        if self._waiting < self._patience:
            return faster
        self._waiting, self._patience = 0, 2 * self._patience
        return not faster

    def add(self, at_once: bool, size: int, tokens: int, seconds: float) -> None:
        """Takes in a round.

        Args:
            at_once: its form.
            size: drafted tokens of a row.
            tokens: that all rows gained.
            seconds: it took.
        """
        with self._lock:
            self._clocks[at_once].add(size, tokens, seconds)
            self._rounds[at_once] += 1
            self._sizes.append(size)
            self._waiting += 1

    def add_steps(self, outside: float, drafting: float) -> None:
        """Takes in the seconds that steps have spent outside of their graphs, and altogether."""
        with self._lock:
            self._outside += outside
            self._drafting += drafting

    def _seconds(self, at_once: bool) -> float:
        """What the last rounds would have taken."""
        costs = self._clocks[at_once].costs.seconds
        return sum(costs[min(size, SIZES[-1])] for size in self._sizes)
