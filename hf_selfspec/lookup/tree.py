"""One tree of drafted tokens from all free sources, as large as pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from .evidence import AGREEMENT, GRADES, OWN, STORE, SUCCESSOR, Evidence, match_key
from .successors import Successors
from .suffix import LONGEST_MATCH, SEPARATOR, SuffixIndex

# Nodes that are reached less often are never drafted.
LEAST_REACH = 0.004
# Offered at one node: token, keys of the evidence for it, probability.
Offer = tuple[int, tuple[int, ...], float]


@dataclass(frozen=True)
class VerifyCosts:
    """Seconds that a round takes with 0, 1, 2, ... drafted tokens.

    Attributes:
        seconds: of a round with so many drafted tokens, the first one of a plain round.
    """

    seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Callable[[int], float], most: int) -> VerifyCosts:
        """Costs of 0 to ``most`` drafted tokens by a function of their number."""
        return cls(tuple(seconds(count) for count in range(most + 1)))

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """For each number of tokens the least that a further one costs, over all larger numbers."""
        last = len(self.seconds)
        return tuple(
            min(((self.seconds[m] - self.seconds[n]) / (m - n) for m in range(n + 1, last)), default=math.inf)
            for n in range(last)
        )


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens; node 0 is the row's last token, which is not listed.

    Attributes:
        tokens: of the nodes ``1..n``.
        parents: for each of them its parent, 0 for the row's last token. Parents come before children.
        reach: estimated probability that it is accepted.
        keys: the evidence for it; empty for nodes of the seed.
        offers: for each node from which the tree was grown all tokens that were offered there.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    reach: tuple[float, ...] = ()
    keys: tuple[tuple[int, ...], ...] = ()
    offers: dict[int, list[Offer]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def expected(self) -> float:
        """Tokens that the round is expected to bring."""
        return 1.0 + sum(self.reach)

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)

    def first(self, size: int) -> TokenTree:
        """The tree without the nodes that were taken last."""
        if size >= len(self):
            return self
        offers = {node: offered for node, offered in self.offers.items() if node <= size}
        return TokenTree(self.tokens[:size], self.parents[:size], self.reach[:size], self.keys[:size], offers)

    def walk(self, emitted: list[int]) -> Iterator[tuple[int, int]]:
        """The visited nodes, each with the token that came after it."""
        children = {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens), 1)}
        node: int | None = 0
        for token in emitted:
            yield node, token
            node = children.get((node, token))
            if node is None:
                return


@dataclass(frozen=True)
class Sources:
    """Where free tokens come from.

    Attributes:
        own: the row's text.
        store: earlier texts.
        successors: what the logits last held.
        evidence: how far each can be trusted.
    """

    own: SuffixIndex
    store: SuffixIndex
    successors: Successors
    evidence: Evidence


def grow(
    sources: Sources,
    costs: VerifyCosts,
    pace: float,
    deepest: int,
    branching: bool = True,
    seed: TokenTree | None = None,
) -> TokenTree:
    """Grows the tree that is expected to bring most tokens for its time.

    Nodes are taken by descending probability that they are reached and accepted; how many is what makes ``expected
    tokens - pace * seconds`` largest.

    Args:
        sources: where tokens come from.
        costs: seconds of a round by number of drafted tokens, which bounds it.
        pace: tokens per second that decoding makes at present: what a second is worth.
        deepest: the longest path.
        branching: whether a node may have several children.
        seed: nodes that are drafted already; they stay, as the first ones, and free ones are added.

    Returns:
        The tree, empty where nothing pays.
    """
    growth = _Growth(sources, deepest, branching, seed or TokenTree())
    seconds, slopes = costs.seconds, costs.slopes
    most = len(seconds) - 1
    size = kept = len(growth.tokens) - 1
    total = 0.0
    value = -pace * seconds[min(kept, most)]
    heap = growth.heap
    while heap and size < most:
        reach = -heap[0][0]
        if reach < LEAST_REACH or reach <= pace * slopes[size]:
            break
        size += 1
        total += reach
        growth.take(size)
        if total - pace * seconds[size] > value:
            value = total - pace * seconds[size]
            kept = size
    return growth.tree(kept)


class _Growth:
    """A tree while it grows."""

    def __init__(self, sources: Sources, deepest: int, branching: bool, seed: TokenTree) -> None:
        self.sources, self.deepest, self.branching, self.seed = sources, deepest, branching, seed
        known = sources.own.tokens
        self.tail = known[-LONGEST_MATCH:]
        self.heap: list[
            tuple[float, int, int, int, tuple[int, ...], tuple[int, int] | None, tuple[int, int] | None]
        ] = []
        self.pushed = 0
        self.tokens = [self.tail[-1] if known else SEPARATOR, *seed.tokens]
        self.parents = [-1, *seed.parents]
        self.reach = [1.0, *seed.reach]
        self.keys: list[tuple[int, ...]] = [()] * len(self.tokens)
        self.offers: dict[int, list[Offer]] = {}
        self.paths: list[list[int]] = [[]]
        for node, parent in enumerate(seed.parents, 1):
            self.paths.append([*self.paths[parent], self.tokens[node]])
        taken: list[dict[int, float]] = [{} for _ in self.tokens]
        for node, parent in enumerate(seed.parents, 1):
            taken[parent][self.tokens[node]] = self.reach[node] / max(self.reach[parent], 1e-9)
        for node in range(len(self.tokens)):
            if branching or not taken[node]:
                self.expand(node, self.own_match(node), self.store_match(node), taken[node])

    def own_match(self, node: int) -> tuple[int, int] | None:
        return self.sources.own.match((self.tail + self.paths[node])[-LONGEST_MATCH:])

    def store_match(self, node: int) -> tuple[int, int] | None:
        store = self.sources.store
        return store.match((self.tail + self.paths[node])[-LONGEST_MATCH:]) if store.tokens else None

    def take(self, node: int) -> None:
        """Takes the likeliest candidate as ``node``."""
        reach, _, parent, token, keys, own, stored = heappop(self.heap)
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(-reach)
        self.keys.append(keys)
        path = [*self.paths[parent], token]
        self.paths.append(path)
        if len(path) < self.deepest:
            self.expand(node, own or self.own_match(node), stored or self.store_match(node), {})

    def expand(
        self, node: int, own: tuple[int, int] | None, stored: tuple[int, int] | None, taken: dict[int, float]
    ) -> None:
        """Makes what can follow ``node`` candidates; ``taken`` are the seed's children and their probabilities."""
        path = self.paths[node]
        weights = self.sources.evidence.weights
        scores: dict[int, float] = {}
        evidence: dict[int, tuple[int, ...]] = {}
        own_token = stored_token = -1
        if own is not None:
            length, position = own
            known = self.sources.own.tokens
            # Where the text ends, it repeats.
            own_token = known[position] if position < len(known) else path[position - len(known)]
            if own_token >= 0:
                key = match_key(OWN, length)
                scores[own_token] = weights[key]
                evidence[own_token] = (key,)
        if stored is not None:
            length, position = stored
            earlier = self.sources.store.tokens
            stored_token = earlier[position] if position < len(earlier) else SEPARATOR
            if stored_token >= 0:
                key = match_key(STORE, length)
                if stored_token in scores:
                    scores[stored_token] += weights[key] + weights[AGREEMENT]
                    evidence[stored_token] += (key, AGREEMENT)
                else:
                    scores[stored_token] = weights[key]
                    evidence[stored_token] = (key,)
        before = path[-2] if len(path) > 1 else self.tail[-2 + len(path)] if len(self.tail) > 1 - len(path) else -1
        found = self.sources.successors.get(before, self.tokens[node])
        if found is not None:
            level, tokens, grades = found
            base = SUCCESSOR + GRADES * (level - 1)
            for token, grade in zip(tokens, grades):
                if token < 0:
                    break
                key = base + grade
                if token in scores:
                    scores[token] += weights[key] + weights[AGREEMENT + 1]
                    evidence[token] += (key, AGREEMENT + 1)
                else:
                    scores[token] = weights[key]
                    evidence[token] = (key,)
        if not scores:
            return
        odds = {token: math.exp(min(score, 12.0)) for token, score in scores.items()}
        total = 1.0 + sum(odds.values())
        offers = [(token, evidence[token], odd / total) for token, odd in odds.items()]
        self.offers[node] = offers
        self.push(node, offers, own, own_token, stored, stored_token, taken)

    def push(self, node: int, offers: list[Offer], own, own_token: int, stored, stored_token: int, taken) -> None:
        """Puts what was offered behind ``node`` into the heap."""
        reach = self.reach[node]
        if taken:
            # What is left of the probability beside the seed's children.
            left = 1.0 - sum(p for token, _, p in offers if token in taken)
            reach *= max(1.0 - sum(taken.values()), 0.0) / max(left, 1e-6)
            offers = [offer for offer in offers if offer[0] not in taken]
        if not self.branching and offers:
            offers = [max(offers, key=lambda offer: offer[2])]
        for token, keys, probability in offers:
            chance = reach * probability
            if chance < LEAST_REACH:
                continue
            self.pushed += 1
            heappush(
                self.heap,
                (
                    -chance,
                    self.pushed,
                    node,
                    token,
                    keys,
                    (own[0] + 1, own[1] + 1) if token == own_token else None,
                    (stored[0] + 1, stored[1] + 1) if token == stored_token else None,
                ),
            )

    def tree(self, size: int) -> TokenTree:
        end = size + 1
        return TokenTree(
            tuple(self.tokens[1:end]),
            tuple(self.parents[1:end]),
            tuple(self.reach[1:end]),
            tuple(self.keys[1:end]),
            {node: offers for node, offers in self.offers.items() if node < end},
        )
