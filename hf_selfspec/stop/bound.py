"""Stop rules as a bound on one number per token, which the host compares when it reads the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

# Maps (value [b] of the draft's previous token, ``None`` for the first; logits [b, v]) to the value [b] of a token.
Reach = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Bound:
    """Ends a draft after the token whose value is below a bound.

    Attributes:
        reach: returns that value, which is finite where the logits are valid; ``None`` if no token ends a draft.
        bounds: one for each row; they may change from draft to draft.
    """

    reach: Reach | None
    bounds: tuple[float, ...]

    def values(self, before: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """The value ``[b]`` of a token, or its highest logit if no token ends a draft."""
        return logits.amax(-1) if self.reach is None else self.reach(before, logits)

    def judge(self, values: Sequence[float], tokens: Sequence[int], eos: Collection[int]) -> Judged:
        """Decides by the values of all rows' tokens which drafts end; ``eos`` tokens end a draft, too."""
        counts = [math.isfinite(value) for value in values]
        bounds = self.bounds or [-math.inf] * len(counts)
        ends = [v < bound or token in eos for v, bound, token in zip(values, bounds, tokens, strict=True)]
        return Judged(counts, ends)


@dataclass(frozen=True)
class Judged:
    """What was decided about one token of each row.

    Attributes:
        counts: for each row whether the token is a prediction: NaN logits predict nothing.
        ends: for each row whether its draft ends with the token.
    """

    counts: list[bool]
    ends: list[bool]


NEVER = Bound(None, ())
