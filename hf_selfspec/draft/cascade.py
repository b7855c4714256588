"""Several sources together: free drafts, combined with drafts by a part of the model where that pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeVar

import torch

from ..control.choice import Arm, fastest
from ..control.source_rates import RatesFindings, SourceRates
from ..errors import SelfSpecError, SettingError, SettingTypeError
from ..lookup import TokenTree
from ..model.anatomy import Anatomy
from ..notices import warn_once
from ..registry import register
from ..stats import GenerationStats
from ..transfer import upload
from ..types import Draft, Text, Verdict
from .blocks import DraftBlocks, FindChoice
from .constrained import allowed
from .lookup import Lookup, LookupDrafter
from .source import Drafter, DraftSource, Session

_S = TypeVar("_S", bound=DraftSource)


@register("draft")
@dataclass(frozen=True)
class Cascade(DraftSource):
    """Drafts each round with the source that is expected to yield the most tokens per second.

    Free drafts are the default. Where another source is currently expected to be faster, it drafts, and free tokens are
    added beside and after its draft, so that one verification checks both. A source that cannot draft for a model is
    left out.

    Args:
        sources: one :class:`Lookup`, and any others.

    Raises:
        SettingError, SettingTypeError: ``sources`` are something else, or one changes the output.
    """

    sources: tuple[DraftSource, ...]

    def __post_init__(self) -> None:
        example = "Example: Cascade([Lookup(), EarlyExit(8)])."
        given = tuple(self.sources) if isinstance(self.sources, Iterable) else ()
        if not given or not all(isinstance(source, DraftSource) for source in given):
            raise SettingTypeError(f"Cascade(sources) must be a list of draft sources, got {self.sources!r}. {example}")
        if sum(isinstance(source, Lookup) for source in given) != 1 or len(given) != len(set(map(repr, given))):
            raise SettingError(f"Cascade(sources) needs one Lookup and different others, got {given!r}. {example}")
        for source in given:
            if isinstance(source, Cascade) or not source.lossless:
                raise SettingError(f"Cascade(sources) cannot hold {source!r}: it takes single, lossless sources.")
        object.__setattr__(self, "sources", given)

    @property
    def takes_forwards(self) -> bool:
        """See :attr:`DraftSource.takes_forwards`: free drafts take none."""
        return False

    def part(self, kind: type[_S]) -> _S | None:
        """See :meth:`DraftSource.part`."""
        found = (source.part(kind) for source in self.sources)
        return next((part for part in found if part is not None), None)

    def blocks(self, anatomy: Anatomy, find_choice: FindChoice) -> DraftBlocks:
        """See :meth:`DraftSource.blocks`; free drafts are left out.

        Raises:
            SettingError: there are several other sources.
        """
        others = [source for source in self.sources if not isinstance(source, Lookup)]
        if len(others) > 1:
            raise SettingError(
                f"this cascade has {len(others)} sources besides its free drafts, {others!r}, and a checkpoint can "
                "hold only one. Export SelfSpec(draft=...) with the one that you mean."
            )
        return (others or self.sources)[0].blocks(anatomy, find_choice)

    def start(self, session: Session) -> Drafter:
        """See :meth:`DraftSource.start`. Warns of a source that is left out, unless it is optional."""
        free = next(source for source in self.sources if isinstance(source, Lookup))
        drafter = LookupDrafter(free, session)
        within = session.with_settings(in_cascade=True, round_seconds=drafter.round_seconds)
        others: dict[str, Drafter] = {}
        for source in self.sources:
            if source is free:
                continue
            try:
                if session.is_synced:
                    source.check_synced()
                source.check(session.anatomy, session.max_new)
                others[repr(source)] = source.start(within)
            except SelfSpecError as error:
                if not source.is_optional:
                    warn_once(f"{source!r} is left out of the drafts of this model: {error}")
        return CascadeDrafter(drafter, others, session) if others else drafter


@dataclass(frozen=True)
class SourceArm(Arm):
    """A source that may draft the next round.

    Attributes:
        source: its name, ``None`` for free drafts.
    """

    source: str | None


class CascadeDrafter:
    """A cascade in one generation.

    Args:
        lookup: free drafts.
        others: drafters by name.
        session: the generation.
    """

    knows_grammars = True

    def __init__(self, lookup: LookupDrafter, others: dict[str, Drafter], session: Session) -> None:
        self.lookup = lookup
        self.look = lookup.look
        self.others = others
        self._rates = session.knowledge.of("cascade", lambda _: RatesFindings())
        self._takes_trees = session.takes_trees
        self._constraint = session.constraint
        self._target = session.target
        self._begun = 0.0
        # The source that was asked in this round, and the one whose tokens are verified: none if it drafted nothing.
        self._asked: str | None = None
        self._used: str | None = None
        self._size = self._drafted = 0

    @property
    def steps(self) -> int:
        """Forwards of all drafts."""
        return sum(drafter.steps for drafter in self.others.values())

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        """See :meth:`Drafter.propose`."""
        self._begun = perf_counter() - self._target.compile_seconds
        trees = self.lookup.plan(text, max_new)
        self._asked = self._used = fastest(self._arms(trees, max_new)).source
        if self._used is None:
            return self.lookup.draft(text, trees)
        draft = allowed(text, self.others[self._used].propose(text, max_new), self._constraint)
        self._size, self._drafted = draft.size, sum(draft.lengths)
        if not draft.size:
            self._used = None
            return self.lookup.draft(text, trees)
        return self._grafted(text, max_new, draft, self._rates.of(self._used))

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """See :meth:`Drafter.update`."""
        new = self.lookup.learn(text, verdicts)
        seconds = perf_counter() - self._target.compile_seconds - self._begun
        if self._asked is None:
            self.lookup.clock.add(max(map(len, self.lookup.trees)), new, seconds)
        for name, drafter in self.others.items():
            if name == self._used:
                # Accepted free tokens do not count for this source.
                own = [
                    replace(verdict, nodes=[node if node <= self._size else -1 for node in verdict.nodes])
                    for verdict in verdicts
                ]
                accepted = sum(node >= 0 for verdict in own for node in verdict.nodes)
                self._rates.of(name).add(new, seconds, accepted, self._drafted)
                drafter.update(text, own, logits)
            else:
                if name == self._asked:
                    self._rates.of(name).add(new, seconds, 0, 0)
                else:
                    self._rates.of(name).waiting += 1
                if (observe := getattr(drafter, "observe", None)) is not None:
                    observe(text, verdicts, logits)

    def finish(self, text: Text) -> None:
        """See :meth:`Drafter.finish`."""
        self.lookup.finish(text)
        for drafter in self.others.values():
            drafter.finish(text)

    def report(self, stats: GenerationStats) -> None:
        """See :meth:`Drafter.report`."""
        self.lookup.report(stats)
        for drafter in self.others.values():
            drafter.report(stats)

    def _arms(self, trees: list[TokenTree], max_new: list[int]) -> list[SourceArm]:
        """Free drafts, and once their rounds were timed for comparison, the other sources."""
        clock, rows = self.lookup.clock, sum(count > 0 for count in max_new)
        if not (rows and clock.is_measured):
            return [SourceArm(None, speedup=1.0)]
        free = sum(tree.expected for tree, count in zip(trees, max_new, strict=True) if count)
        seconds = clock.costs.seconds[max(map(len, trees))]
        arms = [SourceArm(None, speedup=free / rows * clock.plain / seconds)]
        for name, drafter in self.others.items():
            promised: float | None = getattr(drafter, "expected_speedup", None)
            arms.append(SourceArm(name, speedup=self._rates.of(name).speedup(promised, rows / clock.plain)))
        return arms

    def _grafted(self, text: Text, max_new: list[int], draft: Draft, rates: SourceRates) -> Draft:
        """The draft of another source with free tokens beside and after it, as far as they pay."""
        tokens = draft.tokens.tolist()
        seeds = [_seed(draft, row, tokens[row], rates.acceptance_rate) for row in range(text.batch_size)]
        grow = self._takes_trees and not draft.skips_verification
        trees = self.lookup.grown(text, max_new, seeds) if grow else [seed for seed, _ in seeds]
        self.lookup.use(trees, [places for _, places in seeds], draft.size)
        further = max(len(tree) - len(seed) for tree, (seed, _) in zip(trees, seeds, strict=True))
        if not further:
            return draft
        added, parents, lengths = [], [], []
        for tree, (seed, places), whole in zip(trees, seeds, _parents(draft), strict=True):
            nodes = [*places, *range(draft.size + 1, draft.size + 1 + len(tree) - len(seed))]
            new = [nodes[parent] for parent in tree.parents[len(seed) :]]
            added.append([*tree.tokens[len(seed) :], *[0] * (further - len(new))])
            parents.append([*whole, *new, *[-1] * (further - len(new))])
            lengths.append(tree.depth)
        more = upload(added, draft.tokens.device)
        return replace(
            draft,
            tokens=torch.cat([draft.tokens, more], dim=1),
            listed=[[*known, *new] for known, new in zip(tokens, added, strict=True)],
            lengths=lengths,
            parents=parents,
            num_drawn=draft.size if draft.num_drawn is None else draft.num_drawn,
        )


def _parents(draft: Draft) -> list[list[int]]:
    """For each row the parents of all nodes, -1 for those that do not count."""
    if draft.parents is not None:
        return draft.parents
    return [[node if node < length else -1 for node in range(draft.size)] for length in draft.lengths]


def _seed(draft: Draft, row: int, tokens: list[int], rate: float) -> tuple[TokenTree, list[int]]:
    """A row's nodes that count, as a tree, and for each node of the tree the draft's node, the last token first."""
    places, number = [0], {0: 0}
    parents, depths = [], [0]
    for node, parent in enumerate(_parents(draft)[row], start=1):
        if parent >= 0:
            number[node] = len(places)
            places.append(node)
            parents.append(number[parent])
            depths.append(depths[number[parent]] + 1)
    # Siblings share the probability that the first child leaves.
    reach, seen = [1.0], set()
    for parent in parents:
        share = rate if parent not in seen else (1.0 - rate) * rate
        seen.add(parent)
        reach.append(reach[parent] * share)
    kept = tuple(tokens[node - 1] for node in places[1:])
    return TokenTree(kept, tuple(parents), tuple(reach[1:])), places
