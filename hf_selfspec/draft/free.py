"""Free drafts of one generation: trees of what earlier text and the model's own logits foretell."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..batch import Draft, Text, Verdict
from ..control.controller import Controller
from ..control.cost_curve import SIZES
from ..lookup.kept_texts import LookupFindings
from ..lookup.row import LookupRow
from ..lookup.tree import TokenTree, grow
from ..model.logits import Tops
from .source import Session

# A higher probability than that of the longest match is not believed.
_SUREST = 0.975


@dataclass(frozen=True)
class Seed:
    """What another source has drafted for a row: its tree, and which node of the draft each of its nodes is."""

    tree: TokenTree
    places: list[int]


class FreeDrafts:
    """The texts of all rows, and the trees that are drafted from them."""

    def __init__(self, findings: LookupFindings, session: Session, controller: Controller, max_nodes: int) -> None:
        self.findings, self.controller = findings, controller
        self.trees: list[TokenTree] = []
        max_nodes = session.affordable(max_nodes)
        self._branching, self._max_draft, self._max_nodes = session.takes_trees, session.max_draft, max_nodes
        self._padding, self._constraint = session.target.padding, session.constraint
        self._kind, self._vocabulary = "sampled" if session.scorer.do_sample else "greedy", session.vocabulary
        self._rows: list[LookupRow] = []
        self._lengths: list[int] = []
        self._places: list[list[int]] | None = None
        session.target.cache.reserve(max_nodes + 1)

    def read(self, text: Text) -> None:
        if self._rows:
            return
        for tokens in self._known(text):
            self._rows.append(LookupRow(self.findings, self._kind))
            self._rows[-1].extend(tokens)
        self._lengths = list(text.lengths)

    def promise(self, max_new: list[int]) -> float:
        """The expected speed-up of drafts of what followed the last tokens before; nothing else is looked for."""
        with self.findings.lock:
            found = [known.likelihood() for known, count in zip(self._rows, max_new, strict=True) if count]
        likely = [min(share, _SUREST) for share in found if share]
        if not likely:
            return 0.0
        # Of a line each token is as likely as the first one where all before it are right.
        return max(
            self.controller.expected(size, len(found) + sum(p * (1 - p**size) / (1 - p) for p in likely))
            for size in SIZES[1:-1]
        )

    def plan(self, text: Text, max_new: list[int], seeds: Sequence[Seed] | None = None) -> list[TokenTree]:
        """The trees of all rows, each as large as pays when they are verified together."""
        rows = sum(count > 0 for count in max_new)
        costs, pace = self.controller.curve.costs, self.controller.curve.pace
        begun = [seed.tree for seed in seeds] if seeds is not None else [TokenTree()] * len(max_new)
        guides = [self._constraint.at(text, row) if self._constraint and n else None for row, n in enumerate(max_new)]
        with self.findings.lock:
            trees = [
                grow(known.sources, costs, pace / rows, min(count, self._max_draft), self._branching, tree, guide)
                if count
                else tree
                for known, count, tree, guide in zip(self._rows, max_new, begun, guides, strict=True)
            ]
        sizes, bound = [len(tree) for tree in begun], self._max_nodes
        most = self._together(trees, sizes) if rows > 1 else bound
        return [tree.first(max(size, min(size + most, bound))) for tree, size in zip(trees, sizes, strict=True)]

    def _together(self, trees: Sequence[TokenTree], seeds: Sequence[int]) -> int:
        """How many free nodes per row pay where all rows are verified together, as wide as the largest tree."""
        costs, pace = self.controller.curve.costs, self.controller.curve.pace
        drafted, most = max(seeds), max(len(tree) - seed for tree, seed in zip(trees, seeds, strict=True))
        gains = [0.0] * (most + 1)
        for tree, seed in zip(trees, seeds, strict=True):
            for size, reach in enumerate(accumulate(tree.reach[seed:]), start=1):
                gains[size] += reach
            for size in range(len(tree) - seed + 1, most + 1):
                gains[size] += sum(tree.reach[seed:])
        last = len(costs) - 1
        return max(range(most + 1), key=lambda size: gains[size] - pace * costs[min(drafted + size, last)])

    def draft(self, text: Text, trees: list[TokenTree]) -> Draft:
        """The trees as a draft, whose tokens were not sampled."""
        self.use(trees)
        size = max(map(len, trees))
        if not size:
            return Draft.none(text)
        listed = [[*tree.tokens, *[0] * (size - len(tree))] for tree in trees]
        tokens = torch.tensor(listed, device="cpu")
        if all(tree.parents == tuple(range(len(tree))) for tree in trees):
            return Draft(tokens, [len(tree) for tree in trees], listed=listed)
        parents = [[*tree.parents, *[-1] * (size - len(tree))] for tree in trees]
        return Draft(tokens, [tree.depth for tree in trees], parents, listed=listed)

    def use(self, trees: list[TokenTree], seeds: Sequence[Seed] | None = None, size: int = 0) -> None:
        """Notes which trees are verified, after the ``size`` nodes of another source's draft if there are seeds."""
        self.trees, self._places = trees, None
        if seeds is not None:
            self._places = [
                [*seed.places, *range(size + 1, size + 1 + len(tree) - len(seed.tree))]
                for tree, seed in zip(trees, seeds, strict=True)
            ]

    def learn(self, text: Text, verdicts: list[Verdict], tops: Tops | None) -> None:
        """Learns from a round, ``tops`` being ``None`` where nothing was drafted."""
        with self.findings.lock:
            for row, verdict in enumerate(verdicts):
                count = text.lengths[row] - self._lengths[row]
                if verdict.tokens and count:
                    emitted = verdict.tokens[:count]
                    if tops is None:
                        self._rows[row].follow(emitted)
                    else:
                        nodes = slice(None) if self._places is None else self._places[row]
                        self._rows[row].learn(self.trees[row], emitted, *(found[nodes] for found in tops.of(row)))
                self._lengths[row] = text.lengths[row]

    def finish(self, text: Text) -> None:
        self.findings.end([row.own.tokens for row in self._rows] or self._known(text))

    def _known(self, text: Text) -> list[list[int]]:
        """The tokens of each row after the last id that is not one; with given embeddings, ids may be anything."""
        slots = [0] * text.batch_size if self._padding is None else self._padding.argmax(1).tolist()
        found = []
        for ids, slot, base, length in zip(text.ids.tolist(), slots, text.base, text.lengths, strict=True):
            tokens = ids[max(0, slot - base) : length]
            ends = [place + 1 for place, token in enumerate(tokens) if not 0 <= token < self._vocabulary]
            found.append(tokens[ends[-1] :] if ends else tokens)
        return found
