"""Free drafts of one generation: trees of what earlier text and the model's own logits foretell."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from ...batch import Draft, Text, Verdict
from ...model.logits import Tops
from ...model.transfer import upload
from ..controller import Controller
from ..cost_curve import SIZES
from ..source import Session
from .kept_texts import LookupFindings
from .row import LookupRow
from .tree import TokenTree, grow

# The first guess for the longest matches: no higher probability is believed.
_SUREST = 0.975
_NOTHING = TokenTree()


@dataclass(frozen=True)
class Seed:
    """What another source has drafted for a row: its tree, and which node of the draft each of its nodes is."""

    tree: TokenTree = _NOTHING
    nodes: tuple[int, ...] = (0,)

    @classmethod
    def of_row(cls, tokens: list[int], parents: list[int], rates: list[float]) -> Seed:
        """The nodes of a row that count, with how likely each is to be reached by the acceptance rates by depth."""
        nodes, index_of = [0], {0: 0}
        depths, reach = [0], [1.0]
        kept_parents: list[int] = []
        for node, parent in enumerate(parents, start=1):
            if parent >= 0:
                index, rate = index_of[parent], rates[depths[index_of[parent]]]
                # Siblings share the probability that the first child leaves.
                reach.append(reach[index] * ((1.0 - rate) * rate if index in kept_parents else rate))
                index_of[node] = len(nodes)
                nodes.append(node)
                kept_parents.append(index)
                depths.append(depths[index] + 1)
        kept = tuple(tokens[node - 1] for node in nodes[1:])
        return cls(TokenTree(kept, tuple(kept_parents), tuple(reach[1:])), tuple(nodes))


class FreeDrafts:
    """The texts of all rows, and the trees that are drafted from them and from what grammars force, or where there are
    no ``findings`` from grammars alone."""

    def __init__(
        self, findings: LookupFindings | None, session: Session, controller: Controller, max_nodes: int = SIZES[-1]
    ) -> None:
        self.findings, self.controller = findings, controller
        self._lock = nullcontext() if findings is None else findings.lock
        self.trees: list[TokenTree] = []
        self._session, self._max_nodes = session, session.cap_by_logit_memory(max_nodes)
        self._rows: list[LookupRow] = []
        self._lengths: list[int] = []
        self._nodes: list[list[int]] = []
        if findings is not None:
            session.target.cache.reserve(self._max_nodes + 1)

    def read(self, text: Text) -> None:
        if self.findings is not None and not self._rows:
            mode = "sampled" if self._session.scorer.do_sample else "greedy"
            self._rows = [LookupRow(self.findings, mode, tokens) for tokens in self._tokens(text)]
            self._lengths = list(text.lengths)

    def promise(self, max_new: list[int]) -> float:
        """The expected speed-up of drafts of what followed the last tokens before; nothing else is looked for."""
        with self._lock:
            likelihoods = [row.likelihood() for row, count in zip(self._rows, max_new, strict=True) if count]
        likely = [min(share, _SUREST) for share in likelihoods if share]
        if not likely:
            return 0.0
        # Of a line each token is as likely as the first one where all before it are right.
        return max(
            self.controller.expected(size, len(likelihoods) + sum(p * (1 - p**size) / (1 - p) for p in likely))
            for size in SIZES[1:-1]
        )

    def plan(
        self, text: Text, max_new: list[int], seeds: Sequence[Seed] = (), takes_part: bool = True
    ) -> list[TokenTree]:
        """The trees of all rows, each as large as pays when they are verified together; of what grammars force alone
        unless free drafts take part."""
        session, costs, constraint = self._session, self.controller.curve.costs, self._session.constraint
        rows, left, bound = sum(count > 0 for count in max_new), max(max_new), self._max_nodes
        # Forced tokens only have to be faster than nothing.
        pace = self.controller.curve.pace if takes_part else rows / costs[0]
        if takes_part and left < len(costs):  # what a draft leaves has no room for the pace of the longest ones
            pace = min(pace, rows * max(size / cost for size, cost in enumerate(costs[: max(left // 2, 1)], start=1)))
        begun = [seed.tree for seed in seeds] or [_NOTHING] * len(max_new)
        trees, sizes, branching = list(begun), [len(tree) for tree in begun], session.takes_trees and takes_part
        with self._lock:
            for row, count in enumerate(max_new):
                if count:
                    free = self._rows[row] if takes_part else None
                    deepest = min(count, session.max_draft) if takes_part else count
                    guide = constraint.at(text, row) if constraint else None
                    trees[row] = grow(free, costs, pace / rows, deepest, branching, begun[row], guide)
        most = self._together(trees, sizes, pace) if rows > 1 else bound
        return [tree.first(max(size, min(size + most, bound))) for tree, size in zip(trees, sizes, strict=True)]

    def _together(self, trees: Sequence[TokenTree], seeds: Sequence[int], pace: float) -> int:
        """How many free nodes per row pay where all rows are verified together, as wide as the largest tree."""
        costs = self.controller.curve.costs
        drafted, most = max(seeds), max(len(tree) - seed for tree, seed in zip(trees, seeds, strict=True))
        gains = [0.0] * (most + 1)
        for tree, seed in zip(trees, seeds, strict=True):
            for size, reach in enumerate(accumulate(tree.reach[seed:]), start=1):
                gains[size] += reach
            for size in range(len(tree) - seed + 1, most + 1):
                gains[size] += sum(tree.reach[seed:])
        last = len(costs) - 1
        return max(range(most + 1), key=lambda size: gains[size] - pace * costs[min(drafted + size, last)])

    def draft(self, trees: list[TokenTree], seeded: Draft, seeds: Sequence[Seed] = ()) -> Draft:
        """The trees as a draft: what another source has ``seeded``, perhaps nothing, and free tokens behind it, which
        were not sampled."""
        seeds, size = seeds or [Seed()] * len(trees), seeded.size
        grown = list(zip(trees, (len(seed.tree) for seed in seeds), strict=True))
        more = max(len(tree) - count for tree, count in grown)
        self.trees = trees
        self._nodes = [
            [*seed.nodes, *range(size + 1, size + 1 + len(tree) - count)]
            for seed, (tree, count) in zip(seeds, grown, strict=True)
        ]
        if not more:
            return seeded
        added = [[*tree.tokens[count:], *[0] * (more - len(tree) + count)] for tree, count in grown]
        parents = None
        if size or any(tree.parents != tuple(range(len(tree))) for tree in trees):
            parents = [
                [*line, *(nodes[parent] for parent in tree.parents[count:]), *[-1] * (more - len(tree) + count)]
                for line, nodes, (tree, count) in zip(seeded.parent_lists(), self._nodes, grown, strict=True)
            ]
        if size:
            tokens = torch.cat([seeded.tokens, upload(added, seeded.tokens.device)], dim=1)
        else:
            tokens = torch.tensor(added, device="cpu")
        assert seeded.listed is not None
        return replace(
            seeded,
            tokens=tokens,
            listed=[[*first, *free] for first, free in zip(seeded.listed, added, strict=True)],
            lengths=[tree.depth for tree in trees],
            parents=parents,
            num_drawn=size if seeded.num_drawn is None else seeded.num_drawn,
        )

    def learn(self, text: Text, verdicts: list[Verdict], tops: Tops | None) -> None:
        """Learns from a round, ``tops`` being ``None`` where nothing was drafted."""
        if self.findings is None:
            return
        with self._lock:
            for row, verdict in enumerate(verdicts):
                count = text.lengths[row] - self._lengths[row]
                if verdict.tokens and count:
                    emitted = verdict.tokens[:count]
                    if tops is None:
                        self._rows[row].follow(emitted)
                    else:
                        tokens, shares = (values[self._nodes[row]] for values in tops.of(row))
                        self._rows[row].learn(self.trees[row], emitted, tokens, shares)
                self._lengths[row] = text.lengths[row]

    def finish(self, text: Text) -> None:
        if self.findings is not None:
            self.findings.add_texts([row.text.tokens for row in self._rows] or self._tokens(text))

    def _tokens(self, text: Text) -> list[list[int]]:
        """The tokens of each row after the last id that is not one; with given embeddings, ids may be anything."""
        vocabulary, rows = self._session.vocabulary, []
        for ids, base, length in zip(text.ids.tolist(), text.base, text.lengths, strict=True):
            tokens = ids[max(0, -base) : length]
            ends = [place + 1 for place, token in enumerate(tokens) if not 0 <= token < vocabulary]
            rows.append(tokens[ends[-1] :] if ends else tokens)
        return rows
