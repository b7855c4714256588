"""Free drafts of one generation: trees of what earlier text and the model's own logits foretell."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch

from ...batch import Draft, Text, Verdict
from ...model.logits import Tops
from ..controller import Controller
from ..cost_curve import SIZES
from ..grammar.rows import DraftCursor
from ..source import Session
from .kept_texts import LookupFindings
from .row import LookupRow
from .tree import TokenTree, grow

# The first guess for the longest matches: no higher probability is believed.
_SUREST = 0.975


class FreeDrafts:
    """The texts of all rows, and the trees that are drafted from them and from what grammars force, or where there are
    no ``findings`` from grammars alone."""

    def __init__(
        self, findings: LookupFindings | None, session: Session, controller: Controller, max_nodes: int = SIZES[-1]
    ) -> None:
        self.findings, self.controller = findings, controller
        self._lock = nullcontext() if findings is None else findings.lock
        self._trees: list[TokenTree] = []
        self._session, self._max_nodes = session, session.cap_by_logit_memory(max_nodes)
        self._rows: list[LookupRow] = []
        self._lengths: list[int] = []
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
            likelihoods = [row.likelihood() if count else 0.0 for row, count in zip(self._rows, max_new, strict=True)]
        worths = self.controller.worth
        likely = [(min(share, _SUREST), worth) for share, worth in zip(likelihoods, worths, strict=True) if share]
        if not likely:
            return 0.0
        # Of a line each token is as likely as the first one where all before it are right.
        return max(
            self.controller.expected(size, sum(worths) + sum(w * p * (1 - p**size) / (1 - p) for p, w in likely))
            for size in SIZES[1:-1]
        )

    def plan(self, text: Text, max_new: list[int], takes_part: bool = True) -> list[TokenTree]:
        """The trees of all rows, each as large as pays when they are verified together; of what grammars force alone
        unless free drafts take part."""
        session, costs, grammars = self._session, self.controller.curve.costs, self._session.grammars
        rows, left = sum(count > 0 for count in max_new), max(max_new)
        # Forced tokens only have to be faster than nothing.
        pace = self.controller.curve.pace if takes_part else rows / costs[0]
        if takes_part and left < len(costs):  # what a draft leaves has no room for the pace of the longest ones
            pace = min(pace, rows * max(size / cost for size, cost in enumerate(costs[: max(left // 2, 1)], start=1)))
        trees, branching = [TokenTree()] * len(max_new), session.anatomy.tree and takes_part
        with self._lock:
            for row, count in enumerate(max_new):
                if count:
                    free = self._rows[row] if takes_part else None
                    deepest = min(count, session.max_draft) if takes_part else count
                    guide = DraftCursor(grammars, row, list(text.new[row]), session.eos_tokens) if grammars else None
                    price = pace / rows / self.controller.worth[row]
                    trees[row] = grow(free, costs, price, deepest, branching, guide)
        most = min(self._together(trees, pace) if rows > 1 else self._max_nodes, self._max_nodes)
        return [tree.first(most) for tree in trees]

    def _together(self, trees: Sequence[TokenTree], pace: float) -> int:
        """How many nodes per row pay where all rows are verified together, as wide as the largest tree."""
        costs, most = self.controller.curve.costs, max(map(len, trees))
        gains = [0.0] * (most + 1)
        for tree, worth in zip(trees, self.controller.worth, strict=True):
            for size, reach in enumerate(accumulate(tree.reach), start=1):
                gains[size] += worth * reach
            for size in range(len(tree) + 1, most + 1):
                gains[size] += worth * sum(tree.reach)
        return max(range(most + 1), key=lambda size: gains[size] - pace * costs[size])

    def draft(self, text: Text, trees: list[TokenTree]) -> Draft:
        """The trees as a draft."""
        self._trees, most = trees, max(map(len, trees))
        if not most:
            return Draft.none(text)
        parents, listed = None, [[*tree.tokens, *[0] * (most - len(tree))] for tree in trees]
        if any(tree.parents != tuple(range(len(tree))) for tree in trees):
            parents = [[*tree.parents, *[-1] * (most - len(tree))] for tree in trees]
        tokens = torch.tensor(listed, device="cpu")
        return Draft(tokens, [tree.depth for tree in trees], parents, listed=listed)

    def learn(self, text: Text, verdicts: list[Verdict], tops: Tops | None) -> None:
        """Learns from a round, ``tops`` being ``None`` where free drafts took no part in it."""
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
                        tree = self._trees[row]
                        tokens, shares = (values[: len(tree) + 1] for values in tops.of(row))
                        self._rows[row].learn(tree, emitted, tokens, shares)
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
