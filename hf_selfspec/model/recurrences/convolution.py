"""Short causal convolutions: the state is their last inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout import TreeLayout
from .recurrence import Entries


class Convolution:
    """The inputs of a causal convolution; state ``[b, c, width]``.

    Args:
        width: how many inputs the next tokens may need.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def prefill(self, inputs: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """The state after the beginning of a text, ``[b, c, s]``, of which the columns ``kept`` ``[b, s]`` count."""
        nothing = inputs.new_zeros(*inputs.shape[:2], self.width)
        return self.advance(nothing, (inputs,), kept)

    def windows(self, state: torch.Tensor, inputs: torch.Tensor, nodes: TreeLayout) -> torch.Tensor:
        """For each token of a tree the last inputs on its path, ``[b * t, c, width]``, from inputs ``[b, c, t]``."""
        whole = torch.cat([state, inputs], 2)
        b, t = whole.shape[0], inputs.shape[2]
        places = torch.tensor([self._paths(parents) for parents in nodes.parents], device=whole.device)
        places = places.view(len(nodes.parents), 1, -1).expand(b, whole.shape[1], -1)
        return whole.gather(2, places).unflatten(2, (t, self.width)).transpose(1, 2).flatten(0, 1)

    def _paths(self, parents: Sequence[int]) -> list[list[int]]:
        """For each token the columns of its window; the state's come first."""
        paths: list[list[int]] = []
        for token, parent in enumerate(parents):
            before = list(range(self.width)) if parent < 0 else paths[parent]
            paths.append([*before[1:], self.width + token])
        return paths

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """The state after more inputs; see :meth:`Recurrence.advance`."""
        whole = torch.cat([state, *entries], 2)
        if kept is None:
            return whole[:, :, -self.width :].clone()
        kept = torch.cat([kept.new_ones(kept.shape[0], state.shape[2]), kept], 1)
        last = kept.int().argsort(dim=1, stable=True)[:, None, -self.width :]
        return whole.gather(2, last.expand(-1, whole.shape[1], -1))
