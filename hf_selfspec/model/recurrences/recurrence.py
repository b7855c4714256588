"""The interface of a kind of recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..layout import TreeLayout

# What tokens feed into a state, [b, c, t, ...]: tokens are the third dimension of each tensor.
Entries = tuple[torch.Tensor, ...]
# Maps (state [b, ...], entries, kept [b, t] or None) to the state after the entries that count.
Advance = Callable[[torch.Tensor, Entries, torch.Tensor | None], torch.Tensor]
# Maps (state, inputs of a block, the tree of its tokens) to its output and entries.
Outputs = Callable[[torch.Tensor, Entries, TreeLayout | None], tuple[torch.Tensor, Entries]]
# Tokens that a step processes at a time, so that what it computes for pairs of tokens stays small.
BLOCK = 32


class Recurrence(Protocol):
    """One kind of recurrence, with the function of transformers that computes it.

    Attributes:
        kernel: name of the function in the model's own file, for text of any length.
        parameters: its parameters. Functions of other versions with other parameters are not supported.
        continues: whether it can start from a state.
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
            state: ``[b, ...]`` the state to start from, ``None`` at the beginning of the text.
            kept: ``[b, s]`` tokens that count, ``None`` for all; the others must not change the state.
            args, kwargs: the arguments of the model's call.

        Returns:
            Its output, and the state after the tokens that count.
        """

    def step(
        self, state: torch.Tensor, nodes: TreeLayout | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Entries]:
        """Returns the same output for a few tokens, and what they feed into the state, which is not changed.

        Args:
            state: ``[b, ...]`` the state before them.
            nodes: the tree that they form, ``None`` for a line.
            args, kwargs: the arguments of the model's call.
        """

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """Returns the state after these tokens.

        Args:
            state: ``[b, ...]`` the state before them.
            entries: what the tokens feed into it.
            kept: ``[b, t]`` which of them count in each row, ``None`` for all.
        """

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """Returns the state of one call of the function, from the states of all calls in transformers' cache."""

    def store(self, state: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`load`; the states of several calls are concatenated in the second dimension."""


def in_blocks(
    outputs_of: Outputs, advance: Advance, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None
) -> tuple[torch.Tensor, Entries]:
    """Computes output and entries of a tree, or of a line of any length, a block at a time.

    Args:
        outputs_of: computes them for a block.
        advance: see :meth:`Recurrence.advance`.
        state: ``[b, ...]`` the state before the tokens.
        inputs: tensors whose third dimension is that of the tokens.
        nodes: the tree that the tokens form, ``None`` for a line.
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
