"""The share of a call's time that may be spent on looking for better drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How much of its share a search may take until it has found a draft that pays.
_UNPROVEN = 1 / 2
# What each further token adds to a forward, in one-token forwards, until that is measured. On CPUs in float32 it was
# 0.02 to 0.1 (SmolLM2 and the demo model, AMD EPYC, one thread), on GPUs less.
_TOKEN = 0.1
# Weight of the earlier rounds against the last one.
_MEMORY = 0.9


def share_of(budget: float, pays: bool) -> float:
    """The share of a call's time that a search with this budget may take; 1, no limit, stays 1."""
    return budget if pays or budget >= 1.0 else _UNPROVEN * budget


class Budget:
    """The time budget of one call, created at its start: a ``share`` of its time so far, which may change.

    A share of 1 is no limit. Earlier calls may have left ``carried`` seconds over.
    """

    def __init__(self, share: float, clock: Callable[[], float], carried: float = 0.0) -> None:
        self.share = share
        self._carried, self._clock, self._begun = carried, clock, clock()
        self._spent = 0.0
        self._spending_since: float | None = None

    @property
    def left(self) -> float:
        """Seconds that may be spent now; below 0 where more was spent than the share has become."""
        if self.share >= 1.0:
            return math.inf
        now = self._clock()
        spent = self._spent + (0.0 if self._spending_since is None else now - self._spending_since)
        return self._carried + self.share * (now - self._begun) - spent

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time that is spent inside."""
        self._spending_since = begun = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - begun
            self._spending_since = None


class Pace:
    """The times of forwards seen so far."""

    def __init__(self) -> None:
        self._one = 0.0
        self._token = _TOKEN

    def add_round(self, seconds: float) -> None:
        """Records the time of a round; without a draft it is that of a one-token forward, with one it is longer."""
        self._one = _MEMORY * self._one + (1 - _MEMORY) * seconds if self._one else seconds

    def add(self, tokens: int, seconds: float) -> None:
        """Records the time of a forward over several tokens."""
        if self._one and tokens:
            self._token = max(seconds / self._one - 1, 0.0) / tokens

    def seconds(self, tokens: int) -> float:
        """Expected time of a forward over ``tokens`` tokens; infinite before the first round."""
        return self._one * (1 + self._token * tokens) if self._one else math.inf

    def tokens(self, seconds: float) -> int:
        """How many tokens a forward of at most ``seconds`` seconds can have, at least 0."""
        if not self._one or seconds < self._one:
            return 0
        further = (seconds / self._one - 1) / self._token if self._token else math.inf
        return int(min(further, 1 << 30))
