"""The share of a call's time that trials may take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """The time budget of one call: a ``share`` of its time so far, 1 for no limit."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share, self._clock, self._begun, self._spent = share, clock, clock(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return self._clock() - self._begun

    def allows(self, seconds: float) -> bool:
        """Whether so many further seconds may be spent now."""
        return self._share >= 1.0 or self._spent + seconds <= self._share * self.elapsed

    @contextmanager
    def spending(self) -> Iterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - begun
