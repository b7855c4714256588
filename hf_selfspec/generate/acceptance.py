"""Greedy choices, and speculative sampling: each token has the full model's distribution, whatever is drafted."""

import torch

from ..model.graphs.captures import drawing
from ..model.logits import best_tokens, draw
from ..model.transfer import read


def choose_greedy(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> tuple[int, int | None]:
    """Returns the full model's token at one position, and the index of the drafted token it confirms, or ``None``."""
    token = int(best_tokens(scores))
    return token, drafted.index(token) if token in drafted else None


def choose_sampled(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> tuple[int, int | None]:
    """Accepts one of the drafted tokens or draws another, so that the result is distributed as ``softmax(scores)``.

    One token ``x`` drawn from ``q`` (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1) is accepted with
    probability ``min(1, p(x) / q(x))``; after a rejection the token is drawn from ``p' = norm(max(0, p - q))``. A token
    ``x`` is then the result with probability ``min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x)`` (appendix A.1 there).

    Several drawn tokens (a tree) are tried in the order in which they were drawn without replacement: a rejection
    replaces ``p`` by ``p'`` and ``q`` by ``norm(q`` without the token ``)``, from which the next one was drawn, so that
    the same argument holds for each of them. With replacement this is multi-step speculative sampling (SpecInfer,
    arXiv:2305.09781, algorithm 2), without it recursive rejection sampling (Jeon et al. 2024, arXiv:2402.14160).

    Other tokens were named without drawing (as from earlier text): their ``q`` is 1 at each in turn, so that ``x`` is
    accepted with probability ``p(x)``, and ``p'`` is ``p`` without ``x``. That is the same as drawing from ``p`` and
    testing whether the token is among them.

    Args:
        scores: ``[v]`` processed scores of the full model.
        drafted: tokens proposed for this position: first those that were drawn, in that order, then distinct others.
        q: ``[v]`` the distribution from which the first ``num_drawn`` were drawn without replacement.
        num_drawn: how many of them were drawn. The others were named, whatever ``p`` is.

    Returns:
        The token, and its index in ``drafted`` or ``None``.
    """
    p = scores.float().softmax(-1)
    drawn = drafted[:num_drawn] if q is not None else []
    could, accepted = torch.ones((), dtype=torch.bool, device=p.device), list[torch.Tensor]()
    for index, token in enumerate(drawn):
        assert q is not None
        # A token that could not have been drawn is rejected, and so are those after it.
        could = could & (q[token] > 0.0)
        with drawing:
            uniform = torch.rand((), device=p.device, dtype=p.dtype)
        accepted.append(could & (uniform * q[token] < p[token]))
        if p.device.type == "cpu" and accepted[-1]:
            return token, index
        residual = (p - q).clamp_(min=0.0)
        mass = residual.sum()
        # Without a residual p and q are equal but for rounding, so any draw from p will do.
        could = could & (mass > 0.0)
        p = torch.where(could, residual / mass, p)
        q = q.index_fill(0, torch.full((1,), token, device=q.device), 0.0)
        q /= q.sum().clamp_(min=torch.finfo(q.dtype).tiny)
    *flags, token = read(*accepted, draw(p))
    if True in flags:
        return drafted[flags.index(True)], flags.index(True)
    named = drafted[len(drawn) :]
    return token, len(drawn) + named.index(token) if token in named else None


def accept_line(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes all decisions about a line of drawn tokens at once (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1).

    A token is accepted if ``u < p(x) / q(x)``, with ``u`` uniform on ``[0, 1)``, computed as ``u q(x) < p(x)``.

    Args:
        p: ``[b, t, v]`` the full model's distributions at the drafted tokens.
        q: ``[b, t, v]`` the distributions from which these were drawn.
        drafted: ``[b, t]`` the tokens.

    Returns:
        Booleans ``[b, t]``, whether each is accepted if those before it are, and ``[b, t]`` the tokens drawn in their
        place if they are not.
    """
    at_token = drafted[..., None]
    p_token, q_token = p.gather(-1, at_token)[..., 0], q.gather(-1, at_token)[..., 0]
    # A token that could not have been drawn is rejected, and the token in its place is drawn from p.
    could = q_token > 0.0
    with drawing:
        uniform = torch.rand_like(p_token)
    accepted = could & (uniform * q_token < p_token)
    residual = (p - q * could[..., None]).clamp_(min=0.0)
    # Without a residual p and q are equal but for rounding, so any draw from p will do.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0.0, residual, p)
    return accepted, draw(residual)
