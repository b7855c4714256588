"""The likeliest next tokens and their probabilities, as few reads and passes over a vocabulary as possible."""

from collections.abc import Sequence

from ..model.logits import STRETCH, Logits
from ..model.transfer import Pending
from .successors import WIDTH

# How many pieces of a vocabulary tell what all sum up to: most of the time goes into exponentials, and what is learned
# are probabilities by factors of four.
_SUMMED = 32


def likeliest(logits: Logits) -> Pending:
    """The most likely next tokens, and about their probabilities, ``[b, s, 8]`` each."""
    pieces, v = logits.stretches, logits.found.shape[-1]
    # The largest logits are in the pieces with the largest maxima.
    chosen = logits.maxima.topk(min(WIDTH, pieces.shape[-2]), dim=-1).indices
    found = logits.within(chosen)
    highest, places = found.flatten(-2).topk(min(WIDTH, v), dim=-1)
    tokens = (chosen.gather(-1, places // STRETCH) * STRETCH + places % STRETCH).clamp(max=v - 1)
    step, most = -(-pieces.shape[-2] // _SUMMED), highest[..., :1].float()
    sums = (found.float() - most[..., None]).exp_().sum(-1)
    some = (pieces[..., ::step, :].float() - most[..., None]).exp_().sum((-1, -2))
    rest = (some - (sums * (chosen % step == 0)).sum(-1)).clamp(min=0.0)
    shares = (highest.float() - most).exp_() / (sums.sum(-1) + step * rest)[..., None]
    shares = shares.nan_to_num(nan=0.0)  # logits that overflow (float16) carry no information
    return Pending(logits.spread(tokens), logits.spread(shares))


def tops_of(found: Pending) -> list[list[tuple[Sequence[int], Sequence[float]]]]:
    """What :func:`likeliest` found for each row and node."""
    return [list(zip(*pair, strict=True)) for pair in zip(*found.lists(), strict=True)]
