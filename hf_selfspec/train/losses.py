"""Losses and metrics of drafts against the whole model, without keeping the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..model.exits import LOGIT_ELEMENTS

Head = Callable[[torch.Tensor], torch.Tensor]
# A value for each token, from the logits [n, v] of a draft and those of the whole model.
Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weighted_exit_losses(
    head: Head,
    parameters: Sequence[nn.Parameter],
    states: torch.Tensor,
    targets: torch.Tensor,
    weights: Sequence[float],
    vocabulary: int,
    teacher: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums the cross entropies of exits: ``Σ weight · Σ loss``, and the sums ``[k]`` without a gradient.

    The head takes states ``[k, n, d]`` to logits for targets ``[n]``, a chunk of tokens at a time. Gradients are
    computed in the forward pass already, so the head runs once for each token; the backward pass only scales them.
    With a teacher (states ``[n, d]`` from which the head predicts the wanted distribution ``p``), it is ``KL(p ‖ q)``.
    """
    chunk = max(1, LOGIT_ELEMENTS // vocabulary)
    total, sums = _ExitLosses.apply(head, targets, teacher, tuple(weights), chunk, states, *parameters)
    return total, sums


class _ExitLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        targets: torch.Tensor,
        teacher: torch.Tensor | None,
        weights: tuple[float, ...],
        chunk: int,
        states: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = torch.zeros(len(weights), dtype=torch.float32, device=states.device)
        state_gradient = torch.empty_like(states)
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        for start in range(0, len(targets), chunk):
            piece = slice(start, start + chunk)
            wanted = None if teacher is None else head(teacher[piece]).float().log_softmax(-1)
            for exit_index, weight in enumerate(weights):
                with torch.enable_grad():
                    rows = states[exit_index, piece].detach().requires_grad_()
                    logits = head(rows).float()
                    loss = _loss(logits, targets[piece], wanted)
                    row_gradient, *found = torch.autograd.grad(
                        loss, (rows, *parameters), torch.full_like(loss, weight), allow_unused=True
                    )
                state_gradient[exit_index, piece] = row_gradient
                sums[exit_index] += loss.detach().to(sums.device)
                for place, gradient in enumerate(found):
                    known = gradients[place]
                    if known is None:
                        gradients[place] = gradient
                    elif gradient is not None:
                        known.add_(gradient)
        ctx.gradients = (state_gradient, *gradients)
        ctx.mark_non_differentiable(sums)
        total = sums.new_zeros(())  # the weights are not uploaded: that would make the host of a GPU wait
        for weight, loss in zip(weights, sums, strict=True):
            total += weight * loss
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, grad_sums: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the exit losses can be propagated back once; they keep nothing for a second time")
        gradients = [None if g is None else g * grad_total.to(g.dtype) for g in ctx.gradients]
        ctx.gradients = None
        return (None, None, None, None, None, *gradients)


def _loss(logits: torch.Tensor, targets: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """The summed loss of logits ``[n, v]``: of targets ``[n]``, or of wanted log probabilities ``[n, v]``."""
    if wanted is None:
        return F.cross_entropy(logits, targets.to(logits.device), reduction="sum")
    wanted = wanted.to(logits.device)
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)


def per_token(
    metric: Metric, head: Head, states: torch.Tensor, teacher_head: Head, final: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """Applies ``metric`` to the logits of ``head`` for ``states`` and of the teacher's for ``final``: ``[b s]`` values.

    This is done for a chunk of tokens at a time, and gradients flow through ``head``.
    """

    def of(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher_logits = teacher_head(others).float()
        return metric(head(some).float(), teacher_logits)

    pairs = states.flatten(0, 1), final.flatten(0, 1)
    chunk = max(1, LOGIT_ELEMENTS // vocabulary)
    found = []
    for start in range(0, len(pairs[0]), chunk):
        some = [rows[start : start + chunk] for rows in pairs]
        found.append(checkpoint(of, *some, use_reentrant=False) if torch.is_grad_enabled() else of(*some))
    return torch.cat(found)


def cross_entropy(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` cross entropy of the draft's distribution against the whole model's (Kangaroo, equation 3)."""
    return -(teacher.softmax(-1) * drafted.log_softmax(-1)).sum(-1)


def agreement(drafted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """``[n]`` whether both have the same first choice."""
    return (drafted.argmax(-1) == teacher.argmax(-1)).float()
