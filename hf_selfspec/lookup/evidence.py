"""How far each kind of evidence for a token can be trusted, learned from what verification accepts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .successors import GRADES, log_odds

# Log-odds that the continuation of a match is right, by the length of the match: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16-31 and
# longer. Measured first guesses; what is learned replaces them.
_OF_MATCH = (-1.7, -0.6, 0.0, 0.4, 0.8, 1.4, 1.7, 2.2, 2.8)
_BUCKETS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6) + (7,) * 16 + (8,)
# How many observations a first guess is worth, and how many are remembered, in units of p (1 - p).
_PRIOR, _MEMORY = 1.0, 60.0

# Keys: matches in the row's own text and in the store, successors of a pair and of a single token, agreement.
OWN = 0
STORE = OWN + len(_OF_MATCH)
SUCCESSOR = STORE + len(_OF_MATCH)
AGREEMENT = SUCCESSOR + 2 * GRADES
_KEYS = AGREEMENT + 2


def match_key(base: int, length: int) -> int:
    """The key of a match of ``length`` tokens in the source whose keys begin at ``base``."""
    return base + _BUCKETS[min(length, len(_BUCKETS) - 1)]


class Evidence:
    """Weights of evidence: log-odds that add up for a token that several sources propose.

    A candidate's probability is ``exp(score) / (1 + sum of exp(score) of all candidates at that place)``: what agrees
    adds up, what differs competes, and 1 stands for "none of them". Each observation moves the weights by the gradient
    of its log-likelihood over what is known of them, so a weight settles like a running rate with a prior.
    """

    def __init__(self) -> None:
        first = [weight for weight in _OF_MATCH]
        first += [weight - 0.3 for weight in _OF_MATCH]
        first += [log_odds(grade) - 0.7 for grade in range(GRADES)]
        first += [log_odds(grade) - 0.1 for grade in range(GRADES)]
        first += [0.5, 1.0]
        self.weights = first
        self._information = [_PRIOR] * _KEYS

    def learn(self, offers: Sequence[tuple[int, tuple[int, ...], float]], token: int) -> None:
        """Takes in which of the tokens ``(token, keys, probability)`` that were offered at one place came."""
        weights, information = self.weights, self._information
        for offered, keys, probability in offers:
            error = (1.0 if offered == token else 0.0) - probability
            gained = probability * (1.0 - probability)
            for key in keys:
                information[key] = known = min(information[key] + gained, _MEMORY)
                weights[key] += error / known

    def state(self) -> dict[str, list[float]]:
        return {"weights": list(self.weights), "information": list(self._information)}

    def restore(self, state: dict[str, list[float]]) -> None:
        weights, information = ([float(x) for x in state[name]] for name in ("weights", "information"))
        if len(weights) != _KEYS or len(information) != _KEYS:
            raise ValueError(f"{len(weights)} weights of evidence, {_KEYS} expected.")
        if not all(map(math.isfinite, weights)) or not all(_PRIOR <= x <= _MEMORY for x in information):
            raise ValueError("Weights of evidence that are not finite.")
        self.weights, self._information = weights, information
