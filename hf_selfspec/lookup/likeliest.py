"""The likeliest next tokens and their probabilities, as few reads and passes over a vocabulary as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from ..model.transfer import Pending
from .successors import WIDTH

# Tokens of a vocabulary that are compared at a time, and how many such stretches tell what all tokens sum up to: most
# of the time goes into exponentials, and what is learned are probabilities by factors of four.
_STRETCH, _SUMMED = 64, 64


def likeliest(logits: torch.Tensor, spread: Callable[[torch.Tensor], torch.Tensor] = lambda found: found) -> Pending:
    """The most likely next tokens, and about their probabilities, ``[b, t, 8]`` each, from logits ``[b, t, v]``;
    ``spread`` expands both."""
    v = logits.shape[-1]
    if v % _STRETCH:
        logits = pad(logits, (0, -v % _STRETCH), value=-torch.inf)
    stretches = logits.unflatten(-1, (-1, _STRETCH))
    # The largest logits are in the stretches with the largest maxima.
    chosen = stretches.amax(-1).topk(min(WIDTH, stretches.shape[-2]), dim=-1).indices
    found = stretches.gather(-2, chosen[..., None].expand(*chosen.shape, _STRETCH))
    highest, places = found.flatten(-2).topk(min(WIDTH, v), dim=-1)
    tokens = (chosen.gather(-1, places // _STRETCH) * _STRETCH + places % _STRETCH).clamp(max=v - 1)
    step, most = -(-stretches.shape[-2] // _SUMMED), highest[..., :1].float()
    sums = (found.float() - most[..., None]).exp_().sum(-1)
    some = (stretches[..., ::step, :].float() - most[..., None]).exp_().sum((-1, -2))
    rest = (some - (sums * (chosen % step == 0)).sum(-1)).clamp(min=0.0)
    shares = (highest.float() - most).exp_() / (sums.sum(-1) + step * rest)[..., None]
    return Pending(
        spread(tokens), spread(shares.nan_to_num(nan=0.0))
    )  # logits that overflow (float16) carry no information


def tops_of(found: Pending) -> list[list[tuple[Sequence[int], Sequence[float]]]]:
    """What :func:`likeliest` found for each row and node."""
    return [list(zip(*pair, strict=True)) for pair in zip(*found.lists(), strict=True)]
