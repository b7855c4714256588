"""Grows one tree of drafted tokens from all free sources, as large as pays."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from ..grammar.rows import DraftCursor
from .rates import Offer, Rates, store_key, successor_keys, text_key, view_of
from .successors import Likeliest, Successors
from .suffix import CONTESTED, LONGEST_MATCH, SEPARATOR, SuffixIndex

# Nodes that are reached less often are never drafted.
LEAST_REACH = 0.004
# The sum of all probabilities and a little more, so that something remains when all known ones are subtracted.
_WHOLE = 1.001
# A shorter match in earlier texts is no better than chance.
SHORTEST_STORED = 4
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
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)

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


@dataclass(frozen=True)
class Sources:
    """Where free tokens come from; ``acceptance_ratio`` is how often drafts were right over how often expected."""

    text: SuffixIndex
    store: SuffixIndex
    successors: Successors
    rates: Rates
    text_number: int
    acceptance_ratio: float


def grow(
    sources: Sources,
    costs: tuple[float, ...],
    pace: float,
    deepest: int,
    branching: bool = True,
    seed: TokenTree | None = None,
    guide: DraftCursor | None = None,
) -> TokenTree:
    """Grows the tree that is expected to bring the most tokens for its time.

    Nodes are taken in order of descending probability that they are accepted; their number maximises
    ``expected tokens - pace * seconds``.

    The tree is no larger and no deeper than ``costs``, the seconds of rounds with 0, 1, 2, ... drafted tokens, and
    ``deepest``. ``pace`` are tokens per second at present, which is what a second is worth; 0 where that is not known
    yet. Nodes of ``seed`` are drafted already: they come first and stay. ``guide`` forbids tokens, and names those that
    have to come next.
    """
    growth = _Growth(sources, deepest, branching, seed or TokenTree(), guide)
    heap = growth.heap
    pace = max(pace, 1.0 / costs[0])  # a plain round brings one token
    prices, corners = [pace * seconds for seconds in costs], _corners(costs)
    most = len(prices) - 1
    size = kept = len(growth.tokens) - 1
    gain = 0.0
    best = -prices[min(size, most)]
    while heap and size < most:
        reach = -heap[0][0]
        # No later node is likelier than this one.
        if gain + max([(corner - size) * reach - prices[corner] for corner in corners[size]]) <= best:
            break
        size += 1
        gain += reach
        growth.take_likeliest()
        if gain - prices[size] > best:
            best = gain - prices[size]
            kept = size
    return growth.tree().first(kept)


@lru_cache
def _corners(costs: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    """For each number of tokens, the larger ones on the lower convex hull of costs, which alone can be best."""

    def slope(few: int, many: int) -> float:
        return (costs[many] - costs[few]) / (many - few)

    hulls: list[tuple[int, ...]] = [()]
    for count in range(len(costs) - 1, 0, -1):
        hull = hulls[-1]
        while len(hull) > 1 and slope(count, hull[0]) >= slope(hull[0], hull[1]):
            hull = hull[1:]
        hulls.append((count, *hull))
    return tuple(reversed(hulls))


class _Growth:
    """A growing tree, and a heap of possible nodes: minus their probability, a running number, parent, token."""

    def __init__(
        self, sources: Sources, deepest: int, branching: bool, seed: TokenTree, guide: DraftCursor | None
    ) -> None:
        self.sources, self.deepest, self.branching, self.guide = sources, deepest, branching, guide
        self.text_tail = sources.text.tokens[-LONGEST_MATCH:]
        self.heap: list[tuple[float, int, int, int]] = []
        self.count = 0
        self.tokens = [self.text_tail[-1] if self.text_tail else SEPARATOR, *seed.tokens]
        self.parents = [-1, *seed.parents]
        self.reach = [1.0, *seed.reach]
        self.offers: dict[int, list[Offer]] = {}
        self.paths: list[list[int]] = [[]]
        drafted: list[dict[int, float]] = [{} for _ in self.tokens]
        for node, parent in enumerate(seed.parents, 1):
            self.paths.append([*self.paths[parent], self.tokens[node]])
            drafted[parent][self.tokens[node]] = self.reach[node] / max(self.reach[parent], LEAST_REACH)
        for node, children in enumerate(drafted):
            if len(self.paths[node]) < deepest and (branching or not children):
                self.expand(node, children)

    def take_likeliest(self) -> None:
        reach, _, parent, token = heappop(self.heap)
        path = [*self.paths[parent], token]
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(-reach)
        self.paths.append(path)
        if len(path) < self.deepest:
            self.expand(len(self.tokens) - 1, {})

    def expand(self, node: int, drafted: dict[int, float]) -> None:
        """Adds the tokens that can follow ``node`` to the heap; ``drafted`` are its children in the seed."""
        reach, path = self.reach[node], self.paths[node]
        likely = self.guide.likely(path) if self.guide is not None and not drafted else None
        if likely is not None and likely[1] == 1.0:
            return self.push(reach, node, likely[0])
        reach *= 1.0 if node else self.sources.acceptance_ratio
        offers = self.offers[node] = self.allowed(path, self.offered(path, LEAST_REACH / max(reach, LEAST_REACH)))
        if drafted:
            # Free tokens share the probability that the drafted ones leave.
            free = 1.0 - sum(probability for token, _, probability in offers if token in drafted)
            reach *= max(1.0 - sum(drafted.values()), 0.0) / max(free, LEAST_REACH)
            offers = [offer for offer in offers if offer[0] not in drafted]
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

    def offered(self, path: list[int], least: float) -> list[Offer]:
        """What the sources offer after drafted tokens with at least this probability, the surest evidence first."""
        sources = self.sources
        rates = sources.rates.rates
        tail = (self.text_tail + path)[-LONGEST_MATCH:]
        successors = sources.successors.get(tail[-2], tail[-1]) if len(tail) > 1 else None
        left, whole = 1.0, _WHOLE
        offers: list[Offer] = []
        for token, key, share in matched(sources, tail, successors):
            offers.append((token, key, left * rates[key]))
            left *= 1.0 - rates[key]
            whole -= share
        if successors is None:
            return offers
        named = [offer[0] for offer in offers]
        first_key, edges = successor_keys(successors.is_pair, successors.text == sources.text_number)
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

    def tree(self) -> TokenTree:
        return TokenTree(tuple(self.tokens[1:]), tuple(self.parents[1:]), tuple(self.reach[1:]), self.offers)


def matched(
    sources: Sources, tail: Sequence[int], successors: Likeliest | None, shortest: int = 1
) -> list[tuple[int, int, float]]:
    """The tokens that followed the longest matches, their keys, and the share of each among the successors."""
    in_text = sources.text.match(tail, shortest)
    in_store = sources.store.match(tail, SHORTEST_STORED)
    if in_store is not None and sources.store.tokens[in_store.position] == SEPARATOR:
        in_store = None
    is_longer = in_store is not None and (in_text is None or in_store.length > in_text.length)
    matches: list[tuple[int, int, float]] = []
    if in_text is not None:
        token = sources.text.tokens[in_text.position]
        # Successors of a single token are worth less than a match of two.
        is_judged = in_text.length == 1 or (successors is not None and successors.is_pair)
        share = _share(successors if is_judged else None, token)
        support = CONTESTED if is_longer else in_text.support
        matches.append((token, text_key(in_text.length, view_of(share), support), share or 0.0))
    if in_store is not None:
        token = sources.store.tokens[in_store.position]
        share = _share(successors, token)
        stored = token, store_key(in_store.length, view_of(share), is_longer), share or 0.0
        others = [match for match in matches if match[0] != token]
        # The longer match comes first.
        return [stored, *others] if is_longer else [*matches, stored] if others else matches
    return matches


def _share(successors: Likeliest | None, token: int) -> float | None:
    """The probability of ``token`` among successors, ``None`` where none are known."""
    if successors is None:
        return None
    return successors.probabilities[successors.tokens.index(token)] if token in successors.tokens else 0.0


def _with_likely(offers: list[Offer], token: int, probability: float) -> list[Offer]:
    """The offers with one more token that has this probability where none of them is right."""
    left = max(1.0 - sum(map(_probability, offers)), 0.0) * probability
    _, key, offered = next((offer for offer in offers if offer[0] == token), (token, _NO_KEY, 0.0))
    return [(token, key, offered + left), *(offer for offer in offers if offer[0] != token)]


def _probability(offer: Offer) -> float:
    return offer[2]
