"""Grows one tree of drafted tokens from all free sources, as large as pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from ...model.layout import depths_of
from ..grammar.rows import DraftCursor
from .row import LookupRow, Offer, Run
from .suffix import LONGEST_MATCH, SEPARATOR

# Nodes that are reached less often are never drafted.
LEAST_REACH = 0.004
# The key of a token that only a guide named.
_NO_KEY = -1


@dataclass(frozen=True)
class TokenTree:
    """Drafted nodes ``1..n`` after node 0, the row's last token: tokens, parents (which come first), the probability to
    ``reach`` each, and ``offers``, for some nodes all free tokens that may follow."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    reach: tuple[float, ...] = ()
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
        return max(depths_of(self.parents))

    def first(self, size: int) -> TokenTree:
        """The tree with only the ``size`` nodes that were taken first."""
        if size >= len(self):
            return self
        offers = {node: offered for node, offered in self.offers.items() if node <= size}
        return TokenTree(self.tokens[:size], self.parents[:size], self.reach[:size], offers)

    def walk(self, emitted: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The nodes that the ``emitted`` tokens visit, each with the token that came after it."""
        children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True), 1)
        }
        node: int | None = 0
        for token in emitted:
            if node is None:
                return
            yield node, token
            node = children.get((node, token))


def grow(
    row: LookupRow | None,
    costs: tuple[float, ...],
    pace: float,
    deepest: int,
    branching: bool = True,
    guide: DraftCursor | None = None,
) -> TokenTree:
    """Grows the tree that is expected to bring the most tokens for its time, of what a row offers, if there is one.

    Nodes are taken in order of descending probability that they are accepted; their number maximises
    ``expected tokens - pace * seconds``.

    The tree is no larger and no deeper than ``costs``, the seconds of rounds with 0, 1, 2, ... drafted tokens, and
    ``deepest``. ``pace`` are tokens per second at present, which is what a second is worth; 0 where that is not known
    yet. ``guide`` forbids tokens, and names those that have to come next.
    """
    growth = _Growth(row, deepest, branching, guide)
    heap = growth.heap
    pace = max(pace, 1.0 / costs[0])  # a plain round brings one token
    prices, least = [pace * seconds for seconds in costs], _least_added(costs)
    most = len(prices) - 1
    size = kept = 0
    gain, best = 0.0, -prices[0]
    while heap and size < most and (reach := -heap[0][0]) > pace * least[size]:  # no later node is likelier
        size += 1
        gain += reach
        growth.take_likeliest()
        if gain - prices[size] > best:
            best = gain - prices[size]
            kept = size
    return growth.tree().first(kept)


@lru_cache
def _least_added(costs: tuple[float, ...]) -> tuple[float, ...]:
    """For each number of tokens, the least time of a further one in any larger draft: the slope of the lower convex
    hull of what larger ones cost."""
    hull, least = [len(costs) - 1], [0.0]
    for few in range(len(costs) - 2, -1, -1):
        slopes = [(costs[many] - costs[few]) / (many - few) for many in hull[-2:]]
        while len(slopes) > 1 and slopes[0] <= slopes[1]:
            hull.pop()
            slopes = [(costs[many] - costs[few]) / (many - few) for many in hull[-2:]]
        least.append(slopes[-1])
        hull.append(few)
    return tuple(reversed(least))


class _Growth:
    """A growing tree, and a heap of possible nodes: minus their probability, a running number, parent, token."""

    def __init__(self, row: LookupRow | None, deepest: int, branching: bool, guide: DraftCursor | None) -> None:
        self.row, self.deepest, self.branching, self.guide = row, deepest, branching, guide
        self.text_tail = [] if row is None else row.text.tokens[-LONGEST_MATCH:]
        self.heap: list[tuple[float, int, int, int]] = []
        self.count = 0
        self.tokens, self.parents, self.reach = [SEPARATOR], [-1], [1.0]
        self.offers: dict[int, list[Offer]] = {}
        self.paths: list[list[int]] = [[]]
        self.runs: dict[int, tuple[int, Run]] = {}  # of nodes the token that a long match offers next
        if deepest:
            self.expand(0, None)

    def take_likeliest(self) -> None:
        reach, _, parent, token = heappop(self.heap)
        path = [*self.paths[parent], token]
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(-reach)
        self.paths.append(path)
        if len(path) < self.deepest:
            offered, run = self.runs.get(parent, (None, None))
            self.expand(len(self.tokens) - 1, run if offered == token else None)

    def expand(self, node: int, run: Run | None) -> None:
        """Adds the tokens that can follow ``node`` to the heap; it is a token of a ``run``, if that is given."""
        reach, path = self.reach[node], self.paths[node]
        likely = None if self.guide is None else self.guide.likely(path)
        if likely is not None and likely[1] == 1.0:
            return self.push(reach, node, likely[0])
        offers: list[Offer] = []
        if self.row is not None:
            reach *= 1.0 if node else self.row.acceptance_ratio
            offers, run = ([], None) if run is None else self.row.follow_run(run, path)
            if not offers:
                tail = (self.text_tail + path)[-LONGEST_MATCH:]
                offers = self.allowed(path, self.row.offers(tail, LEAST_REACH / max(reach, LEAST_REACH)))
                run = self.row.run
            if run is not None and self.guide is None:
                self.runs[node] = offers[0][0], run
            self.offers[node] = offers
        if likely is not None:
            offers = _with_likely(offers, *likely)
        if not self.branching and offers:
            offers = [max(offers, key=_probability)]
        for token, _, probability in offers:
            if reach * probability >= LEAST_REACH:
                self.push(reach * probability, node, token)

    def push(self, reach: float, node: int, token: int) -> None:
        self.count += 1
        heappush(self.heap, (-reach, self.count, node, token))

    def allowed(self, path: list[int], offers: list[Offer]) -> list[Offer]:
        """The offers that the guide allows after ``path``; they share the probability of the forbidden ones."""
        if self.guide is None or not offers:
            return offers
        kept = [offer for offer in offers if self.guide.allows(path, offer[0])]
        scale = 1.0 - sum(map(_probability, offers)) + sum(map(_probability, kept))
        return [(token, key, probability / max(scale, probability)) for token, key, probability in kept]

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens[1:]), tuple(self.parents[1:]), tuple(self.reach[1:]), self.offers)


def _with_likely(offers: list[Offer], token: int, probability: float) -> list[Offer]:
    """The offers with one more token that has this probability where none of them is right."""
    left = max(1.0 - sum(map(_probability, offers)), 0.0) * probability
    _, key, offered = next((offer for offer in offers if offer[0] == token), (token, _NO_KEY, 0.0))
    return [(token, key, offered + left), *(offer for offer in offers if offer[0] != token)]


def _probability(offer: Offer) -> float:
    return offer[2]
