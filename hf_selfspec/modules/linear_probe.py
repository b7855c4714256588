"""A linear probe that estimates the probability that a drafted token is accepted (AdaSPEED §II.B)."""

import torch
import torch.nn as nn

from .draft_module import About, DraftModule


class LinearProbe(DraftModule):
    """``σ(v · h + b)`` of the state ``h`` from which a token is drafted; the ``confidence`` of a stop rule.

    Args:
        exit_layer: the exit layer ``E`` whose states the probe reads.
        hidden_size: their width ``d``.
        about: see :class:`DraftModule`.
    """

    kind, usage = "probe", "SelfSpec.adaspeed(probe={!r})"

    def __init__(self, exit_layer: int, hidden_size: int, about: About = None) -> None:
        super().__init__(about)
        self.exit_layer = int(exit_layer)
        self.direction = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.direction.weight)
        nn.init.zeros_(self.direction.bias)

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """``[...]`` log odds of acceptance from states ``[..., d]``."""
        weight = self.direction.weight
        return self.direction(states.to(weight.device, weight.dtype)).squeeze(-1)

    @torch.no_grad()
    def forward(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[b]`` probabilities from states ``[b, d]``; logits ``[b, v]`` are not used."""
        return self.on(hidden_states.device).scores(hidden_states).sigmoid().to(logits.device)
