"""Where the last tokens of a text occurred before, and how the text went on there (prompt lookup, SAM-Decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Matches are not followed back any further: the continuations of longer ones are right as often.
LONGEST_MATCH = 32
# Earlier occurrences of the last three tokens that are looked at, the latest first.
MOST_CANDIDATES = 8
# Support for a continuation by other occurrences of the last three tokens: all others went on differently, there are no
# others, at least one went on in the same way.
CONTESTED, LONE, SHARED = range(3)
# Separates texts; not a token.
SEPARATOR = -1
# Bits for a token id in the key of an n-gram; vocabularies have less than two million tokens.
BITS = 21


class Match(NamedTuple):
    """An earlier occurrence of a text's end: how many tokens are the same, and the index of the token that followed."""

    length: int
    position: int
    support: int


class SuffixIndex:
    """Finds the longest suffix of a text that occurred before, by hash chains as in LZ77, in constant time a token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # Position that followed the latest occurrence of one, two and three tokens.
        self._singles: dict[int, int] = {}
        self._pairs: dict[int, int] = {}
        self._triples: dict[int, int] = {}
        # For each position the one that followed the same three tokens before.
        self._earlier: list[int] = []
        # Keys of the last one, two and three tokens; negative, and so never found, where a separator is among them.
        self._last = (SEPARATOR, SEPARATOR, SEPARATOR)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens, ``SEPARATOR`` among them where one text ends and another begins."""
        text, earlier = self.tokens, self._earlier
        singles, pairs, triples = self._singles, self._pairs, self._triples
        single, pair, triple = self._last
        position = len(text)
        earlier += [-1] * (position - len(earlier))  # where an error, or an interrupt, has ended a step half-way
        for token in tokens:
            text.append(token)
            earlier.append(triples.get(triple, -1))
            triples[triple] = pairs[pair] = singles[single] = position
            triple = pair << BITS | token
            pair = single << BITS | token
            single = token
            position += 1
        self._last = single, pair, triple

    def match(self, tail: Sequence[int], shortest: int = 1) -> Match | None:
        """The longest suffix of ``tail`` (``LONGEST_MATCH`` tokens at most) that occurs and goes on, the latest one."""
        last = len(tail) - 1
        if last >= 2 and (longest := self._match_three(tail, last)):
            return longest if longest.length >= shortest else None
        if shortest <= 2 <= last + 1 and (position := self._pairs.get(tail[-2] << BITS | tail[-1], -1)) >= 0:
            return Match(2, position, LONE)
        if shortest <= 1 <= last + 1 and (position := self._singles.get(tail[-1], -1)) >= 0:
            return Match(1, position, LONE)
        return None

    def _match_three(self, tail: Sequence[int], last: int) -> Match | None:
        text, earlier = self.tokens, self._earlier
        position = self._triples.get((tail[-3] << BITS | tail[-2]) << BITS | tail[-1], -1)
        longest, where = 0, -1
        continuations = []
        for _ in range(MOST_CANDIDATES):
            if position < 0:
                break
            continuations.append(text[position])
            i, j = position - 4, last - 3
            while i >= 0 and j >= 0 and text[i] == tail[j]:
                i -= 1
                j -= 1
            if last - j > longest:
                longest, where = last - j, position
                if j < 0:
                    break
            position = earlier[position]
        if not longest:
            return None
        alike = continuations.count(text[where])
        support = SHARED if alike > 1 else LONE if alike == len(continuations) else CONTESTED
        return Match(longest, where, support)
