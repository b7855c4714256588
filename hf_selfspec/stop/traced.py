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


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 probability ``[b]`` of logits ``[b, v]``."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def falling(before: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """The top-1 probability of each token, see :class:`ConfidenceThreshold`."""
    return confidence(logits)


def product(before: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """The product of the draft's top-1 probabilities, see :class:`ProductThreshold`."""
    sure = confidence(logits)
    return sure if before is None else before * sure
