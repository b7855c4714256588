"""The sources of a call under one controller, which lets nothing draft where nothing pays."""

import math
from dataclasses import replace
from time import perf_counter

import torch

from ..batch import Draft, Text, Verdict
from ..control.controller import FREE, LEAST_SPEEDUP, MATCHES, Controller
from ..lookup.tree import TokenTree
from ..model.logits import Logits, Tops
from ..model.transfer import read, upload
from ..stats import GenerationStats
from .constrained import allowed, forced
from .free import FreeDrafts, Seed
from .source import BaseDrafter, Drafter, Session, completed


def controller_of(session: Session) -> Controller:
    """The controller of a generation."""
    target, found = session.target, session.knowledge.measurements()
    device, how = target.model.device.type, "" if target.graphs is None else " compiled"
    return Controller(found, f"{device} {target.model.dtype}{how}", device == "cpu", session.is_tensor_parallel)


def controlled(drafter: Drafter, session: Session, name: str) -> BaseDrafter:
    """The drafter of the source ``name`` under a controller if it makes estimates, or where there are grammars."""
    found = completed(drafter)
    always = found.expected_speedup == math.inf or session.is_tensor_parallel
    if isinstance(found, ControlledDrafter) or (always and not session.constraint):
        return found
    return ControlledDrafter(session, controller_of(session), None, {name: found})


class ControlledDrafter(BaseDrafter):
    """Drafts with the source that is the fastest at present, with free drafts, or not at all."""

    def __init__(
        self, session: Session, controller: Controller, free: FreeDrafts | None, others: dict[str, BaseDrafter]
    ) -> None:
        self.controller, self.free, self.others = controller, free, others
        self._takes_trees = session.takes_trees
        self._constraint, self._affordable = session.constraint, session.affordable
        # Without free drafts, what makes no estimates always drafts.
        self._always = next(iter(others), None) if free is None and session.is_tensor_parallel else None
        for name, drafter in others.items() if free is None else ():
            self._always = name if drafter.expected_speedup == math.inf else self._always
        self._target = session.target
        self._unsettled = 0  # see :attr:`Target.unsettled`, before the round
        self._begun, self._now = 0.0, perf_counter if session.is_tensor_parallel else session.target.now
        # Who was asked in this round, and whose tokens are verified; whether free drafts take part.
        self._asked: str | None = None
        self._used: str | None = None
        self._size = self._drafted = 0
        self._is_free_awake = False  # whether free drafts take part in this round, with what grammars force
        self._tops: Tops | None = None
        self._lengths: list[int] = []
        self._note()

    def _note(self) -> None:
        """Notes what the loop wants to know of all drafters; with free drafts nobody waits for ended rows."""
        self.steps = sum(drafter.steps for drafter in self.others.values())
        self.needs_ended_rows = self.free is None and any(one.needs_ended_rows for one in self.others.values())
        self.reads_logits = any(one.reads_logits for one in self.others.values())

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        if self.free is not None:
            self.free.read(text)
        self._begun, self._unsettled = self._now(), self._target.unsettled
        self._lengths = list(text.lengths)
        controller, rows, active = self.controller, sum(count > 0 for count in max_new), self._target.active_rows
        controller.begin(rows, text.batch_size if active is None else len(active.kept), max(text.lengths))
        self._asked = self._used = self._free_arm(text, max_new, rows)
        self._is_free_awake = self._asked is not None
        trees = self.free.plan(text, max_new) if self.free is not None and self._is_free_awake else []
        free = controller.expected(max(map(len, trees)), _tokens(trees, max_new)) if trees else 0.0
        certain = Draft.none(text)
        if self._constraint and not self._is_free_awake:
            certain = forced(text, self._constraint, max_new, self._affordable(controller.most_certain()))
            if certain.size and sum(map(bool, certain.lengths)) == rows:
                return certain
            # A draft is for the other rows, too.
            free = controller.expected(certain.size, rows + sum(certain.lengths)) if certain.size else 0.0
        promised = {name: drafter.expected_speedup for name, drafter in self.others.items()}
        other = self._always or controller.choose(promised, free)
        if other is not None:
            self._asked = other
            draft = allowed(text, self.others[other].propose(text, max_new), self._constraint)
            if draft.size:
                self._used, self._size, self._drafted = other, draft.size, sum(draft.lengths)
                return self._grafted(text, max_new, draft) if self._is_free_awake else draft
        if certain.size:
            self._asked = None
        return self.free.draft(text, trees) if self.free is not None and trees else certain

    def _free_arm(self, text: Text, max_new: list[int], rows: int) -> str | None:
        """Which of the free drafts are awake in this round, if any."""
        if self.free is None or not rows or self.controller.curve.wants_plain:
            return None
        if self.controller.pays(FREE):
            return FREE
        return MATCHES if self.free.promise(max_new) >= LEAST_SPEEDUP else None

    def loop_steps(self, text: Text, left: int, has_loop: bool = True) -> int:
        self.controller.has_loop = has_loop
        steps = 0 if self._asked is not None else self.controller.loop_steps(left)
        return steps if steps and all(drafter.miss(text) for drafter in self.others.values()) else 0

    def follow(self, text: Text, verdicts: list[Verdict], max_new: list[int], seconds: list[float]) -> int:
        self.controller.record_loop(sum(len(verdict.tokens) for verdict in verdicts), seconds)
        if self.free is not None:
            self.free.learn(text, verdicts, None)
        rows = sum(count > 0 for count in max_new)
        self.controller.begin(rows, text.batch_size, max(text.lengths))
        promised = {name: drafter.expected_speedup for name, drafter in self.others.items()}
        self._asked = self._free_arm(text, max_new, rows) or self.controller.choose(promised)
        return self.loop_steps(text, min(max_new))

    def came_back(self, seconds: float) -> None:
        self.controller.curve.switch = seconds

    def look(self, logits: Logits) -> Tops | None:
        self._tops = Tops(logits) if self._is_free_awake else None
        return self._tops

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        new = sum(text.lengths) - sum(self._lengths)
        if self.free is not None:
            self.free.learn(text, verdicts, self._tops)
        seconds, is_usual = self._now() - self._begun, self._target.unsettled == self._unsettled
        own = [verdict.up_to(self._size) for verdict in verdicts] if self._used in self.others else verdicts
        for name, drafter in self.others.items():
            if name == self._used:
                drafter.update(text, own, logits)
            elif drafter.observe is not None:
                drafter.observe(text, verdicts, logits)
        self._note()
        if not is_usual:
            return
        if self._used in self.others:
            accepted = sum(node >= 0 for verdict in own for node in verdict.nodes)
            # Free tokens beside and after its draft are not what it is chosen for.
            gained = min(new, accepted + sum(bool(verdict.tokens) for verdict in own))
            self.controller.record(self._asked, 0, new, seconds, accepted, self._drafted, gained)
        else:
            nodes = logits.shape[1] - 1
            # A round in which only tokens were verified that a grammar forces costs as much as one of free drafts.
            self.controller.record(MATCHES if nodes and self._asked is None else self._asked, nodes, new, seconds)

    def finish(self, text: Text) -> None:
        for drafter in (self.free, *self.others.values()):
            if drafter is not None:
                drafter.finish(text)

    def report(self, stats: GenerationStats) -> None:
        for drafter in self.others.values():
            drafter.report(stats)

    def _grafted(self, text: Text, max_new: list[int], draft: Draft) -> Draft:
        """The draft of another source with free tokens beside and after it, as far as they pay."""
        assert self.free is not None
        assert self._used is not None
        rate = self.controller.arms[self._used].acceptance_rate
        tokens, *known = read(draft.tokens, *([] if draft.sure is None else [draft.sure]))
        rates = known[0] if known else [[rate] * draft.size] * text.batch_size
        seeds = [_seed(draft, *of_row) for of_row in zip(range(text.batch_size), tokens, rates, strict=True)]
        grow = self._takes_trees and not draft.skips_verification
        trees = self.free.plan(text, max_new, seeds) if grow else [seed.tree for seed in seeds]
        self.free.use(trees, seeds, draft.size)
        further = max(len(tree) - len(seed.tree) for tree, seed in zip(trees, seeds, strict=True))
        if not further:
            return draft
        added, parents, lengths = [], [], []
        for tree, seed, whole in zip(trees, seeds, _parents(draft), strict=True):
            begun = len(seed.tree)
            nodes = [*seed.places, *range(draft.size + 1, draft.size + 1 + len(tree) - begun)]
            new = [nodes[parent] for parent in tree.parents[begun:]]
            added.append([*tree.tokens[begun:], *[0] * (further - len(new))])
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


def _tokens(trees: list[TokenTree], max_new: list[int]) -> float:
    """The tokens that a round with these trees is expected to bring."""
    return sum(tree.expected for tree, count in zip(trees, max_new, strict=True) if count)


def _parents(draft: Draft) -> list[list[int]]:
    """For each row the parents of all nodes, -1 for those that do not count."""
    if draft.parents is not None:
        return draft.parents
    return [[node if node < length else -1 for node in range(draft.size)] for length in draft.lengths]


def _seed(draft: Draft, row: int, tokens: list[int], rates: list[float]) -> Seed:
    """A row's nodes that count, with how likely each is to be reached by the acceptance rates at each depth."""
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
    for parent, depth in zip(parents, depths[1:], strict=True):
        rate = rates[depth - 1]
        share = rate if parent not in seen else (1.0 - rate) * rate
        seen.add(parent)
        reach.append(reach[parent] * share)
    kept = tuple(tokens[node - 1] for node in places[1:])
    return Seed(TokenTree(kept, tuple(parents), tuple(reach[1:])), places)
