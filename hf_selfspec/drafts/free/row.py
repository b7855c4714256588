"""Free drafts of one row."""

from collections.abc import Sequence

import numpy as np

from .kept_texts import LookupFindings
from .rates import Offer
from .suffix import LONGEST_MATCH, SEPARATOR, SuffixIndex
from .tree import Sources, TokenTree, matched

# The fewest tokens that have to be the same for a match to be told apart from chance without successors.
_SURE = 3
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
    def sources(self) -> Sources:
        """Where trees grow from."""
        store, successors = self.findings.store, self.findings.successors
        return Sources(self.text, store, successors, self._rates, self._number, self._acceptance_ratio)

    @property
    def _acceptance_ratio(self) -> float:
        """How often drafts of this text were right of late, divided by how often they were expected to be."""
        return min((self._accepted + _DOUBTED) / (self._expected + _DOUBTED), 1.0)

    def likelihood(self) -> float:
        """How likely the token that followed an earlier occurrence of the last ones is next; 0 for short matches."""
        rates, tail = self._rates.rates, self.text.tokens[-LONGEST_MATCH:]
        self._predicted = [(token, key, rates[key]) for token, key, _ in matched(self.sources, tail, None, _SURE)]
        return self._acceptance_ratio * max((rate for _, _, rate in self._predicted), default=0.0)

    def follow(self, emitted: Sequence[int]) -> None:
        """Appends tokens without a draft, and learns whether :meth:`likelihood` has predicted them."""
        self._rates.see(self._predicted, emitted[0])
        self.text.extend(emitted)

    def learn(self, tree: TokenTree, emitted: Sequence[int], tokens: np.ndarray, shares: np.ndarray) -> None:
        """Learns from a round and appends its ``emitted`` tokens; ``tokens`` ``[n + 1, w]`` are the likeliest after
        nodes ``0..n``, and ``shares`` their probabilities."""
        visited = set()
        for node, token in tree.walk(emitted):
            visited.add(node)
            if node in tree.offers:
                self._rates.see(tree.offers[node], token)
        if tree.offers and len(tree):
            free = [node for node in range(1, len(tree) + 1) if tree.parents[node - 1] in tree.offers]
            expected = sum(tree.reach[node - 1] for node in free) / self._acceptance_ratio
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
