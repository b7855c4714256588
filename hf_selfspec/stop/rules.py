"""Rules that say when a draft is long enough.

A rule is a callable in the manner of a ``LogitsProcessor``:
``rule(input_ids [b, s], logits [b, v], hidden_states [b, d]) -> BoolTensor [b]``. It is asked after each drafted token,
which is the last column of ``input_ids``; ``logits`` are the draft's own, from which that token was chosen, and
``hidden_states`` is the state behind them. In a batch, shorter rows are aligned right and repeat their first column on
the left. ``True`` ends the row's draft *after* that token: a rule never drops one. A function of one's own with this
signature serves as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..settings import check_count, check_share

StopRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FixedLength:
    """Drafts ``num_tokens`` tokens, always (LayerSkip §4.3).

    Args:
        num_tokens: length of a draft, at least 1.
    """

    num_tokens: int

    def __post_init__(self) -> None:
        check_count("FixedLength(num_tokens)", self.num_tokens)

    @property
    def max_draft(self) -> int:
        """Upper bound on the draft's length that this rule sets by itself."""
        return self.num_tokens

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stops after a token whose top-1 probability is below ``threshold`` (SWIFT 0.8, Kangaroo 0.6).

    Args:
        threshold: between 0 and 1, both excluded.
    """

    threshold: float = 0.8

    def __post_init__(self) -> None:
        check_share("ConfidenceThreshold(threshold)", self.threshold, zero=False, one=False)

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return confidence(logits) < self.threshold


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 probability ``[b]`` of logits ``[b, v]``."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
