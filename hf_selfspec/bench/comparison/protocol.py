"""Ratios of speeds with intervals, by Spec-Bench's protocol and by totals.

Spec-Bench (arXiv 2401.07851, ``evaluation/speed.py``) takes the mean of the questions' new tokens per second, and
divides the mean of a method by that of plain decoding; long answers count no more than short ones. The
ratio of totals divides all tokens by all seconds first. Tokens are counted from the ids on both sides.

Intervals are 95 % percentile intervals of the bootstrap over prompts (Efron and Tibshirani, An Introduction to the
Bootstrap, §13.3): a way and plain generate are resampled together, so that differences between prompts cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .calls import Call

_DRAWS = 2000
_LOW, _HIGH = 2.5, 97.5
_SEED = 0
# The fewest prompts for an interval. With few prompts the bootstrap's intervals are too narrow: for means of lognormal
# speeds (σ = 0.3) they cover the true mean in 79 % of cases with 4 prompts, in 88 % with 10, in 93 % with 20 (1,500
# simulated cases).
FEWEST = 10


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval.

    Attributes:
        value: the figure over all prompts.
        low, high: its 95 % interval, ``None`` where there are too few prompts.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """The interval as text for tables, empty if there is none."""
        return "" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class Ratios:
    """How much faster a way is than plain generate.

    Attributes:
        ratio_of_means: ratio of the means of the prompts' speeds, as in Spec-Bench.
        ratio_of_totals: ratio of all tokens over all seconds.
    """

    ratio_of_means: Estimate
    ratio_of_totals: Estimate


@dataclass(frozen=True)
class Measured:
    """Seconds and tokens of each prompt."""

    seconds: np.ndarray
    tokens: np.ndarray

    @classmethod
    def whole(cls, calls: Sequence[Call], clock: str) -> Measured:
        """Seconds and tokens of whole calls."""
        return cls(np.array([call.seconds(clock) for call in calls]), np.array([call.tokens for call in calls]))

    @classmethod
    def decoding(cls, calls: Sequence[Call], clock: str) -> Measured:
        """Seconds and tokens after the first tokens."""
        return cls(np.array([call.decoding(clock) for call in calls]), np.array([call.decoded for call in calls]))

    def speeds(self) -> np.ndarray:
        """Tokens per second of each prompt."""
        speeds: np.ndarray = self.tokens / self.seconds
        return speeds

    def only(self, chosen: np.ndarray) -> Measured:
        """Some of the prompts."""
        return Measured(self.seconds[chosen], self.tokens[chosen])


def ratios(plain: Measured, way: Measured) -> Ratios | None:
    """Compares a way with plain generate on the same prompts; ``None`` if no prompt has tokens on both sides."""
    both = (plain.tokens > 0) & (way.tokens > 0) & (plain.seconds > 0) & (way.seconds > 0)
    if not both.any():
        return None
    plain, way = plain.only(both), way.only(both)
    drawn = _draws(int(both.sum()))
    everyone = np.arange(int(both.sum()))[None]
    return Ratios(
        _estimate(_of_means(plain, way, everyone), _of_means(plain, way, drawn)),
        _estimate(_of_totals(plain, way, everyone), _of_totals(plain, way, drawn)),
    )


def mean_speed(measured: Measured) -> Estimate | None:
    """Mean of the prompts' tokens per second."""
    speeds = measured.only((measured.tokens > 0) & (measured.seconds > 0)).speeds()
    if not len(speeds):
        return None
    return _estimate(speeds.mean(keepdims=True), speeds[_draws(len(speeds))].mean(1))


def _draws(count: int) -> np.ndarray:
    """Resampled indices of prompts ``[draws, count]``; no draws if there are too few prompts."""
    generator = np.random.default_rng(_SEED)
    return generator.integers(count, size=(_DRAWS if count >= FEWEST else 0, count))


def _of_means(plain: Measured, way: Measured, chosen: np.ndarray) -> np.ndarray:
    found: np.ndarray = way.speeds()[chosen].mean(1) / plain.speeds()[chosen].mean(1)
    return found


def _of_totals(plain: Measured, way: Measured, chosen: np.ndarray) -> np.ndarray:
    speeds = [one.tokens[chosen].sum(1) / one.seconds[chosen].sum(1) for one in (way, plain)]
    found: np.ndarray = speeds[0] / speeds[1]
    return found


def _estimate(value: np.ndarray, drawn: np.ndarray) -> Estimate:
    if not len(drawn):
        return Estimate(float(value[0]))
    low, high = np.percentile(drawn, (_LOW, _HIGH))
    return Estimate(float(value[0]), float(low), float(high))
