"""How drafts fare, compared with what trials have promised.

Accepted tokens are modelled as Poisson counts with the mean ``ease`` times what the trials promised, and ``ease`` as
Gamma-distributed about 1 with the weight of ``_DOUBTED`` tokens. Its posterior mean is
``(accepted + _DOUBTED) / (expected + _DOUBTED)``; both sums forget exponentially.
"""

from __future__ import annotations

from collections import deque

# Drafted tokens of which something is remembered, how many have to contradict the trials to count as much as these
# (a window of SWIFT's), and how far the difference may go, in steps of so much: a share of 512 tokens has a standard
# error of 0.022 at most, so that a step is about two of them and the choice does not follow noise.
_REMEMBERED, _DOUBTED, _EASE, _STEP = 512, 32, (0.2, 1.1), 0.05
# How much longer rounds may take than foretold before that counts: what the loop itself takes beside the forwards.
_TOLERANCE = 1.05
# Text has become hard where, of so many drafted tokens, less than this share of the usual is accepted. The share has a
# standard error of 0.031 at most: where half of the tokens are usually accepted, that is more than five of them.
_WATCHED, _FAR_BELOW = 256, 0.65


class Feedback:
    """The last rounds of drafting; older ones count the less."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0
        self._foretold = self._taken = 0.0
        self._plain = (0.0, 0.0)
        self._rounds: deque[tuple[int, float, float]] = deque(maxlen=_WATCHED)
        self._usual: float | None = None

    def add(self, drafted: int, expected: float, accepted: float, foretold: float, taken: float) -> None:
        """Takes in one round.

        Args:
            drafted: tokens.
            expected, accepted: how many of them should have been accepted by the trials, and how many were.
            foretold, taken: seconds of its forwards by the measured costs, and of all of it; 0 where not known.
        """
        kept = max(0.0, 1 - drafted / _REMEMBERED)
        self._expected, self._accepted = self._expected * kept + expected, self._accepted * kept + accepted
        self._foretold, self._taken = self._foretold * kept + foretold, self._taken * kept + taken
        self._rounds.append((drafted, expected, accepted))

    @property
    def ease(self) -> float:
        """How much more often than expected drafts are accepted, in steps."""
        ease = (self._accepted + _DOUBTED) / (self._expected + _DOUBTED)
        return round(min(max(ease, _EASE[0]), _EASE[1]) / _STEP) * _STEP

    def add_plain(self, foretold: float, taken: float) -> None:
        """Takes in one round without a draft; seconds as in :meth:`add`."""
        kept = 1 - 1 / _REMEMBERED
        self._plain = (self._plain[0] * kept + foretold, self._plain[1] * kept + taken)

    def pace(self, disturbed: float) -> float:
        """By how much rounds of drafting take longer than foretold, beyond what one-token steps do; at most 1.

        Args:
            disturbed: time that one-token steps usually take over the shortest one, which counts until there were some.
        """
        if self._expected < _DOUBTED or not self._foretold:
            return 1.0
        foretold, taken = self._plain
        usual = taken / foretold if foretold else disturbed
        return min(_TOLERANCE * usual * self._foretold / self._taken, 1.0)

    def has_become_hard(self) -> bool:
        """Whether drafts are accepted much less often than they were at the first call of this."""
        drafted = sum(count for count, _, _ in self._rounds)
        if drafted < _WATCHED:
            return False
        while drafted - self._rounds[0][0] >= _WATCHED:
            drafted -= self._rounds.popleft()[0]
        ease = sum(accepted for _, _, accepted in self._rounds) / sum(expected for _, expected, _ in self._rounds)
        if self._usual is None:
            self._usual = ease
        return ease < _FAR_BELOW * self._usual
