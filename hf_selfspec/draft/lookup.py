"""Free drafts: what followed the last tokens in the text, in earlier texts, and in the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch

from ..control.clock import SIZES, RoundClock
from ..control.shared import LookupFindings
from ..errors import UnsupportedOptionError
from ..grammar.rows import Spot
from ..lookup import LookupRow, TokenTree, VerifyCosts
from ..model.anatomy import Anatomy
from ..registry import register
from ..settings import check_count
from ..stats import GenerationStats
from ..transfer import Pending
from ..types import Draft, Text, Verdict
from .blocks import DraftBlocks, FindChoice
from .source import Drafter, DraftSource, Session

# How many tokens of earlier texts are kept, and how many successors of each pair of tokens.
_STORED, _SUCCESSORS = 65_536, 8
_MOST_STORED = 2**20
# Tokens of a vocabulary whose probabilities are compared at a time.
_STRETCH = 128
# Nodes whose probabilities are computed at once on a CPU.
_PIECE = 4
# The name under which findings are kept.
NAME = "lookup"


@register("draft")
@dataclass(frozen=True)
class Lookup(DraftSource):
    """Drafts without running any part of the model.

    A draft is one tree for each row, of as many tokens as are expected to pay by measured costs. Its tokens are those
    that followed the last tokens earlier in the text (prompt lookup, SAM-Decoding, arXiv 2411.10666) and in texts of
    earlier calls (SuffixDecoding, 2411.04975), and those that the model's own logits predicted after the same two
    tokens (Token Recycling, 2408.08696).

    Args:
        stored_tokens: tokens of earlier texts, prompts included, that this ``SelfSpec`` keeps in memory (and on disk
            with its ``cache_dir``); 0 for none. The oldest are dropped first; :meth:`SelfSpec.forget` drops all.
        max_nodes: maximum number of tokens in a tree, at most 31.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    stored_tokens: int = _STORED
    max_nodes: int = SIZES[-1]

    @property
    def fixed_because(self) -> str:
        """See :attr:`DraftSource.fixed_because`."""
        return "Lookup drafts as many tokens as pay by measured costs, in a tree"

    @property
    def takes_forwards(self) -> bool:
        """See :attr:`DraftSource.takes_forwards`."""
        return False

    def __post_init__(self) -> None:
        check_count("Lookup(stored_tokens)", self.stored_tokens, least=0, most=_MOST_STORED)
        check_count("Lookup(max_nodes)", self.max_nodes, most=SIZES[-1])

    def findings(self, vocabulary: int) -> LookupFindings:
        """Empty findings for a model with ``vocabulary`` tokens."""
        return LookupFindings(self.stored_tokens, vocabulary)

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        """See :meth:`DraftSource.blocks`.

        Raises:
            UnsupportedOptionError: always.
        """
        raise UnsupportedOptionError(
            f"{self!r} cannot be exported: free drafts come from texts and not from a model. Serving engines have such "
            'drafts of their own (vLLM: {"method": "ngram"}, SGLang: --speculative-algorithm NGRAM); for a checkpoint '
            "export EarlyExit(layer), SkipLayers(attention=[...], mlp=[...]) or an adapter."
        )

    def start(self, session: Session) -> Drafter:
        """See :meth:`DraftSource.start`."""
        return LookupDrafter(self, session)


class LookupDrafter:
    """Free drafts of one generation.

    Args:
        settings: the settings.
        session: the generation.
    """

    steps = 0
    knows_grammars = True

    def __init__(self, settings: Lookup, session: Session) -> None:
        self.settings = settings
        self._target = session.target
        self._branching = session.takes_trees
        self._max_draft = session.max_draft
        self._is_frozen = session.is_tensor_parallel
        self._constraint = session.constraint
        self._kind = "sampled" if session.scorer.do_sample else "greedy"
        self._vocabulary = session.vocabulary
        self.findings = session.knowledge.of_all_kinds(NAME, lambda _: settings.findings(session.vocabulary))
        self.clock = RoundClock(on_cpu=True, is_frozen=True)  # until the first round
        self._rows: list[LookupRow] = []
        self._lengths: list[int] = []
        self.trees: list[TokenTree] = []
        self._places: list[list[int]] | None = None
        self._tops = Pending()
        self._begun = 0.0
        session.target.cache.reserve(settings.max_nodes + 1)

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """See :meth:`Drafter.propose`."""
        self._begun = perf_counter() - self._target.compile_seconds
        return self.draft(text, self.plan(text, max_new))

    def plan(self, text: Text, max_new: list[int]) -> list[TokenTree]:
        """The trees of all rows, each as large as pays when they are verified together."""
        self._read(text)
        rows = sum(count > 0 for count in max_new)
        self.clock = clock = self._clock_of(text, max(rows, 1))
        costs = clock.costs
        pace = clock.pace
        with self.findings.lock:
            trees = [
                known.propose(costs, pace / rows, min(count, self._max_draft), self._branching, guide=guide)
                if count
                else TokenTree()
                for known, count, guide in zip(self._rows, max_new, self._guides(text), strict=True)
            ]
        return self._cut(trees, [0] * len(trees), rows)

    def round_seconds(self) -> Sequence[float]:
        """Seconds of a round like the last one with 0, 1, 2, ... drafted tokens; empty before one was timed."""
        return self.clock.costs.seconds if self.clock.is_measured else ()

    def _guides(self, text: Text) -> list[Spot | None]:
        """What grammars allow after each row's text."""
        return [self._constraint.at(text, row) if self._constraint else None for row in range(text.batch_size)]

    def _clock_of(self, text: Text, rows: int) -> RoundClock:
        """The clock of rounds over ``rows`` rows."""
        ids = text.ids
        dtype, how = self._target.model.dtype, "" if self._target.fixed is None else " compiled"
        return self.findings.clock(
            f"{ids.device.type} {dtype}{how}", rows, max(text.lengths), ids.device.type == "cpu", self._is_frozen
        )

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

    def grown(self, text: Text, max_new: list[int], seeds: Sequence[tuple[TokenTree, list[int]]]) -> list[TokenTree]:
        """The trees of another source with free tokens beside and after them, as far as these pay.

        Args:
            text, max_new: see :meth:`propose`.
            seeds: for each row the tree, and for each of its nodes the node of the draft.
        """
        clock, rows = self.clock, sum(count > 0 for count in max_new)
        with self.findings.lock:
            trees = [
                known.propose(clock.costs, clock.pace / rows, min(count, self._max_draft), True, seed, guide)
                if count
                else seed
                for known, count, (seed, _), guide in zip(self._rows, max_new, seeds, self._guides(text), strict=True)
            ]
        return self._cut(trees, [len(seed) for seed, _ in seeds], rows)

    def _cut(self, trees: list[TokenTree], seeds: list[int], rows: int) -> list[TokenTree]:
        """The trees with as many free nodes as pay where all rows are verified together."""
        costs, bound = self.clock.costs, self.settings.max_nodes
        most = _together(trees, seeds, costs, self.clock.pace) if rows > 1 else bound
        return [tree.first(max(seed, min(seed + most, bound))) for tree, seed in zip(trees, seeds, strict=True)]

    def use(self, trees: list[TokenTree], places: list[list[int]] | None = None, size: int = 0) -> None:
        """Notes which trees are verified.

        Args:
            trees: the trees of all rows.
            places: for each row the draft's node of each node of the tree's seed; ``None`` without a seed.
            size: number of nodes of the draft before those that are not in the seed.
        """
        self.trees = trees
        self._places = None
        if places is not None:
            self._places = [
                [*seed, *range(size + 1, size + 2 + len(tree) - len(seed))]
                for tree, seed in zip(trees, places, strict=True)
            ]

    def look(self, logits: torch.Tensor) -> Pending:
        """See :class:`Drafter`."""
        self._tops = likeliest(logits)
        return self._tops

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """See :meth:`Drafter.update`."""
        new = self.learn(text, verdicts)
        seconds = perf_counter() - self._target.compile_seconds - self._begun
        self.clock.add(max(map(len, self.trees)), new, seconds)

    def learn(self, text: Text, verdicts: list[Verdict]) -> int:
        """Learns from the verdicts of a round, not from its time; returns the number of new tokens of all rows."""
        tops = tops_of(self._tops)
        new = 0
        with self.findings.lock:
            for row, (verdict, tree) in enumerate(zip(verdicts, self.trees, strict=True)):
                count = text.lengths[row] - self._lengths[row]
                if verdict.tokens and count:
                    top = tops[row] if self._places is None else [tops[row][node] for node in self._places[row]]
                    self._rows[row].learn(tree, verdict.tokens[:count], top)
                    new += count
                self._lengths[row] = text.lengths[row]
        return new

    def finish(self, text: Text) -> None:
        """Puts the texts into the store."""
        self._read(text)
        self.findings.end(self._rows)

    def report(self, stats: GenerationStats) -> None:
        """See :meth:`Drafter.report`."""
        stats.plan = self._target.full_plan.picture()

    def _read(self, text: Text) -> None:
        """Reads the prompts."""
        if self._rows:
            return
        padding = self._target.padding
        slots = [0] * text.batch_size if padding is None else padding.argmax(1).tolist()
        ids = text.ids.tolist()
        for row, (base, length) in enumerate(zip(text.base, text.lengths, strict=True)):
            known = LookupRow(self.findings.known, self._kind)
            known.extend(self._behind_placeholders(ids[row][max(0, slots[row] - base) : length]))
            self._rows.append(known)
        self._lengths = list(text.lengths)

    def _behind_placeholders(self, tokens: list[int]) -> list[int]:
        """The tokens after the last id that is not a token; with given embeddings, ids may be anything."""
        ends = [place + 1 for place, token in enumerate(tokens) if not 0 <= token < self._vocabulary]
        return tokens[ends[-1] :] if ends else tokens


def _together(trees: Sequence[TokenTree], seeds: Sequence[int], costs: VerifyCosts, pace: float) -> int:
    """How many free nodes per row pay where all rows are verified together, as wide as the largest tree.

    Args:
        trees: the trees of all rows.
        seeds: for each tree the number of nodes that are drafted already.
        costs, pace: costs and speed of rounds over these rows.
    """
    drafted, most = max(seeds), max(len(tree) - seed for tree, seed in zip(trees, seeds, strict=True))
    gains = [0.0] * (most + 1)
    for tree, seed in zip(trees, seeds, strict=True):
        for size, reach in enumerate(accumulate(tree.reach[seed:]), start=1):
            gains[size] += reach
        for size in range(len(tree) - seed + 1, most + 1):
            gains[size] += sum(tree.reach[seed:])
    last = len(costs.seconds) - 1
    return max(range(most + 1), key=lambda size: gains[size] - pace * costs.seconds[min(drafted + size, last)])


def likeliest(logits: torch.Tensor) -> Pending:
    """The most likely next tokens, and their probabilities, ``[b, t, 8]`` each, from logits ``[b, t, v]``."""
    # Probabilities of all tokens would be as large as the logits, and a GPU launches kernels for each piece.
    pieces = logits.split(_PIECE, dim=1) if logits.device.type == "cpu" else (logits,)
    shares, tokens = (torch.cat(found, dim=1) for found in zip(*map(_most_probable, pieces), strict=True))
    return Pending(tokens, shares)


def tops_of(found: Pending) -> list[list[tuple[Sequence[int], Sequence[float]]]]:
    """What :func:`likeliest` found for each row and node."""
    return [list(zip(*pair, strict=True)) for pair in zip(*found.lists(), strict=True)]


def _most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the probabilities of the most likely next tokens, and these tokens."""
    shares, tokens = _largest(logits.softmax(-1))
    return shares.nan_to_num(nan=0.0), tokens  # logits that overflow (float16) carry no information


def _largest(shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of ``[..., v]`` and their indices.

    On a CPU only the stretches with the largest maxima are compared, in a third of the time of a whole vocabulary.
    """
    v = shares.shape[-1]
    if shares.device.type != "cpu" or v < 2 * _STRETCH * _SUCCESSORS or v % _STRETCH:
        return shares.topk(min(_SUCCESSORS, v), dim=-1)
    stretches = shares.unflatten(-1, (-1, _STRETCH))
    chosen = stretches.amax(-1).topk(_SUCCESSORS, dim=-1).indices
    found = stretches.gather(-2, chosen[..., None].expand(*chosen.shape, _STRETCH)).flatten(-2)
    values, places = found.topk(_SUCCESSORS, dim=-1)
    return values, chosen.gather(-1, places // _STRETCH) * _STRETCH + places % _STRETCH
