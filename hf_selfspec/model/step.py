"""The results of forwards, and observers of prefills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Best:
    """The tokens with the highest logits.

    Attributes:
        tokens: ``[b, s]`` the token with the highest logit.
        highest: ``[b, s]`` that logit.
    """

    tokens: torch.Tensor
    highest: torch.Tensor


@dataclass
class Step:
    """The results of one forward.

    Attributes:
        logits: ``[b, s, v]``, or ``None`` for a forward without the output head.
        prefix_state: ``[b, s, d]`` hidden state that enters the captured layer, ``None`` if none was captured.
        exit_state: ``[b, s, d]`` hidden state that left the last layer that ran, before the final norm; ``None`` where
            the model ran as it is.
        best: the tokens with the highest logits, if a graph has found them, too.
    """

    logits: torch.Tensor | None
    prefix_state: torch.Tensor | None
    exit_state: torch.Tensor | None
    best: Best | None = None


@dataclass
class PrefillObserver:
    """Receives the states that enter one layer in prefills.

    Attributes:
        layer: the layer.
        observe: called with the states ``[b, s, d]`` that enter it, each row's first slot and number of real tokens.
    """

    layer: int
    observe: Callable[[torch.Tensor, Sequence[int], list[int]], None]
