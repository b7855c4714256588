"""Short causal convolutions: the state is their last inputs."""

from __future__ import annotations

import torch

from .recurrence import Entries


class Convolution:
    """The inputs of a causal convolution; state ``[b, c, width]``.

    Args:
        width: how many of them the next tokens may need.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def prefill(self, inputs: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """The state after the beginning of a text, ``[b, c, s]``, of which ``kept`` ``[b, s]`` counts."""
        nothing = inputs.new_zeros(*inputs.shape[:2], self.width)
        return self.advance(nothing, (inputs,), kept)

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """The state after more inputs; see :meth:`Recurrence.advance`."""
        whole = torch.cat([state, *entries], 2)
        if kept is None:
            return whole[:, :, -self.width :].clone()
        kept = torch.cat([kept.new_ones(kept.shape[0], state.shape[2]), kept], 1)
        last = kept.int().argsort(dim=1, stable=True)[:, None, -self.width :]
        return whole.gather(2, last.expand(-1, whole.shape[1], -1))
