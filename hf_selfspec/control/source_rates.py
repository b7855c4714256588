"""How the sources of a cascade have fared: running rates, from which the speed-up follows that is expected of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..stats import GenerationStats

# How much the rounds before count beside the last one, and rounds after which a source's own rates are believed.
_MEMORY, _TRIED = 0.95, 4
# Rounds after which a source that may be faster than free drafts is tried again, however it fared; twice as many each
# time that it was in vain.
_AGAIN = 64


@dataclass
class SourceRates:
    """How one source has fared.

    Attributes:
        rounds: in which it drafted.
        tokens, seconds: of the last of these rounds, older ones counting less.
        accepted, drafted: likewise of its own tokens.
        waiting: rounds since it drafted last.
        patience: rounds after which it is tried again, however it fared.
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
        """α, with one token of each kind before the first round."""
        return (self.accepted + 1.0) / (self.drafted + 2.0)

    def add(self, tokens: int, seconds: float, accepted: int, drafted: int) -> None:
        """Takes in a round in which the source drafted."""
        self.rounds += 1
        if self.waiting >= self.patience:
            self.patience *= 2
        self.waiting = 0
        if self.rounds == 1:
            return  # which chooses and warms up kernels
        for name, value in (("tokens", tokens), ("seconds", seconds), ("accepted", accepted), ("drafted", drafted)):
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    def speedup(self, promised: float | None, plain: float) -> float:
        """Tokens per second to expect, over those of rounds without a draft.

        Args:
            promised: what the source expects of itself, ``None`` where it does not know, 0 where it would not draft.
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
    """How the sources of a cascade have fared for one kind of call; see :class:`Findings`."""

    sources: dict[str, SourceRates] = field(default_factory=dict)
    changed: Callable[[], None] | None = None

    is_idle = True

    def of(self, name: str) -> SourceRates:
        """The rates of a source."""
        return self.sources.setdefault(name, SourceRates())

    def add_idle_call(self, tokens: int, seconds: float) -> None:
        """Takes in a call without a draft, of which there is nothing to learn."""

    def report(self, stats: GenerationStats) -> None:
        """Adds nothing to the statistics."""

    def state(self) -> dict[str, Any]:
        """Nothing: rates are found again within a few rounds."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up nothing."""
