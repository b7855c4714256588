"""Running rates of the sources of a cascade, from which the expected speed-up of each follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..stats import GenerationStats

# Weight of the earlier rounds against the last one, and rounds after which a source's own rates are trusted.
_MEMORY, _TRIED = 0.95, 4
# Rounds after which a source that may be faster than free drafts is tried again, whatever its rates; twice as many
# after each trial in vain.
_AGAIN = 64


@dataclass
class SourceRates:
    """The results of one source so far.

    Attributes:
        rounds: number of rounds in which it drafted.
        tokens, seconds: sums over these rounds, in which older ones count less.
        accepted, drafted: the same for its own tokens.
        waiting: rounds since it drafted last.
        patience: rounds after which it is tried again, whatever its rates.
    """

    rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    accepted: float = 0.0
    drafted: float = 0.0
    waiting: int = 0
    patience: int = _AGAIN

    @property
    def acceptance_rate(self) -> float:
        """α, starting with one accepted and one rejected token before the first round."""
        return (self.accepted + 1.0) / (self.drafted + 2.0)

    def add(self, tokens: int, seconds: float, accepted: int, drafted: int) -> None:
        """Records a round in which the source drafted."""
        self.rounds += 1
        if self.waiting >= self.patience:
            self.patience *= 2
        self.waiting = 0
        if self.rounds == 1:
            return  # the first round selects and warms up kernels
        for name, value in (("tokens", tokens), ("seconds", seconds), ("accepted", accepted), ("drafted", drafted)):
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    def speedup(self, promised: float | None, plain: float) -> float:
        """Expected tokens per second, divided by those of rounds without a draft.

        Args:
            promised: the source's own estimate, ``None`` if it has none, 0 where it would not draft.
            plain: tokens per second of rounds without a draft.
        """
        if promised == 0.0:
            return 0.0
        known = self.tokens / self.seconds / plain if self.rounds >= _TRIED else None
        if known is None:
            return math.inf if promised is None else promised
        return max(known, math.inf if promised is None else promised) if self.waiting >= self.patience else known


@dataclass
class RatesFindings:
    """Rates of the sources of a cascade for one kind of call; see :class:`Findings`."""

    sources: dict[str, SourceRates] = field(default_factory=dict)
    changed: Callable[[], None] | None = None

    is_idle = True

    def of(self, name: str) -> SourceRates:
        """The rates of a source."""
        return self.sources.setdefault(name, SourceRates())

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Ignores a call without a draft, which has nothing to learn from."""

    def report(self, stats: GenerationStats) -> None:
        """Adds nothing to the statistics."""

    def state(self) -> dict[str, Any]:
        """Returns nothing to save: rates are found again within a few rounds."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores nothing."""
