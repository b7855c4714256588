"""The free drafts of one row: what its text, earlier texts and the model's logits offer next, and how often that was
right."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .kept_texts import LookupFindings
from .rates import Offer, store_key, successor_keys, text_key, view_of
from .successors import Likeliest
from .suffix import CONTESTED, LONGEST_MATCH, SEPARATOR, SuffixIndex

if TYPE_CHECKING:
    from .tree import TokenTree

# The fewest tokens that have to be the same for a match to be told apart from chance without successors, and in earlier
# texts.
_SURE, _SHORTEST_STORED = 3, 4
# The sum of all probabilities and a little more, so that something remains when all known ones are subtracted.
_WHOLE = 1.001
# Tokens that are taken to have been right as often as expected before a text has shown any, and the weight of earlier
# drafts against the next one.
_DOUBTED, _KEPT = 3.0, 0.97


class LookupRow:
    """The free drafts of one row after its prompt, in a call of one ``mode``, such as greedy or sampled."""

    def __init__(self, findings: LookupFindings, mode: str, prompt: Sequence[int]) -> None:
        self.findings = findings
        self.text = SuffixIndex()
        self.text.extend(prompt)
        with findings.lock:
            self._rates = findings.rates[mode]
        self._number = findings.next_text()
        self._expected = self._accepted = 0.0
        self._predicted: list[Offer] = []

    @property
    def acceptance_ratio(self) -> float:
        """How often drafts of this text were right of late, divided by how often they were expected to be."""
        return min((self._accepted + _DOUBTED) / (self._expected + _DOUBTED), 1.0)

    def offers(self, tail: Sequence[int], least: float) -> list[Offer]:
        """What may come after the ``tail`` of a text with at least this probability, the surest evidence first."""
        rates = self._rates.rates
        successors = self.findings.successors.get(tail[-2], tail[-1]) if len(tail) > 1 else None
        left, whole = 1.0, _WHOLE
        offers: list[Offer] = []
        for token, key, share in self._matched(tail, successors):
            offers.append((token, key, left * rates[key]))
            left *= 1.0 - rates[key]
            whole -= share
        if successors is None:
            return offers
        named = [offer[0] for offer in offers]
        first_key, edges = successor_keys(successors.is_pair, successors.text == self._number)
        for token, share in zip(successors.tokens, successors.probabilities, strict=True):
            if token < 0 or left < least:
                break
            if token not in named:
                key = first_key + bisect(edges, share / whole)
                probability = left * rates[key]
                offers.append((token, key, probability))
                left -= probability
                whole -= share
        return offers

    def _matched(
        self, tail: Sequence[int], successors: Likeliest | None, shortest: int = 1
    ) -> list[tuple[int, int, float]]:
        """The tokens that followed the longest matches, their keys, and the share of each among the successors."""
        text, store = self.text, self.findings.store
        in_text, in_store = text.match(tail, shortest), store.match(tail, _SHORTEST_STORED)
        if in_store is not None and store.tokens[in_store.position] == SEPARATOR:
            in_store = None
        is_longer = in_store is not None and (in_text is None or in_store.length > in_text.length)
        matches: list[tuple[int, int, float]] = []
        if in_text is not None:
            token = text.tokens[in_text.position]
            # Successors of a single token are worth less than a match of two.
            is_judged = in_text.length == 1 or (successors is not None and successors.is_pair)
            share = _share(successors if is_judged else None, token)
            support = CONTESTED if is_longer else in_text.support
            matches.append((token, text_key(in_text.length, view_of(share), support), share or 0.0))
        if in_store is not None:
            token = store.tokens[in_store.position]
            share = _share(successors, token)
            stored = token, store_key(in_store.length, view_of(share), is_longer), share or 0.0
            others = [match for match in matches if match[0] != token]
            # The longer match comes first.
            return [stored, *others] if is_longer else [*matches, stored] if others else matches
        return matches

    def likelihood(self) -> float:
        """How likely the token that followed an earlier occurrence of the last ones is next; 0 for short matches."""
        rates, tail = self._rates.rates, self.text.tokens[-LONGEST_MATCH:]
        self._predicted = [(token, key, rates[key]) for token, key, _ in self._matched(tail, None, _SURE)]
        return self.acceptance_ratio * max((rate for _, _, rate in self._predicted), default=0.0)

    def follow(self, emitted: Sequence[int]) -> None:
        """Appends tokens without a draft, and learns whether :meth:`likelihood` has predicted them."""
        self._rates.see(self._predicted, emitted[0])
        self._predicted = []
        self.text.extend(emitted)

    def learn(self, tree: TokenTree, emitted: Sequence[int], tokens: np.ndarray, shares: np.ndarray) -> None:
        """Learns from a round and appends its ``emitted`` tokens; ``tokens`` ``[n + 1, w]`` are the likeliest after
        nodes ``0..n``, and ``shares`` their probabilities."""
        self._predicted, visited = [], set()
        for node, token in tree.walk(emitted):
            visited.add(node)
            if node in tree.offers:
                self._rates.see(tree.offers[node], token)
        if tree.offers and len(tree):
            free = [node for node in range(1, len(tree) + 1) if tree.parents[node - 1] in tree.offers]
            expected = sum(tree.reach[node - 1] for node in free) / self.acceptance_ratio
            self._expected = _KEPT * self._expected + expected
            self._accepted = _KEPT * self._accepted + sum(node in visited for node in free)
        before, last = [SEPARATOR, *self.text.tokens[-2:]][-2:]
        nodes = (last, *tree.tokens)
        befores = (before, *(nodes[parent] for parent in tree.parents))
        # Of a pair that occurs twice, the occurrence in the emitted text is recorded last and replaces the other.
        order = sorted(range(int(before < 0), len(nodes)), key=visited.__contains__)
        pairs = [(befores[node], nodes[node]) for node in order]
        self.findings.successors.see(pairs, tokens[order], shares[order], self._number)
        self.text.extend(emitted)


def _share(successors: Likeliest | None, token: int) -> float | None:
    """The probability of ``token`` among successors, ``None`` where none are known."""
    if successors is None:
        return None
    return successors.probabilities[successors.tokens.index(token)] if token in successors.tokens else 0.0
