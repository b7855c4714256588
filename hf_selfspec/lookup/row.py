"""Free drafts of one row, and what all rows share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..control.costs import RoundCosts
from .rates import Offer, Rates
from .successors import Successors
from .suffix import LONGEST_MATCH, SEPARATOR, SuffixIndex, texts_of
from .tree import Guide, Sources, TokenTree, grow, matched

# The fewest tokens that have to be the same for a match to be told apart from chance without successors.
_SURE = 3
# Expected tokens that weigh as much as what a text has shown, and the weight of earlier drafts against the next one.
_DOUBTED, _KEPT = 3.0, 0.97
# The likeliest next tokens of a position, the likeliest first, and their probabilities.
Top = tuple[Sequence[int], Sequence[float]]


class LookupKnowledge:
    """What free drafts know across rows and calls. Threads that share it take turns.

    Args:
        most_pairs: pairs of tokens whose successors are kept.
        most_stored: tokens of earlier texts that are kept, 0 for none.
    """

    def __init__(self, most_pairs: int = 65_536, most_stored: int = 65_536) -> None:
        self.successors = Successors(most_pairs)
        self.store = SuffixIndex(most_stored)
        self._rates: dict[str, Rates] = {}
        self._texts = 0

    def rates(self, kind: str) -> Rates:
        """How often each source was right in one kind of call, such as greedy or sampled."""
        if kind not in self._rates:
            self._rates[kind] = Rates()
        return self._rates[kind]

    def next_text(self) -> int:
        """The number of a new text."""
        self._texts += 1
        return self._texts

    def add_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """Adds texts to the store, without their beginnings where it or a later text has these already (in chats).

        Of more than it keeps, only the last ones are looked at.
        """
        most, known, kept = self.store.most or 0, set[tuple[int, ...]](), list[list[int]]()
        for text in reversed(texts):
            if sum(map(len, kept)) >= most:
                break
            if new := self._unknown_end(text, known):
                kept.append([SEPARATOR, *new[-(most // 2) :]])
        added = list(chain(*reversed(kept)))
        if len(added) >= most:
            added, self.store = added[len(added) - most :], SuffixIndex(most)
        self.store.extend(added)

    def _unknown_end(self, text: Sequence[int], known: set[tuple[int, ...]]) -> Sequence[int]:
        """The end of a text that is neither in the store nor among ``known`` pieces, to which its own are added."""
        new = None
        for start in range(0, len(text), LONGEST_MATCH):
            piece = tuple(text[start : start + LONGEST_MATCH])
            if new is None and not (piece in known or self._is_stored(piece)):
                # The rest is stored with the tokens before it, by which it is found.
                new = max(0, start - LONGEST_MATCH)
            if len(piece) == LONGEST_MATCH:
                known.add(piece)
        return () if new is None else text[new:]

    def _is_stored(self, piece: Sequence[int]) -> bool:
        found = self.store.match(piece)
        return found is not None and found.length == LONGEST_MATCH

    def forget(self) -> None:
        """Forgets everything."""
        self.successors.forget()
        self.store = SuffixIndex(self.store.most)
        self._rates.clear()

    def state(self) -> dict[str, Any]:
        """All that is known, as arrays and lists of numbers."""
        return {
            # Texts could be reconstructed from these, so they are left out where texts are not kept.
            "successors": (self.successors if self.store.most else Successors()).state(),
            "store": np.array(self.store.tokens, np.int32),
            "rates": {kind: rates.state() for kind, rates in self._rates.items()},
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Adds unknown texts (as older ones) and pairs of another's :meth:`state`, the latest first, up to the limits.

        Raises:
            ValueError: it is not such a state; nothing is changed then.
        """
        theirs = _stored(state)
        self.successors.merge(state["successors"])
        mine = self.store.tokens
        older: list[int] = []
        for text in reversed(_unknown(texts_of(theirs), texts_of(mine))):
            if len(older) + len(text) + 1 > (self.store.most or 0) - len(mine):
                break
            older = [SEPARATOR, *text, *older]
        if older:
            store = SuffixIndex(self.store.most)
            store.extend(chain(older, mine))
            self.store = store

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned.

        Raises:
            ValueError: it is not such a state; nothing is changed then.
        """
        store = SuffixIndex(self.store.most)
        store.extend(_stored(state))
        rates = {kind: Rates() for kind in state["rates"]}
        for kind, one in rates.items():
            one.restore(state["rates"][kind])
        self.successors.restore(state["successors"])
        self.store = store
        self._rates = rates


def _stored(state: dict[str, Any]) -> list[int]:
    """The tokens of a store."""
    stored = np.asarray(state["store"], np.int32)
    if stored.ndim != 1 or (stored < SEPARATOR).any():
        raise ValueError("The store contains something that is not a token.")
    tokens: list[int] = stored.tolist()
    return tokens


def _unknown(texts: Sequence[Sequence[int]], known: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The texts that are not among the known ones; the beginning of either may be missing."""
    ends: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for text in known:
        ends.setdefault(tuple(text[-LONGEST_MATCH:]), []).append(text)

    def is_known(text: Sequence[int]) -> bool:
        like = ends.get(tuple(text[-LONGEST_MATCH:]), [])
        return any(text[-(shorter := min(len(text), len(one))) :] == one[-shorter:] for one in like)

    return [text for text in texts if not is_known(text)]


class LookupRow:
    """The free drafts of one row.

    Args:
        knowledge: what all rows share.
        kind: the kind of call, such as greedy or sampled.
    """

    def __init__(self, knowledge: LookupKnowledge, kind: str = "") -> None:
        self.knowledge = knowledge
        self.own = SuffixIndex()
        self._rates = knowledge.rates(kind)
        self._text = knowledge.next_text()
        self._expected = self._accepted = 0.0
        self._foretold: list[Offer] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends the prompt, or tokens that did not come from a draft."""
        self.own.extend(tokens)

    def propose(
        self,
        costs: RoundCosts,
        pace: float,
        deepest: int,
        branching: bool = True,
        seed: TokenTree | None = None,
        guide: Guide | None = None,
    ) -> TokenTree:
        """Returns the draft for the next round; see :func:`grow`."""
        return grow(self._sources, costs, pace, deepest, branching, seed, guide, self._ease)

    @property
    def _sources(self) -> Sources:
        known = self.knowledge
        return Sources(self.own, known.store, known.successors, self._rates, self._text)

    @property
    def _ease(self) -> float:
        """How often drafts of this text were right of late, divided by how often they were expected to be."""
        return min((self._accepted + _DOUBTED) / (self._expected + _DOUBTED), 1.0)

    def likelihood(self) -> float:
        """How likely the token that followed an earlier occurrence of the last ones is next; 0 for short matches."""
        found = matched(self._sources, self.own.tokens[-LONGEST_MATCH:], None, _SURE)
        rates = self._rates.rates
        self._foretold = [(token, key, rates[key]) for token, key, _ in found]
        return self._ease * max((offer[2] for offer in self._foretold), default=0.0)

    def follow(self, emitted: Sequence[int]) -> None:
        """Appends tokens without a draft, and learns whether they were foretold by :meth:`likelihood`."""
        self._rates.see(self._foretold, emitted[0])
        self._foretold = []
        self.own.extend(emitted)

    def learn(self, tree: TokenTree, emitted: Sequence[int], tops: Sequence[Top]) -> None:
        """Learns from a round and appends the tokens that it emitted.

        Args:
            tree: the draft.
            emitted: the tokens of the round, accepted ones and the one after them.
            tops: for each of the nodes ``0..n``, accepted or not, the model's likeliest next tokens, the likeliest
                first, and their probabilities; two empty lists where they are not known.
        """
        visited = set()
        for node, token in tree.walk(emitted):
            visited.add(node)
            if node in tree.offers:
                self._rates.see(tree.offers[node], token)
        if tree.offers and len(tree):
            free = [node for node in range(1, len(tree) + 1) if tree.parents[node - 1] in tree.offers]
            self._expected = _KEPT * self._expected + sum(tree.reach[node - 1] for node in free) / self._ease
            self._accepted = _KEPT * self._accepted + sum(node in visited for node in free)
        own = self.own.tokens
        tokens = (own[-1], *tree.tokens)
        befores = (own[-2] if len(own) > 1 else SEPARATOR, *(tokens[parent] for parent in tree.parents))
        # Of a pair that occurs twice, the occurrence in the emitted text is recorded last and replaces the other.
        for node in sorted(range(len(tokens)), key=visited.__contains__):
            if befores[node] >= 0 and tops[node][0]:
                self.knowledge.successors.see((befores[node], tokens[node]), *tops[node], self._text)
        self.own.extend(emitted)

    def read(self, tokens: Sequence[int], tops: Sequence[Top]) -> None:
        """Appends a text that the model has read.

        Args:
            tokens: the text.
            tops: for each of its tokens, the model's likeliest next tokens and their probabilities.
        """
        before = self.own.tokens[-1] if self.own.tokens else SEPARATOR
        for token, top in zip(tokens, tops, strict=True):
            if before >= 0:
                self.knowledge.successors.see((before, token), *top, self._text)
            before = token
        self.own.extend(tokens)
