"""What the model's logits last held after a pair of tokens (Token Recycling, 2408.08696, with keys of two tokens)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

# Successors that are kept of each pair.
WIDTH = 8
# Grades of a probability, by halves of its odds.
GRADES = 16
_BITS = 21
_LAST = (1 << _BITS) - 1


def grade(probability: float) -> int:
    """``probability`` as one of ``GRADES`` steps of equal width in log-odds."""
    odds = probability / max(1.0 - probability, 1e-6)
    return min(max(int(math.log2(max(odds, 1e-6)) + GRADES / 2), 0), GRADES - 1)


def log_odds(grade: int) -> float:
    """Log-odds in the middle of a grade."""
    return (grade - GRADES / 2 + 0.5) * math.log(2)


class Successors:
    """The likeliest successors of the last two tokens when the model last saw them, else of the last one.

    Args:
        most: pairs that are kept; the oldest leave first.
    """

    def __init__(self, most: int = 65_536) -> None:
        self.most = most
        self._slots: dict[int, int] = {}
        # Slot of the latest pair that ends with a token.
        self._singles: dict[int, int] = {}
        self._pairs = array("q")
        self._tokens = array("i")
        self._grades = array("b")
        self._oldest = 0

    def __len__(self) -> int:
        return len(self._slots)

    def see(self, before: int, token: int, top: Sequence[int], probabilities: Sequence[float]) -> None:
        """Takes in the likeliest tokens after ``before``, ``token``, the likeliest first."""
        pair = before << _BITS | token
        slot = self._slots.get(pair)
        if slot is None:
            slot = self._new(pair)
        self._singles[token] = slot
        count = min(len(top), WIDTH)
        start = slot * WIDTH
        for i in range(count):
            self._tokens[start + i] = top[i]
            self._grades[start + i] = grade(probabilities[i])
        for i in range(count, WIDTH):
            self._tokens[start + i] = -1

    def get(self, before: int, token: int) -> tuple[int, array[int], array[int]] | None:
        """The level (2 for the pair, 1 for the last token alone), the successors and their grades, or ``None``."""
        level = 2
        slot = self._slots.get(before << _BITS | token)
        if slot is None:
            level = 1
            slot = self._singles.get(token)
            if slot is None:
                return None
        start = slot * WIDTH
        return level, self._tokens[start : start + WIDTH], self._grades[start : start + WIDTH]

    def state(self) -> dict[str, Any]:
        """What is kept, the oldest pair first."""
        pairs = np.frombuffer(self._pairs, np.int64) if self._pairs else np.zeros(0, np.int64)
        order = np.roll(np.arange(len(pairs)), -self._oldest)
        return {
            "pairs": pairs[order],
            "tokens": np.array(self._tokens, np.int32).reshape(-1, WIDTH)[order],
            "grades": np.array(self._grades, np.int8).reshape(-1, WIDTH)[order],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`state` returned, the latest pairs of it if there are too many."""
        pairs = np.asarray(state["pairs"], np.int64)[-self.most :]
        tokens = np.asarray(state["tokens"], np.int32)[-self.most :]
        grades = np.asarray(state["grades"], np.int8)[-self.most :]
        if not tokens.shape == grades.shape == (len(pairs), WIDTH):
            raise ValueError(f"{len(pairs)} pairs with successors of the shapes {tokens.shape} and {grades.shape}.")
        self.forget()
        self._pairs.extend(pairs.tolist())
        self._tokens.extend(tokens.ravel().tolist())
        self._grades.extend(np.clip(grades, 0, GRADES - 1).ravel().tolist())
        for slot, pair in enumerate(self._pairs):
            self._slots[pair] = slot
            self._singles[pair & _LAST] = slot

    def forget(self) -> None:
        """Begins again with nothing."""
        self.__init__(self.most)  # type: ignore[misc]

    def _new(self, pair: int) -> int:
        """A slot for ``pair``, the oldest one's if all are taken."""
        slot = len(self._pairs)
        if slot < self.most:
            self._pairs.append(pair)
            self._tokens.extend([-1] * WIDTH)
            self._grades.extend([0] * WIDTH)
        else:
            slot = self._oldest
            self._oldest = (slot + 1) % self.most
            old = self._pairs[slot]
            del self._slots[old]
            if self._singles.get(old & _LAST) == slot:
                del self._singles[old & _LAST]
            self._pairs[slot] = pair
        self._slots[pair] = slot
        return slot
