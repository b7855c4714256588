"""Stop rules by a number of each token, which the host compares with a bound when it reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

# (value [b] of the draft's token before, ``None`` for the first one; logits [b, v]) to the value [b] of a token.
Reach = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TracedRule:
    """Ends a draft after the token whose value is below a bound.

    Attributes:
        reach: gives that value, which is finite where the logits can be chosen from. The same function for equal
            rules, since graphs are found by it; ``None`` where no token ends a draft.
        bounds: of each row, which may change from draft to draft.
    """

    reach: Reach | None
    bounds: tuple[float, ...]

    def values(self, before: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """``[b]`` the value of a token, or the highest logit where none ends a draft."""
        return logits.amax(-1) if self.reach is None else self.reach(before, logits)

    def judge(self, values: Sequence[float], tokens: Sequence[int], eos: Collection[int]) -> Judged:
        """What the values of all rows' tokens say; ``eos`` ends a draft, too."""
        counts = [math.isfinite(value) for value in values]
        bounds = self.bounds or [-math.inf] * len(counts)
        ends = [v < bound or token in eos for v, bound, token in zip(values, bounds, tokens, strict=True)]
        return Judged(counts, ends)


@dataclass(frozen=True)
class Judged:
    """Of one token of each row.

    Attributes:
        counts: whether it is a prediction: logits that are no numbers predict nothing.
        ends: whether the row's draft ends with it.
    """

    counts: list[bool]
    ends: list[bool]


NEVER = TracedRule(None, ())
