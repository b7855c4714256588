"""The model's likeliest tokens when it last saw a pair of tokens (Token Recycling, 2408.08696, with pairs as keys)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...model.logits import WIDTH
from .suffix import BITS

_LAST = (1 << BITS) - 1


class Likeliest(NamedTuple):
    """Successors of the last two tokens, or of the last one alone, the likeliest first; -1 where there are fewer."""

    is_pair: bool
    text: int
    tokens: list[int]
    probabilities: list[float]


class Successors:
    """The likeliest successors of the last two tokens, else of the last; of the latest ``most`` pairs."""

    def __init__(self, most: int = 65_536) -> None:
        self.most = most
        self._slots: dict[int, int] = {}
        # For each token, the slot of the latest pair that ends with it.
        self._singles: dict[int, int] = {}
        self._pairs: list[int] = []
        self._texts: list[int] = []
        self._tokens = np.full((most, WIDTH), -1, np.int32)
        self._probabilities = np.zeros((most, WIDTH), np.float32)
        self._oldest = 0

    def see(self, pairs: Sequence[tuple[int, int]], tokens: np.ndarray, shares: np.ndarray, text: int = 0) -> None:
        """Records the likeliest tokens ``[n, w]`` after ``n`` pairs, and their probabilities, in the text of that
        number; of a pair that occurs twice, the last ones."""
        slots = []
        for before, token in pairs:
            key = before << BITS | token
            slot = self._slots.get(key)
            if slot is None:
                slot = self._new(key)
            self._singles[token] = slot
            self._texts[slot] = text
            slots.append(slot)
        width = tokens.shape[1]
        self._tokens[slots, :width], self._probabilities[slots, :width] = tokens, shares
        if width < WIDTH:
            self._tokens[slots, width:], self._probabilities[slots, width:] = -1, 0.0

    def get(self, before: int, token: int) -> Likeliest | None:
        slot = self._slots.get(before << BITS | token)
        is_pair = slot is not None
        if slot is None:
            slot = self._singles.get(token)
        if slot is None:
            return None
        return Likeliest(is_pair, self._texts[slot], self._tokens[slot].tolist(), self._probabilities[slot].tolist())

    def forget(self) -> None:
        Successors.__init__(self, self.most)

    def state(self) -> dict[str, np.ndarray]:
        order = np.roll(np.arange(len(self._pairs)), -self._oldest)
        return {
            "pairs": np.array(self._pairs, np.int64)[order],
            "tokens": self._tokens[order],
            "probabilities": self._probabilities[order],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned, only its latest pairs if there are too many."""
        pairs, tokens, probabilities = (state[name][-self.most :] for name in ("pairs", "tokens", "probabilities"))
        self.forget()
        self._tokens[: len(pairs)], self._probabilities[: len(pairs)] = tokens, probabilities
        for pair in pairs.tolist():
            self._singles[pair & _LAST] = self._new(pair)

    def _new(self, key: int) -> int:
        slot = len(self._pairs)
        if slot < self.most:
            self._texts.append(0)  # first, and a slot may lack its pair: an error may end these steps anywhere
            self._pairs.append(key)
        else:
            slot = self._oldest
            self._oldest = (slot + 1) % self.most
            old = self._pairs[slot]
            self._slots.pop(old, None)
            if self._singles.get(old & _LAST) == slot:
                del self._singles[old & _LAST]
            self._pairs[slot] = key
        self._slots[key] = slot
        return slot
