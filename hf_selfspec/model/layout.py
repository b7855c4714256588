"""The tokens of one forward: the tree that they form, and what each may attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .transfer import RowNumbers, upload


@dataclass(frozen=True)
class TreeLayout:
    """Tokens that are no plain line: for each row, or all, ``parents`` (earlier indices, -1: the text), ``depths``
    (negative: text that runs again), ``hidden`` slots before them, and ``ids`` after the first."""

    parents: Sequence[Sequence[int]]
    depths: Sequence[Sequence[int]]
    hidden: int = 0
    ids: Sequence[Sequence[int]] | None = None
    _on: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False, repr=False, init=False)

    @classmethod
    def of_tree(cls, parents: Sequence[Sequence[int]], ids: Sequence[Sequence[int]] | None = None) -> TreeLayout:
        """The layout of each row's last token, node 0, and its draft: ``parents`` of nodes 1 and up, -1 for one that
        does not count and sees only itself and the text, and their ``ids``, if the host knows them."""
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
        count = packed.shape[1]
        layout = cls([[-1] * count], [[0] * count])
        layout._on[packed.device] = packed
        return layout

    @classmethod
    def replay(cls, count: int, behind: int | None = None) -> TreeLayout:
        """``count`` tokens of the text that run again, as a line in slots after it: from ``behind`` before its end on,
        by default the last ones."""
        behind = count if behind is None else behind
        return cls([list(range(-1, count - 1))], [list(range(-behind, count - behind))], behind)

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

    def windows(self, width: int, device: torch.device) -> torch.Tensor:
        """For each token of one row the last ``width`` columns on its path, of the text's last ``width`` and the
        tokens, side by side ``[t * width]``."""
        if (device, width) not in self._on:
            paths = [[*range(width)]]  # the first is that of the text, which is parent -1
            for token, parent in enumerate(self.parents[0]):
                paths.append([*paths[parent + 1][1:], width + token])
            self._on[device, width] = upload(paths[1:], device).flatten()
        return self._on[device, width]

    def keys(self, slots: torch.Tensor, length: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions ``[b, n]`` in the cache, and which a token may see ``[b, s, n]``, for a tree in ``slots``
        ``[b, t]`` whose tokens from ``first`` on run."""
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
class StepTokens:
    """The tokens of one forward, of the rows that take part."""

    tokens: torch.Tensor  # [b, s] ids, or [b, s, d] embeddings
    starts: RowNumbers  # slot of each row's first token
    last: int  # the last position that one can have
    nodes: TreeLayout | None = None  # the draft tree, None for a line
    first_node: int = 0  # the first of its nodes that is among the tokens; earlier ones are in the cache
    counts: Sequence[int] | None = None  # for a prefill the number of real tokens in each row

    def positions(self) -> torch.Tensor:
        (b, s), device = self.tokens.shape[:2], self.tokens.device
        if self.nodes is None:
            return self.starts.onwards(s, device).expand(b, s)
        offsets = self.nodes.offsets(device)[:, self.first_node :] - self.first_node
        return (self.starts.on(device) + offsets).expand(b, s)
