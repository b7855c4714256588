"""Where the last tokens of a text occurred before, and how the text went on there (prompt lookup, SAM-Decoding)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# A match is not followed back any further: longer ones are continued as often as these.
LONGEST_MATCH = 32
# Earlier occurrences of the last three tokens that are looked at, the latest first.
MOST_CANDIDATES = 8
# Stands between texts; no token.
SEPARATOR = -1
# Bits for a token id in the key of an n-gram; vocabularies have less than a million tokens.
_BITS = 21


class SuffixIndex:
    """Finds the longest suffix of a text that occurred in the indexed tokens before and goes on there.

    Hash chains as in LZ77: the latest occurrence of each three tokens, and for each position the one before it. Where
    three tokens do not occur, the latest occurrence of two or one counts. Adding a token takes constant time.

    Args:
        most: tokens that are kept at most. When there are more, the older half leaves. ``None`` for all.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.tokens: list[int] = []
        # Position that followed the latest occurrence of one, two and three tokens.
        self._singles: dict[int, int] = {}
        self._pairs: dict[int, int] = {}
        self._triples: dict[int, int] = {}
        # For each position the one that followed the same three tokens before.
        self._earlier: list[int] = []
        # Keys of the last one, two and three tokens; negative, and so never found, where a separator is among them.
        self._last = (SEPARATOR, SEPARATOR, SEPARATOR)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, ``SEPARATOR`` among them where one text ends and another begins."""
        known, earlier = self.tokens, self._earlier
        singles, pairs, triples = self._singles, self._pairs, self._triples
        single, pair, triple = self._last
        position = len(known)
        for token in tokens:
            earlier.append(triples.get(triple, -1))
            triples[triple] = pairs[pair] = singles[single] = position
            known.append(token)
            triple = pair << _BITS | token
            pair = single << _BITS | token
            single = token
            position += 1
        self._last = single, pair, triple
        if self.most is not None and position > self.most:
            self._drop(position - self.most // 2)

    def match(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """The longest suffix of ``tail`` that occurs and goes on; of several the latest.

        Args:
            tail: the last tokens of a text, ``LONGEST_MATCH`` of them at most.

        Returns:
            ``(length, position)`` of the match and of the token that follows it, ``None`` where nothing matches.
        """
        last = len(tail) - 1
        if last >= 2:
            known = self.tokens
            position = self._triples.get((tail[-3] << _BITS | tail[-2]) << _BITS | tail[-1], -1)
            best, where = 0, -1
            for _ in range(MOST_CANDIDATES):
                if position < 0:
                    break
                i, j = position - 4, last - 3
                while i >= 0 and j >= 0 and known[i] == tail[j]:
                    i -= 1
                    j -= 1
                if last - j > best:
                    best, where = last - j, position
                    if j < 0:
                        break
                position = self._earlier[position]
            if best:
                return best, where
        if last >= 1 and (position := self._pairs.get(tail[-2] << _BITS | tail[-1], -1)) >= 0:
            return 2, position
        if last >= 0 and (position := self._singles.get(tail[-1], -1)) >= 0:
            return 1, position
        return None

    def _drop(self, count: int) -> None:
        """Forgets the first ``count`` tokens."""
        kept = self.tokens[count:]
        self.__init__(self.most)  # type: ignore[misc]
        self.extend(kept)
