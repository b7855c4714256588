"""Drafts under grammars, without forbidden tokens."""

from dataclasses import replace

import torch

from ...batch import Draft, Text
from ..free.free import parents_of
from .rows import Constraint, DraftCursor


def allowed(text: Text, draft: Draft, constraint: Constraint) -> Draft:
    """The draft without what grammars forbid, as if that had never been drawn; nodes keep their numbers."""
    if not constraint or not draft.size:
        return draft
    spots = [constraint.at(text, row) for row in range(text.batch_size)]
    listed, drafted = draft.tokens.tolist() if draft.listed is None else draft.listed, parents_of(draft)
    paths = list(map(_allowed_paths, spots, listed, drafted))
    parents = [
        [parent if path is not None else -1 for parent, path in zip(row, of_row[1:], strict=True)]
        for row, of_row in zip(drafted, paths, strict=True)
    ]
    q = _drawn_as_allowed(draft, spots, paths, parents)
    depths = [max(len(path) for path in of_row if path is not None) for of_row in paths]
    return replace(draft, parents=None if draft.parents is None else parents, lengths=depths, q=q, listed=listed)


def _allowed_paths(spot: DraftCursor, tokens: list[int], parents: list[int]) -> list[list[int] | None]:
    """The tokens down to each node, ``None`` for nodes that are forbidden or below a forbidden one."""
    paths: list[list[int] | None] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        before = paths[parent] if parent >= 0 else None
        paths.append([*before, token] if before is not None and spot.allows(before, token) else None)
    return paths


def _drawn_as_allowed(
    draft: Draft, spots: list[DraftCursor], paths: list[list[list[int] | None]], parents: list[list[int]]
) -> torch.Tensor | None:
    """The distributions of a draft, corrected for its forbidden tokens, as if only allowed ones had been drawn."""
    q = draft.q
    if q is None:
        return None
    for row, spot in enumerate(spots):
        for node in set(parents[row][: draft.num_drawn]) - {-1}:
            path = paths[row][node]
            assert path is not None
            mask = spot.mask(path).to(q.device)
            if bool(q[row, node][~mask].any()):
                q = q.clone() if q is draft.q else q
                q[row, node] *= mask
                q[row, node] /= q[row, node].sum()
    return q
