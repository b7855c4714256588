"""Which way to draft is the fastest: arms, each with the speed-up that is expected of it, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

# A smaller expected speed-up is within what such an estimate can be wrong by.
LEAST_SPEEDUP = 1.02


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to draft, and what is expected of it.

    Attributes:
        speedup: tokens per second over those of rounds without a draft.
        acceptance_rate: share of the drafted tokens that are accepted.
    """

    speedup: float
    acceptance_rate: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether it is faster than no draft, by more than the estimate can be wrong by."""
        return self.speedup >= LEAST_SPEEDUP


_A = TypeVar("_A", bound=Arm)


def fastest(arms: Iterable[_A]) -> _A:
    """The arm with the highest speed-up, the first of several."""
    return max(arms, key=lambda arm: arm.speedup)
