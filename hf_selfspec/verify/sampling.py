"""Speculative sampling: each token has exactly the full model's distribution, whatever is drafted."""

from __future__ import annotations

import torch

from .greedy import best_tokens


def choose_sampled(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> tuple[int, int | None]:
    """Accepts one of ``drafted`` (``num_drawn`` from ``q`` without replacement, then named ones, ``q`` 1) or draws
    another, so that it is distributed as ``softmax(scores)``: recursive rejection sampling (arXiv:2402.14160)."""
    p = scores.float().softmax(-1)
    for index, token in enumerate(drafted[: num_drawn if q is not None else 0]):
        assert q is not None
        at_token = float(q[token])
        if at_token <= 0.0:
            break
        if float(torch.rand((), device=p.device, dtype=p.dtype)) < float(p[token]) / at_token:
            return token, index
        residual = (p - q).clamp_(min=0.0)
        q = q.clone()
        q[token] = 0.0
        q = q / q.sum().clamp_(min=torch.finfo(q.dtype).tiny)
        mass = residual.sum()
        if not float(mass) > 0.0:
            # p and q are equal but for rounding, so any draw from p will do.
            break
        p = residual / mass
    token = int(torch.multinomial(p, 1))
    named = drafted[num_drawn:] if q is not None else drafted
    return token, len(drafted) - len(named) + named.index(token) if token in named else None


def draw_without_replacement(q: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens ``[b, count]`` drawn in turn from ``q`` ``[b, v]`` by the Gumbel-top-k trick (Kool et al. 2019,
    arXiv:1903.06059); tokens of probability 0 where there are too few others."""
    noise = torch.empty_like(q).exponential_()
    return (q / noise).topk(count, dim=-1).indices


def draw(p: torch.Tensor) -> torch.Tensor:
    """Draws a token ``[...]`` from each of ``[..., v]``, which need not add up to 1, as the smallest of exponential
    variables with these rates; unlike ``torch.multinomial`` without waiting for a GPU."""
    return best_tokens(p / torch.empty_like(p).exponential_())


def accept_line(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For drafted tokens ``[b, t]`` drawn from ``q`` ``[b, t, v]``: whether each is accepted if those before it are,
    and the one in its place if not, both ``[b, t]`` (Leviathan et al. 2023, algorithm 1: ``u q(x) < p(x)``)."""
    at_token = drafted[..., None]
    p_token, q_token = p.gather(-1, at_token)[..., 0], q.gather(-1, at_token)[..., 0]
    # A token that could not have been drawn is rejected, and the token in its place is drawn from p.
    could = q_token > 0.0
    accepted = could & (torch.rand_like(p_token) * q_token < p_token)
    residual = (p - q * could[..., None]).clamp_(min=0.0)
    # Without a residual p and q are equal but for rounding, so any draw from p will do.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0.0, residual, p)
    return accepted, draw(residual)
