"""Compares the acceptance of drafts with what trials have predicted.

Accepted tokens are modelled as Poisson counts with the mean ``ease`` times what the trials predicted, and ``ease`` as
Gamma-distributed around 1 with the weight of ``_DOUBTED`` tokens. Its posterior mean is
``(accepted + _DOUBTED) / (expected + _DOUBTED)``; both sums forget exponentially.
"""

from __future__ import annotations

from collections import deque

# Number of drafted tokens that are remembered, number that counts as much as the trials (one of SWIFT's windows), the
# bounds of ``ease``, and its step: a share of 512 tokens has a standard error of at most 0.022, so that a step is about
# two of them and the choice does not follow noise.
_REMEMBERED, _DOUBTED, _EASE, _STEP = 512, 32, (0.2, 1.1), 0.05
# Text has become hard if, over this many drafted tokens, less than this share of the usual number is accepted. The
# share has a standard error of at most 0.031: if half of the tokens are usually accepted, that is more than five of
# them.
_WATCHED, _FAR_BELOW = 256, 0.65


class Feedback:
    """The last rounds of drafting; older ones count less."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0
        self._rounds: deque[tuple[int, float, float]] = deque(maxlen=_WATCHED)
        self._usual: float | None = None

    def add(self, drafted: int, expected: float, accepted: float) -> None:
        """Records a round: how many of the drafted tokens trials expected to be accepted, and how many were."""
        kept = max(0.0, 1 - drafted / _REMEMBERED)
        self._expected, self._accepted = self._expected * kept + expected, self._accepted * kept + accepted
        self._rounds.append((drafted, expected, accepted))

    @property
    def ease(self) -> float:
        """The ratio of accepted to expected tokens, in steps."""
        ease = (self._accepted + _DOUBTED) / (self._expected + _DOUBTED)
        return round(min(max(ease, _EASE[0]), _EASE[1]) / _STEP) * _STEP

    def has_become_hard(self) -> bool:
        """Whether drafts are accepted much less often than at the first call of this method."""
        drafted = sum(count for count, _, _ in self._rounds)
        if drafted < _WATCHED:
            return False
        while drafted - self._rounds[0][0] >= _WATCHED:
            drafted -= self._rounds.popleft()[0]
        ease = sum(accepted for _, _, accepted in self._rounds) / sum(expected for _, expected, _ in self._rounds)
        if self._usual is None:
            self._usual = ease
        return ease < _FAR_BELOW * self._usual
