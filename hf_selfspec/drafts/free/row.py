"""The free drafts of one row: what its text, earlier texts and the model's logits offer next, and how often each kind
of such evidence was right, counted from what verification accepts."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .successors import Likeliest
from .suffix import CONTESTED, LONGEST_MATCH, SEPARATOR, SuffixIndex

if TYPE_CHECKING:
    from .kept_texts import LookupFindings
    from .tree import TokenTree

# What was offered at one place: the token, the kind of evidence for it, its probability there.
Offer = tuple[int, int, float]


class Run(NamedTuple):
    """A long match: the text that it is in, how many tokens are the same, and where, and how likely, that goes on."""

    tokens: list[int]
    length: int
    position: int
    key: int
    step: int  # what the next class of lengths adds to the key


# The weight of a first guess in observations, and the number of observations that are remembered.
_PRIOR, _MEMORY = 8.0, 200.0

# Classes of matches by their length: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16-31, longer.
_CLASSES = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6) + (7,) * 16 + (8,)
_NUM_CLASSES = _CLASSES[-1] + 1

# Grades of a probability: each step multiplies the odds by four.
_EDGES = (0.0154, 0.0588, 0.2, 0.5, 0.8, 0.9412, 0.9846)
_NUM_GRADES = len(_EDGES) + 1
# Successors of one token alone: higher probabilities do not make them likelier.
_EDGES_OF_SINGLE = _EDGES[:3]

# How likely a token that a match proposes is among the successors of the last tokens.
_LIKELY, _POSSIBLE, _UNLIKELY, _UNKNOWN = range(4)
# The lowest probability of a likely token, and that of a possible one.
_LIKELY_FROM, _POSSIBLE_FROM = 0.5, 0.05

# Where the keys of each source begin.
_TEXT = 0
_STORE = _TEXT + _NUM_CLASSES * 4 * 3
_SUCCESSOR = _STORE + _NUM_CLASSES * 4 * 2
_NUM_KEYS = _SUCCESSOR + 4 * _NUM_GRADES

# First guesses, from SmolLM2-135M-Instruct, greedy, 45 texts of nine kinds: matches in the text and in the store, by
# their length; what the successors' view and other occurrences add, in log-odds.
_OF_TEXT = (0.35, 0.55, 0.68, 0.78, 0.8, 0.84, 0.93, 0.955, 0.975)
_OF_STORE = (0.03, 0.08, 0.15, 0.4, 0.6, 0.65, 0.85, 0.9, 0.95)
_OF_VIEW = {_LIKELY: 0.1, _POSSIBLE: -0.7, _UNLIKELY: -1.1, _UNKNOWN: 0.0}
_OF_SUPPORT = (-1.6, 0.0, 0.3)
# Successors of one token, seen in other texts and in this one, then those of two tokens.
_OF_SUCCESSOR = (
    (0.005, 0.02, 0.02, 0.07),
    (0.005, 0.03, 0.06, 0.2),
    (0.01, 0.01, 0.03, 0.11, 0.16, 0.22, 0.4, 0.4),
    (0.02, 0.08, 0.13, 0.21, 0.34, 0.48, 0.5, 0.5),
)
# The fewest tokens that have to be the same for a match to be told apart from chance without successors, and in earlier
# texts.
_SURE, _SHORTEST_STORED = 3, 4
# Matches of so many tokens are followed without a look at what else might come: with the rates above, each of the next
# 31 tokens is likelier than any other continuation of those before it.
_LONG = 8
# The sum of all probabilities and a little more, so that something remains when all known ones are subtracted.
_WHOLE = 1.001
# Tokens that are taken to have been right as often as expected before a text has shown any, and the weight of earlier
# drafts against the next one.
_DOUBTED, _KEPT = 3.0, 0.97


def view_of(probability: float | None) -> int:
    """How likely a token is by its probability among successors, ``None`` where no successors are known."""
    if probability is None:
        return _UNKNOWN
    return _LIKELY if probability >= _LIKELY_FROM else _POSSIBLE if probability >= _POSSIBLE_FROM else _UNLIKELY


def text_key(length: int, view: int, support: int) -> int:
    """The key of a match in the row's own text."""
    return _TEXT + (_CLASSES[min(length, 32)] * 4 + view) * 3 + support


def store_key(length: int, view: int, is_longer: bool) -> int:
    """The key of a match in earlier texts, ``is_longer`` than that in the row's own text."""
    return _STORE + (_CLASSES[min(length, 32)] * 4 + view) * 2 + is_longer


def successor_keys(is_pair: bool, is_fresh: bool) -> tuple[int, tuple[float, ...]]:
    """The first key of successors of a pair or a token, here or elsewhere, and the edges, each of which adds 1."""
    return _SUCCESSOR + (2 * is_pair + is_fresh) * _NUM_GRADES, _EDGES if is_pair else _EDGES_OF_SINGLE


@cache
def _first_guesses() -> tuple[float, ...]:
    guesses = [0.0] * _NUM_KEYS
    for length in (1, 2, 3, 4, 5, 7, 10, 16, 32):
        at = _CLASSES[length]
        for view, by_view in _OF_VIEW.items():
            for support, by_support in enumerate(_OF_SUPPORT):
                guesses[text_key(length, view, support)] = _shifted(_OF_TEXT[at], by_view + by_support)
            for is_longer in (False, True):
                guesses[store_key(length, view, is_longer)] = _shifted(_OF_STORE[at], by_view - (not is_longer))
    for source, rates in enumerate(_OF_SUCCESSOR):
        for grade, rate in enumerate(rates):
            guesses[_SUCCESSOR + source * _NUM_GRADES + grade] = rate
    return tuple(guesses)


def _shifted(probability: float, by: float) -> float:
    return 1 / (1 + (1 - probability) / probability * math.exp(-by))


class Rates:
    """How often offered tokens were right, by kind of evidence, where those offered before them were wrong."""

    def __init__(self) -> None:
        self.rates = list(_first_guesses())
        self._counts = [_PRIOR] * _NUM_KEYS

    def see(self, offers: Sequence[Offer], token: int) -> None:
        """Records which of the tokens that were offered at one place came next, if any did."""
        rates, counts = self.rates, self._counts
        for offered, key, _ in offers:
            counts[key] = count = min(counts[key] + 1.0, _MEMORY)
            if offered == token:
                rates[key] += (1.0 - rates[key]) / count
                return
            rates[key] -= rates[key] / count

    def state(self) -> dict[str, list[float]]:
        return {"rates": list(self.rates), "seen": list(self._counts)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Rates:
        """The inverse of :meth:`state`."""
        restored = cls()
        restored.rates, restored._counts = list(state["rates"]), list(state["seen"])
        return restored


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
        self.run: Run | None = None  # the match that was offered first, if that is a long one

    def follow_run(self, run: Run, path: Sequence[int]) -> tuple[list[Offer], Run | None]:
        """What a long match offers next, whose last token is the last one of ``path`` after the text."""
        position, length = run.position + 1, min(run.length + 1, LONGEST_MATCH)
        ahead, token = position - len(run.tokens), SEPARATOR
        if ahead < 0:
            token = run.tokens[position]
        elif run.tokens is self.text.tokens:  # this text goes on with the path
            token = path[ahead]
        if token == SEPARATOR:
            return [], None
        key = run.key + run.step * (_CLASSES[length] - _CLASSES[run.length])
        return [(token, key, self._rates.rates[key])], Run(run.tokens, length, position, key, run.step)

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
            matches = [stored, *others] if is_longer else [*matches, stored] if others else matches
        match, tokens, step = (in_store, store.tokens, 8) if is_longer else (in_text, text.tokens, 12)
        is_long = match is not None and match.length >= _LONG
        self.run = Run(tokens, match.length, match.position, matches[0][1], step) if match and is_long else None
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
