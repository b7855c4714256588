"""The tokens of one forward: the tree that they form, what each may attend to, and the rows that take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from .transfer import RowNumbers, upload

if TYPE_CHECKING:
    from .partial import ForwardPass

_T = TypeVar("_T")
# States are [b, s, d], with further dimensions in front in some models.
_ROW_DIM = -3


@dataclass(frozen=True)
class TreeLayout:
    """The structure of a forward's tokens where they are not a plain line.

    Attributes:
        parents: for each row, or for all together, the parent of each token: its index, -1 for a token that continues
            the text. Parents come before children
        depths: likewise for each token the distance of its position from the slot at which the forward starts. It is
            negative for tokens that are in the text already and go through the model again
        hidden: number of slots before the first token that no token sees, where the text's own copy of the tokens is
        ids: for each row the ids of the tokens after the first one, if they are uploaded together with this layout
    """

    parents: Sequence[Sequence[int]]
    depths: Sequence[Sequence[int]]
    hidden: int = 0
    ids: Sequence[Sequence[int]] | None = None
    _on: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False, init=False)

    @classmethod
    def of_tree(cls, parents: Sequence[Sequence[int]], ids: Sequence[Sequence[int]] | None = None) -> TreeLayout:
        """The layout of each row's last token and its draft.

        ``parents`` are those of nodes 1 and up, node 0 being the last token; -1 for a node that does not count, which
        sees only itself and the text. ``ids`` are those of these nodes, if the host knows them.
        """
        depths = []
        for row in parents:
            depth = [0]
            for parent in row:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            depths.append(depth)
        return cls([[-1, *row] for row in parents], depths, ids=ids)

    @classmethod
    def of_packed(cls, packed: torch.Tensor) -> TreeLayout:
        """A layout that is on a device already, see :meth:`packed`."""
        layout = cls.independent(packed.shape[1])
        layout._on[packed.device] = packed
        return layout

    @classmethod
    def replay(cls, count: int) -> TreeLayout:
        """The last ``count`` tokens with known keys and values as a line, in slots after those."""
        return cls([list(range(-1, count - 1))], [list(range(-count, 0))], count)

    @classmethod
    def independent(cls, count: int) -> TreeLayout:
        """``count`` copies of the last token, none of which sees another."""
        return cls([[-1] * count], [[0] * count])

    @property
    def size(self) -> int:
        return len(self.depths[0])

    def offsets(self, device: torch.device) -> torch.Tensor:
        """The depths ``[1 or b, t]``."""
        return self.packed(device)[:, :, self.size]

    def tokens(self, device: torch.device) -> torch.Tensor:
        """The ids ``[b, t - 1]``."""
        return self.packed(device)[:, 1:, -1]

    def ancestry(self, device: torch.device) -> torch.Tensor:
        """Whether the column's token is the row's token or one of its ancestors, ``[1 or b, t, t]``."""
        return self.packed(device)[:, :, : self.size].bool()

    def packed(self, device: torch.device) -> torch.Tensor:
        """The ancestry, followed by depths and ids, ``[1 or b, t, t + 2]``, uploaded once."""
        if device not in self._on:
            packed = np.zeros((len(self.parents), self.size, self.size + 2), dtype=np.int64)
            packed[:, :, self.size] = self.depths
            if self.ids is not None:
                packed[:, 1:, -1] = self.ids
            for row, parents in zip(packed[:, :, : self.size], self.parents, strict=True):
                for index, parent in enumerate(parents):
                    if parent >= 0:
                        row[index] = row[parent]
                    row[index, index] = 1
            self._on[device] = upload(packed, device)
        return self._on[device]

    def keys(self, slots: torch.Tensor, length: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions ``[b, n]`` of the tokens in the cache's slots, and which of them a token may see ``[b, s, n]``.

        The tokens of the tree are in ``slots`` ``[b, t]``; those from ``first`` on run, the others are in the cache.
        """
        device, (b, t) = slots.device, slots.shape
        keys = torch.arange(length, device=device)[None]
        visible = torch.ones(b, t - first, length, dtype=torch.bool, device=device)
        if self.hidden:
            visible &= ((keys < slots[:, :1] - self.hidden) | (keys >= slots[:, :1]))[:, None]
        positions = (slots[:, :1] + self.offsets(device)).expand(b, t)
        keys = keys.repeat(b, 1).scatter(1, slots, positions)
        ancestry = self.ancestry(device)[:, first:]
        return keys, visible.scatter_(2, slots[:, None].expand(b, t - first, t), ancestry.expand(b, t - first, t))


@dataclass(frozen=True)
class Feed:
    """The tokens of one forward, of the rows that take part."""

    tokens: torch.Tensor  # [b, s] ids, or [b, s, d] embeddings
    starts: RowNumbers  # slot of each row's first token
    last: RowNumbers  # the last position that each row can have
    nodes: TreeLayout | None = None  # the draft tree, None for a line
    first_node: int = 0  # the first of its nodes that is among the tokens; earlier ones are in the cache
    counts: Sequence[int] | None = None  # for a prefill the number of real tokens in each row

    def positions(self) -> torch.Tensor:
        (b, s), device = self.tokens.shape[:2], self.tokens.device
        if self.nodes is None:
            return self.starts.onwards(s, device).expand(b, s)
        offsets = self.nodes.offsets(device)[:, self.first_node :] - self.first_node
        return (self.starts.on(device) + offsets).expand(b, s)


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a batch that are still generating."""

    kept: list[int]  # their indices
    total: int  # b, number of rows of the whole batch
    _indices: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def of_list(self, values: Sequence[_T]) -> list[_T]:
        return [values[row] for row in self.kept]

    def pick(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return values.index_select(dim, self._index(values.device))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Expands a tensor ``[*n, b, s, d]`` of these rows to the whole batch, with zeros in the other rows."""
        shape = list(values.shape)
        shape[_ROW_DIM] = self.total
        return values.new_zeros(shape).index_copy_(_ROW_DIM, self._index(values.device), values)

    def _index(self, device: torch.device) -> torch.Tensor:
        if device not in self._indices:
            self._indices[device] = upload(self.kept, device)
        return self._indices[device]

    def enter(
        self, tokens: torch.Tensor, starts: RowNumbers, nodes: TreeLayout | None, run: ForwardPass
    ) -> tuple[torch.Tensor, RowNumbers, TreeLayout | None, ForwardPass]:
        """The tokens of these rows, where they start, their trees, and the forward, whose callbacks see the batch."""
        stop_fn, head_input_fn = run.stop_fn, run.head_input_fn

        def stop(layer: int, states: torch.Tensor) -> bool:
            assert stop_fn is not None
            return stop_fn(layer, self.spread(states))

        def head_input(states: torch.Tensor) -> torch.Tensor:
            assert head_input_fn is not None
            return self.pick(head_input_fn(self.spread(states)), _ROW_DIM)

        if nodes is not None and len(nodes.parents) > 1:
            packed, nodes = nodes._on, TreeLayout(self.of_list(nodes.parents), self.of_list(nodes.depths), nodes.hidden)
            nodes._on.update({device: self.pick(values, 0) for device, values in packed.items()})
        run = replace(
            run,
            state=None if run.state is None else self.pick(run.state, _ROW_DIM),
            stop_fn=None if stop_fn is None else stop,
            head_input_fn=None if head_input_fn is None else head_input,
        )
        numbers = RowNumbers.made(self.of_list(starts), lambda device: self.pick(starts.on(device), 0))
        return self.pick(tokens, 0), numbers, nodes, run

    def leave(self, run: ForwardPass) -> None:
        """Expands what the forward has found to the whole batch."""
        for name in ("logits", "captured", "exit_state"):
            if (found := getattr(run, name)) is not None:
                setattr(run, name, self.spread(found))
