"""Drafts under grammars: forbidden tokens are cut, and where nothing is drafted, forced tokens are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..batch import Draft, Text, Verdict
from ..grammar.rows import Constraint, Spot
from ..stats import GenerationStats
from .source import FixedDrafter


class ConstrainedDrafter(FixedDrafter):
    """Proposes what another drafter does, as far as grammars allow it, and forced tokens where that is nothing."""

    def __init__(self, drafter: FixedDrafter, constraint: Constraint, affordable: Callable[[int], int]) -> None:
        self._drafter, self._constraint, self._affordable = drafter, constraint, affordable
        self._own = Draft(torch.zeros(0, 0, dtype=torch.long, device="cpu"), [])
        self.needs_ended_rows = drafter.needs_ended_rows
        self.look, self.reads_logits = drafter.look, drafter.reads_logits

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        self._own = self._drafter.propose(text, max_new)
        draft = allowed(text, self._own, self._constraint)
        if self._drafter.knows_grammars:
            return draft
        most = self._affordable(self._drafter.most_certain())
        return with_forced(text, draft, self._constraint, [min(count, most) for count in max_new])

    def update(self, text: Text, verdicts: list[Verdict], logits: Any) -> None:
        """See :meth:`Drafter.update`; accepted forced tokens do not count for the drafter."""
        drafter, own = self._drafter, self._own
        if drafter.observe is not None and not own.size and logits.shape[1] > 1:
            drafter.observe(text, verdicts, logits)
        else:
            lasts = [own.size if own.is_tree else length for length in own.lengths]
            drafter.update(text, [one.up_to(last) for one, last in zip(verdicts, lasts, strict=True)], logits)
        self.steps, self.needs_ended_rows = drafter.steps, drafter.needs_ended_rows

    def finish(self, text: Text) -> None:
        self._drafter.finish(text)

    def report(self, stats: GenerationStats) -> None:
        self._drafter.report(stats)


def allowed(text: Text, draft: Draft, constraint: Constraint) -> Draft:
    """The draft without what grammars forbid, as if that had never been drawn; nodes keep their numbers."""
    if not constraint or not draft.size:
        return draft
    spots = [constraint.at(text, row) for row in range(text.batch_size)]
    line = [list(range(length)) for length in draft.lengths]
    rows = list(zip(spots, draft.tokens.tolist(), line if draft.parents is None else draft.parents, strict=True))
    paths = [_allowed_paths(*row) for row in rows]
    parents = [
        [parent if path is not None else -1 for parent, path in zip(row, kept[1:], strict=True)]
        for (_, _, row), kept in zip(rows, paths, strict=True)
    ]
    q = _drawn_as_allowed(draft, spots, paths, parents)
    depths = [max(len(path) for path in kept if path is not None) for kept in paths]
    return replace(draft, parents=None if draft.parents is None else parents, lengths=depths, q=q)


def with_forced(text: Text, draft: Draft, constraint: Constraint, max_new: list[int]) -> Draft:
    """The draft, with forced tokens in rows for which it has none; trees are left unchanged."""
    if draft.is_tree or draft.states is not None:
        return draft
    forced = [
        constraint.at(text, row).forced(count) if count and not length else ()
        for row, (count, length) in enumerate(zip(max_new, draft.lengths, strict=True))
    ]
    lengths = [length or len(new) for length, new in zip(draft.lengths, forced, strict=True)]
    kept = min(draft.size, max(lengths))
    more = max(lengths) - kept
    tokens = F.pad(draft.tokens[:, :kept], (0, more))
    q = None if draft.q is None else F.pad(draft.q[:, :kept], (0, 0, 0, more))
    for row, new in enumerate(forced):
        if new:
            tokens[row, : len(new)] = torch.tensor(new, device=tokens.device)
            if q is not None:
                q[row, : len(new)] = F.one_hot(tokens[row, : len(new)], q.shape[-1]).to(q.dtype)
    return replace(draft, tokens=tokens, listed=None, lengths=lengths, q=q)


def _allowed_paths(spot: Spot, tokens: list[int], parents: list[int]) -> list[list[int] | None]:
    """The tokens down to each node, ``None`` for nodes that are forbidden or below a forbidden one."""
    paths: list[list[int] | None] = [[]]
    for token, parent in zip(tokens, parents, strict=False):
        before = paths[parent] if parent >= 0 else None
        paths.append([*before, token] if before is not None and spot.allows(before, token) else None)
    return paths


def _drawn_as_allowed(
    draft: Draft, spots: list[Spot], paths: list[list[list[int] | None]], parents: list[list[int]]
) -> torch.Tensor | None:
    """The distributions of a draft, corrected for its forbidden tokens, as if only allowed ones had been drawn."""
    q = draft.q
    for row, (spot, known) in enumerate(zip(spots, paths, strict=True)):
        drawn = parents[row][: draft.num_drawn] if q is not None else []
        for node in set(drawn) - {-1}:
            path = known[node]
            assert q is not None
            assert path is not None
            mask = spot.mask(path).to(q.device)
            if bool(q[row, node][~mask].any()):
                q = q.clone() if q is draft.q else q
                q[row, node] *= mask
                q[row, node] /= q[row, node].sum()
    return q
