"""How often each kind of evidence for a token was right, counted from what verification accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

# What was offered at one place: the token, the kind of evidence for it, its probability there.
Offer = tuple[int, int, float]

# The weight of a first guess in observations, and the number of observations that are remembered.
_PRIOR, _MEMORY = 8.0, 200.0

# Classes of matches by their length: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16-31, longer.
_CLASSES = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6) + (7,) * 16 + (8,)
_NUM_CLASSES = _CLASSES[-1] + 1

# Grades of a probability: each step multiplies the odds by four.
_EDGES = (0.0154, 0.0588, 0.2, 0.5, 0.8, 0.9412, 0.9846)
_NUM_GRADES = len(_EDGES) + 1
# Successors of one token alone: higher probabilities do not make them likelier.
_EDGES_OF_SINGLE = _EDGES[:3]

# How likely a token that a match proposes is among the successors of the last tokens.
_LIKELY, _POSSIBLE, _UNLIKELY, _UNKNOWN = range(4)
# The lowest probability of a likely token, and that of a possible one.
_LIKELY_FROM, _POSSIBLE_FROM = 0.5, 0.05

# Where the keys of each source begin.
_TEXT = 0
_STORE = _TEXT + _NUM_CLASSES * 4 * 3
_SUCCESSOR = _STORE + _NUM_CLASSES * 4 * 2
_NUM_KEYS = _SUCCESSOR + 4 * _NUM_GRADES

# First guesses, from SmolLM2-135M-Instruct, greedy, 45 texts of nine kinds: matches in the text and in the store, by
# their length; what the successors' view and other occurrences add, in log-odds.
_OF_TEXT = (0.35, 0.55, 0.68, 0.78, 0.8, 0.84, 0.93, 0.955, 0.975)
_OF_STORE = (0.03, 0.08, 0.15, 0.4, 0.6, 0.65, 0.85, 0.9, 0.95)
_OF_VIEW = {_LIKELY: 0.1, _POSSIBLE: -0.7, _UNLIKELY: -1.1, _UNKNOWN: 0.0}
_OF_SUPPORT = (-1.6, 0.0, 0.3)
# Successors of one token, seen in other texts and in this one, then those of two tokens.
_OF_SUCCESSOR = (
    (0.005, 0.02, 0.02, 0.07),
    (0.005, 0.03, 0.06, 0.2),
    (0.01, 0.01, 0.03, 0.11, 0.16, 0.22, 0.4, 0.4),
    (0.02, 0.08, 0.13, 0.21, 0.34, 0.48, 0.5, 0.5),
)


def view_of(probability: float | None) -> int:
    """How likely a token is by its probability among successors, ``None`` where no successors are known."""
    if probability is None:
        return _UNKNOWN
    return _LIKELY if probability >= _LIKELY_FROM else _POSSIBLE if probability >= _POSSIBLE_FROM else _UNLIKELY


def text_key(length: int, view: int, support: int) -> int:
    """The key of a match in the row's own text."""
    return _TEXT + (_CLASSES[min(length, 32)] * 4 + view) * 3 + support


def store_key(length: int, view: int, is_longer: bool) -> int:
    """The key of a match in earlier texts, ``is_longer`` than that in the row's own text."""
    return _STORE + (_CLASSES[min(length, 32)] * 4 + view) * 2 + is_longer


def successor_keys(is_pair: bool, is_fresh: bool) -> tuple[int, tuple[float, ...]]:
    """The first key of successors of a pair or a token, here or elsewhere, and the edges, each of which adds 1."""
    return _SUCCESSOR + (2 * is_pair + is_fresh) * _NUM_GRADES, _EDGES if is_pair else _EDGES_OF_SINGLE


@cache
def _first_guesses() -> tuple[float, ...]:
    guesses = [0.0] * _NUM_KEYS
    for length in (1, 2, 3, 4, 5, 7, 10, 16, 32):
        at = _CLASSES[length]
        for view, by_view in _OF_VIEW.items():
            for support, by_support in enumerate(_OF_SUPPORT):
                guesses[text_key(length, view, support)] = _shifted(_OF_TEXT[at], by_view + by_support)
            for is_longer in (False, True):
                guesses[store_key(length, view, is_longer)] = _shifted(_OF_STORE[at], by_view - (not is_longer))
    for source, rates in enumerate(_OF_SUCCESSOR):
        for grade, rate in enumerate(rates):
            guesses[_SUCCESSOR + source * _NUM_GRADES + grade] = rate
    return tuple(guesses)


def _shifted(probability: float, by: float) -> float:
    return 1 / (1 + (1 - probability) / probability * math.exp(-by))


class Rates:
    """How often offered tokens were right, by kind of evidence, where those offered before them were wrong."""

    def __init__(self) -> None:
        self.rates = list(_first_guesses())
        self._counts = [_PRIOR] * _NUM_KEYS

    def see(self, offers: Sequence[Offer], token: int) -> None:
        """Records which of the tokens that were offered at one place came next, if any did."""
        rates, counts = self.rates, self._counts
        for offered, key, _ in offers:
            counts[key] = count = min(counts[key] + 1.0, _MEMORY)
            if offered == token:
                rates[key] += (1.0 - rates[key]) / count
                return
            rates[key] -= rates[key] / count

    def state(self) -> dict[str, list[float]]:
        return {"rates": list(self.rates), "seen": list(self._counts)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Rates:
        """The inverse of :meth:`state`; raises ``ValueError`` for anything else."""
        rates, counts = ([float(x) for x in state[name]] for name in ("rates", "seen"))
        if len(rates) != _NUM_KEYS or len(counts) != _NUM_KEYS:
            raise ValueError(f"{len(rates)} rates seen {len(counts)} times, {_NUM_KEYS} expected.")
        if not all(0 <= x <= 1 for x in rates) or not all(_PRIOR <= x <= _MEMORY for x in counts):
            raise ValueError("Rates outside 0 to 1, or counts that are out of bounds.")
        restored = cls()
        restored.rates, restored._counts = rates, counts
        return restored
