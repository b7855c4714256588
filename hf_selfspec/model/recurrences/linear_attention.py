"""Linear attention with decay, with and without the delta rule, over a few tokens at once.

A state ``S`` ``[b, k, n, h]`` maps keys to values. Each token decays it by ``exp(g)`` and adds ``key ⊗ u``. With the
delta rule ``u = beta (value - key S)``, without it ``u = value``; the output is ``query S``. The ``u`` of a block of
tokens follow from one triangular system (Yang et al., arXiv 2412.06464), and the state after any number of these tokens
follows from their ``u``: no token has to be run again.
"""

from __future__ import annotations

import torch

from ..layout import TreeLayout
from .recurrence import Entries


def attend(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    nodes: TreeLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the output of a block of tokens.

    Args:
        state: ``[b, k, n, h]`` before the block.
        query, key: ``[b, k, t, n]``.
        value: ``[b, k, t, h]``.
        decay: ``[b, k, t, n]``, or ``[b, k, t, 1]`` if there is one for the whole head; logarithms, at most 0.
        beta: ``[b, k, t]`` for the delta rule, ``None`` without it.
        nodes: the tree that the tokens form, ``None`` for a line.

    Returns:
        Output ``[b, k, t, h]``, and ``u`` of the same shape.
    """
    t = key.shape[2]
    # The ancestors of each token, itself included: [1, 1, t, t], or [b, 1, t, t].
    before = None if nodes is None else nodes.ancestry(key.device)[:, None]
    total = decay.cumsum(2) if before is None else before.to(decay.dtype) @ decay
    gone = total.exp()
    if beta is None:
        read, known = (query * gone) @ state, value
    else:
        read, expected = (torch.cat([query, key], 2) * torch.cat([gone, gone], 2) @ state).split(t, 2)
        known = (value - expected) * beta[..., None]
    if t == 1:
        return read + (query * key).sum(-1, keepdim=True) * known, known
    weights = _weights(total, before)
    if beta is not None:
        system = _pairs(key, key, weights).tril(-1) * beta[..., None]
        known = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    return read + _pairs(query, key, weights) @ known, known


def advance(state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
    """Returns the state ``[b, k, n, h]`` after some tokens.

    Args:
        state: the state before them.
        entries: their keys ``[b, k, t, n]``, ``u`` ``[b, k, t, h]`` and decays ``[b, k, t, 1 or n]``.
        kept: ``[b, t]`` tokens that count, ``None`` for all.
    """
    key, known, decay = entries
    if kept is not None:
        here = kept[:, None, :, None]
        key, decay = key * here, decay * here
    if key.shape[2] > 1:
        total = decay.cumsum(2)
        decay = total[:, :, -1:]
        key = key * (decay - total).exp()
    left = (state * decay.exp().transpose(2, 3)).flatten(0, 1)
    return left.baddbmm_(key.transpose(2, 3).flatten(0, 1), known.flatten(0, 1)).view_as(state)


def _weights(total: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """How much of the column's token is left at the row's, ``[b, k, t, t, 1 or n]``; 0 unless it comes before that."""
    t = total.shape[2]
    if before is None:
        before = torch.ones(t, t, dtype=torch.bool, device=total.device).tril()
    return (total[:, :, :, None] - total[:, :, None]).masked_fill_(~before[..., None], -torch.inf).exp_()


def _pairs(rows: torch.Tensor, columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted products ``[b, k, t, t]`` of vectors ``[b, k, t, n]``."""
    if weights.shape[-1] == 1:
        return (rows @ columns.transpose(2, 3)) * weights[..., 0]
    return ((rows[:, :, :, None] * columns[:, :, None]) * weights).sum(-1)
