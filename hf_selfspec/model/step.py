"""What forwards give, and who looks into prefills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Best:
    """The tokens that logits favour.

    Attributes:
        tokens: ``[b, s]`` the one of the highest logit.
        highest: ``[b, s]`` that logit.
    """

    tokens: torch.Tensor
    highest: torch.Tensor


@dataclass
class Step:
    """What one forward gave.

    Attributes:
        logits: ``[b, s, v]``, or ``None`` for a forward without the output head.
        prefix_state: ``[b, s, d]`` hidden state at the layer that was to be captured, else ``None``.
        exit_state: ``[b, s, d]`` hidden state that left the last layer that ran, before the final norm.
        best: what the logits favour, where a graph has found that, too.
    """

    logits: torch.Tensor | None
    prefix_state: torch.Tensor | None
    exit_state: torch.Tensor | None
    best: Best | None = None


@dataclass
class PrefillObserver:
    """What receives the states of prefills.

    Attributes:
        layer: the layer.
        observe: receives the states ``[b, s, d]`` that enter it, each row's first slot and number of real tokens.
    """

    layer: int
    observe: Callable[[torch.Tensor, Sequence[int], list[int]], None]
