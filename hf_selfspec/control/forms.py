"""Which form of the same drafts is faster, step by step or all steps in one graph, measured on the rounds."""

from __future__ import annotations

from collections import deque
from threading import Lock

from .clock import SIZES, RoundClock

# Rounds of each form before the two are compared, which is also the number of latest rounds whose sizes count.
_TRIED, _COMPARED = 12, 64
# Rounds after which the slower form is tried again; twice as many each time.
_AGAIN = 256
# The share of drafting that steps must spend outside of their graphs before a graph of all of them is made, which takes
# up to a minute. Measured on one thread of an AMD EPYC: 0.26 to 0.31 with 4 layers of width 64 (backend inductor), 0.03
# with 8 layers of SmolLM2-135M (backend eager).
_LEAST_OVERHEAD = 0.1


class Forms:
    """Times of both forms for one kind of draft.

    All steps in one graph save the Python code between them, but run steps that a short draft does not need. So whole
    rounds are compared, at the lengths that drafts have.

    Args:
        on_cpu, rows: see :class:`RoundClock`.

    Attributes:
        vocabulary: number of random numbers that sampling one token takes, as seen in steps.
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
        """Whether the next draft should be made in one graph."""
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
        """Records a round.

        Args:
            at_once: whether its draft was made in one graph.
            size: number of drafted tokens of a row.
            tokens: number of tokens that all rows gained.
            seconds: time that the round took.
        """
        with self._lock:
            self._clocks[at_once].add(size, tokens, seconds)
            self._rounds[at_once] += 1
            self._sizes.append(size)
            self._waiting += 1

    def add_steps(self, outside: float, drafting: float) -> None:
        """Records the seconds that steps have spent outside of their graphs, and in total."""
        with self._lock:
            self._outside += outside
            self._drafting += drafting

    def _seconds(self, at_once: bool) -> float:
        """The time that the last rounds would have taken in this form."""
        costs = self._clocks[at_once].costs.seconds
        return sum(costs[min(size, SIZES[-1])] for size in self._sizes)
