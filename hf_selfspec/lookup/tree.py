"""One tree of drafted tokens from all free sources, as large as pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from .rates import WHOLE, Offer, Rates, own_key, store_key, successor_key, view_of
from .successors import Found, Successors
from .suffix import LONGEST_MATCH, SEPARATOR, SuffixIndex

# Nodes that are reached less often are never drafted.
LEAST_REACH = 0.004
# A shorter match in earlier texts is no better than chance.
SHORTEST_STORED = 4


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
        end = len(self.seconds)
        return tuple(
            min(((self.seconds[m] - self.seconds[n]) / (m - n) for m in range(n + 1, end)), default=math.inf)
            for n in range(end)
        )


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens. Node 0 is the row's last token, which is not listed.

    Attributes:
        tokens: of the nodes ``1..n``.
        parents: of each of them; 0 for the row's last token. Parents come before children.
        reach: estimated probability that it is accepted.
        keys: the evidence for it; -1 for a node of the seed.
        offers: for each node behind which free tokens were looked for, all that were found.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    reach: tuple[float, ...] = ()
    keys: tuple[int, ...] = ()
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

    def walk(self, emitted: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The visited nodes, each with the token that came after it."""
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
    """Where free tokens come from.

    Attributes:
        own: the row's text.
        store: earlier texts.
        successors: what the logits last held.
        rates: how far each can be trusted.
        text: number of the row's text.
    """

    own: SuffixIndex
    store: SuffixIndex
    successors: Successors
    rates: Rates
    text: int = 0


def grow(
    sources: Sources,
    costs: VerifyCosts,
    pace: float,
    deepest: int,
    branching: bool = True,
    seed: TokenTree | None = None,
) -> TokenTree:
    """Grows the tree that is expected to bring most tokens for its time.

    Nodes are taken by descending probability that they are accepted; their number is what makes ``expected tokens -
    pace * seconds`` largest.

    Args:
        sources: where tokens come from.
        costs: seconds of a round by number of drafted tokens, which bounds it.
        pace: tokens per second that decoding makes at present, that is what a second is worth.
        deepest: the longest path.
        branching: whether a node may have several children.
        seed: nodes that are drafted already. They come first and stay; free ones are added.
    """
    seconds, slopes = costs.seconds, costs.slopes
    growth = _Growth(sources, deepest, branching, seed or TokenTree())
    heap = growth.heap
    most = len(seconds) - 1
    size = kept = len(growth.tokens) - 1
    gain = 0.0
    best = -pace * seconds[min(size, most)]
    while heap and size < most:
        reach = -heap[0][0]
        if reach <= pace * slopes[size]:
            break
        size += 1
        gain += reach
        growth.take_likeliest()
        if gain - pace * seconds[size] > best:
            best = gain - pace * seconds[size]
            kept = size
    return growth.tree(kept)


class _Growth:
    """A tree while it grows, and a heap of the nodes that could come next.

    Entries of the heap: minus the probability that the node is accepted, a running number, parent, token, key of the
    evidence, position of what follows in the store if the token is from there.
    """

    def __init__(self, sources: Sources, deepest: int, branching: bool, seed: TokenTree) -> None:
        self.sources, self.deepest, self.branching = sources, deepest, branching
        self.text_tail = sources.own.tokens[-LONGEST_MATCH:]
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.count = 0
        self.tokens = [self.text_tail[-1] if self.text_tail else SEPARATOR, *seed.tokens]
        self.parents = [-1, *seed.parents]
        self.reach = [1.0, *seed.reach]
        self.keys = [-1] * len(self.tokens)
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
        """Takes the node that is most likely to be accepted."""
        reach, _, parent, token, key = heappop(self.heap)
        path = [*self.paths[parent], token]
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(-reach)
        self.keys.append(key)
        self.paths.append(path)
        if len(path) < self.deepest:
            self.expand(len(self.tokens) - 1, {})

    def expand(self, node: int, drafted: dict[int, float]) -> None:
        """Makes what can follow ``node`` nodes that could come next.

        Args:
            node: the parent.
            drafted: its children in the seed, and the probability of each.
        """
        reach = self.reach[node]
        offers = self.offers[node] = self.offered(self.paths[node], LEAST_REACH / max(reach, LEAST_REACH))
        if drafted:
            # Free tokens share what the drafted ones leave.
            free = 1.0 - sum(probability for token, _, probability in offers if token in drafted)
            reach *= max(1.0 - sum(drafted.values()), 0.0) / max(free, LEAST_REACH)
            offers = [offer for offer in offers if offer[0] not in drafted]
        if not self.branching and offers:
            offers = [max(offers, key=_probability)]
        for token, key, probability in offers:
            if reach * probability >= LEAST_REACH:
                self.count += 1
                heappush(self.heap, (-reach * probability, self.count, node, token, key))

    def offered(self, path: list[int], least: float) -> list[Offer]:
        """All that the sources offer behind ``path``, the surest kind of evidence first.

        Args:
            path: drafted tokens behind the text.
            least: tokens less likely than this need not be offered.
        """
        sources = self.sources
        rates = sources.rates.rates
        tail = (self.text_tail + path)[-LONGEST_MATCH:]
        offers: list[Offer] = []
        left = 1.0
        found = sources.successors.get(tail[-2], tail[-1]) if len(tail) > 1 else None
        matched = 0
        token = stored = SEPARATOR
        if match := sources.own.match(tail):
            matched, position, support = match
            token = sources.own.tokens[position]
            judged = found if matched == 1 or found is None or found.is_pair else None
            key = own_key(matched, view_of(_share(judged, token)), support)
            offers.append((token, key, rates[key]))
            left -= rates[key]
        if sources.store.tokens and (match := sources.store.match(tail)) and match.length >= SHORTEST_STORED:
            stored = sources.store.tokens[match.position]
            if stored not in (token, SEPARATOR):
                key = store_key(match.length, view_of(_share(found, stored)), match.length > matched)
                offers.append((stored, key, left * rates[key]))
                left *= 1.0 - rates[key]
        if found is None:
            return offers
        is_fresh = found.text == sources.text
        whole = WHOLE
        for proposed in (token, stored):
            whole -= _share(found, proposed) or 0
        for successor, share in zip(found.tokens, found.shares, strict=True):
            if successor < 0 or left < least:
                break
            if successor in (token, stored):
                continue
            key = successor_key(found.is_pair, is_fresh, min(share * WHOLE // max(whole, 1), WHOLE))
            offers.append((successor, key, left * rates[key]))
            left *= 1.0 - rates[key]
            whole -= share
        return offers

    def tree(self, size: int) -> TokenTree:
        """The first ``size`` nodes."""
        end = size + 1
        return TokenTree(
            tuple(self.tokens[1:end]),
            tuple(self.parents[1:end]),
            tuple(self.reach[1:end]),
            tuple(self.keys[1:end]),
            {node: offers for node, offers in self.offers.items() if node < end},
        )


def _share(found: Found | None, token: int) -> int | None:
    """The share of ``token`` among successors, ``None`` where none are known."""
    if found is None:
        return None
    try:
        return found.shares[found.tokens.index(token)]
    except ValueError:
        return 0


def _probability(offer: Offer) -> float:
    return offer[2]
