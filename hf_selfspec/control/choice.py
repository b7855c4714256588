"""The choice of the fastest way to draft, among arms that each have an expected speed-up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

# A smaller expected speed-up is within the error of such an estimate.
LEAST_SPEEDUP = 1.02


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to draft, and what it is expected to achieve.

    Attributes:
        speedup: tokens per second divided by those of rounds without a draft.
        acceptance_rate: share of the drafted tokens that are accepted.
    """

    speedup: float
    acceptance_rate: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether it is expected to be faster than no draft by more than the error of the estimate."""
        return self.speedup >= LEAST_SPEEDUP


_A = TypeVar("_A", bound=Arm)


def fastest(arms: Iterable[_A]) -> _A:
    """Returns the arm with the highest speed-up, the first one if several have it."""
    return max(arms, key=lambda arm: arm.speedup)
