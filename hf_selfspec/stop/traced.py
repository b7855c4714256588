"""Stop rules by tensors alone, as a graph of a whole draft holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# (value [b] of the draft's token before, ``None`` for the first one; logits [b, v]) to the value [b] of a token.
Reach = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TracedRule:
    """Ends a draft after the token whose value is below a bound.

    Attributes:
        reach: gives that value. The same function for equal rules, since graphs are found by it; ``None`` where no
            token ends a draft.
        bounds: ``[b]``, which may change from draft to draft.
    """

    reach: Reach | None
    bounds: torch.Tensor | None


NEVER = TracedRule(None, None)
