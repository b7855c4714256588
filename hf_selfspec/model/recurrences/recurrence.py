"""What one kind of recurrent state has to know of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..layout import TreeLayout

# What tokens feed into a state, [b, c, t, ...]: tokens are the third dimension of each tensor.
Entries = tuple[torch.Tensor, ...]
# (state [b, ...], entries, kept [b, t] or None) to the state after the entries that count.
Advance = Callable[[torch.Tensor, Entries, torch.Tensor | None], torch.Tensor]
# (state, inputs of a block, how its tokens hang together) to its output and entries.
Outputs = Callable[[torch.Tensor, Entries, TreeLayout | None], tuple[torch.Tensor, Entries]]
# Tokens that a step takes at a time: what it computes for pairs of tokens stays small.
BLOCK = 32


class Recurrence(Protocol):
    """One kind of recurrence, with the function of transformers that computes it.

    Attributes:
        kernel: name of the function in the model's own file, for text of any length.
        parameters: its parameters. Another version's function with others is not known.
        continues: it can start from a state.
        token_dim: dimension of the tokens in its first argument.
    """

    kernel: str
    parameters: tuple[str, ...]
    continues: bool
    token_dim: int

    def prefill(
        self, kernel: Any, state: torch.Tensor | None, kept: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model's own function.

        Args:
            kernel: the function.
            state: ``[b, ...]`` where it starts, ``None`` for the beginning of the text.
            kept: ``[b, s]`` tokens that count, ``None`` for all; the others are to leave the state as it is.
            args, kwargs: what the model calls it with.

        Returns:
            Its output, and the state after the tokens that count.
        """

    def step(
        self, state: torch.Tensor, nodes: TreeLayout | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Entries]:
        """The same output for a few tokens, and what they feed into the state, which stays as it is.

        Args:
            state: ``[b, ...]`` before them.
            nodes: how they hang together, ``None`` for a line.
            args, kwargs: what the model calls its function with.
        """

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """The state after these tokens.

        Args:
            state: ``[b, ...]``.
            entries: what the tokens feed into it.
            kept: ``[b, t]`` which of them count in each row, ``None`` for all.
        """

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """The state of one call of the function in a layer, as transformers' cache has the states of all calls."""

    def store(self, state: torch.Tensor) -> torch.Tensor:
        """The reverse of :meth:`load`; the states of several calls stand side by side in the second dimension."""


def in_blocks(
    outputs_of: Outputs, advance: Advance, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None
) -> tuple[torch.Tensor, Entries]:
    """Output and entries of a tree, or of a line of any length, a block at a time.

    Args:
        outputs_of: of a block.
        advance: see :meth:`Recurrence.advance`.
        state: ``[b, ...]``.
        inputs: tensors whose third dimension is that of the tokens.
        nodes: how they hang together, ``None`` for a line.
    """
    if nodes is not None:
        return outputs_of(state, inputs, nodes)
    count = inputs[0].shape[2]
    outputs, found = [], []
    for start in range(0, count, BLOCK):
        output, entries = outputs_of(state, tuple(x[:, :, start : start + BLOCK] for x in inputs), None)
        outputs.append(output)
        found.append(entries)
        if start + BLOCK < count:
            state = advance(state, entries, None)
    if len(outputs) == 1:
        return outputs[0], found[0]
    return torch.cat(outputs, 2), tuple(torch.cat(parts, 2) for parts in zip(*found, strict=True))
