"""The interface of a kind of recurrent state, and the state of a convolution: its last inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..layout import TreeLayout

# What tokens feed into a state, [b, c, t, ...]: tokens are the third dimension of each tensor.
Entries = tuple[torch.Tensor, ...]
# Maps (state [b, ...], entries, kept [b, t] or None) to the state after the entries that count.
Advance = Callable[[torch.Tensor, Entries, torch.Tensor | None], torch.Tensor]
# Tokens that a step processes at a time, so that what it computes for pairs of tokens stays small.
BLOCK = 32


class Recurrence:
    """One kind of recurrence, with the function of transformers that computes it."""

    kernel: str  # name of the function in the model's own file, for text of any length
    parameters: tuple[str, ...]  # its parameters; functions of other versions with other ones are not supported
    continues = True  # whether it can start from a state
    token_dim = 1  # dimension of the tokens in its first argument

    @abstractmethod
    def prefill(
        self, kernel: Any, state: torch.Tensor | None, kept: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model's own function from a state ``[b, ...]``, ``None`` at the beginning of the text.

        Returns its output, and the state after the tokens that count: those of ``kept`` ``[b, s]``, ``None`` for all.
        """

    @abstractmethod
    def step(
        self, state: torch.Tensor, nodes: TreeLayout | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Entries]:
        """Returns the same output for a few tokens, and what they feed into the state, which is not changed."""

    @abstractmethod
    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """Returns the state after those of these tokens that count, ``kept`` ``[b, t]``, ``None`` for all."""

    @abstractmethod
    def outputs(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        """Returns output and entries of a block of tokens, of whose inputs tokens are the third dimension."""

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """Returns the state of one call of the function, from the states of all calls in transformers' cache."""
        return state

    def store(self, state: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`load`; the states of several calls are concatenated in the second dimension."""
        return state

    def in_blocks(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        """Returns :meth:`outputs` of a tree, or of a line of any length, a block at a time."""
        if nodes is not None:
            return self.outputs(state, inputs, nodes)
        count = inputs[0].shape[2]
        outputs, found = [], []
        for start in range(0, count, BLOCK):
            output, entries = self.outputs(state, tuple(x[:, :, start : start + BLOCK] for x in inputs), None)
            outputs.append(output)
            found.append(entries)
            if start + BLOCK < count:
                state = self.advance(state, entries, None)
        if len(outputs) == 1:
            return outputs[0], found[0]
        return torch.cat(outputs, 2), tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))


def time_steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The ``Δ`` of each token, given what precedes its bias, which has the shape of ``dt``."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


class Convolution:
    """The inputs of a causal convolution that the next tokens may need; state ``[b, c, width]``."""

    def __init__(self, width: int) -> None:
        self.width = width

    def prefill(self, inputs: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """The state after the beginning of a text, ``[b, c, s]``, of which the columns ``kept`` ``[b, s]`` count."""
        return self.advance(inputs.new_zeros(*inputs.shape[:2], self.width), (inputs,), kept)

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
