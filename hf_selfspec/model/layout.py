"""The tokens of one forward: the tree that they form, and what each may attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .forks import cached_property
from .transfer import RowNumbers, upload

# Ids [b, s], those that the host knows as lists, or embeddings [b, s, d].
Tokens = torch.Tensor | list[list[int]]


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depths of node 0 and of those whose parents these are, 0 for one that does not count (-1)."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(frozen=True)
class TreeLayout:
    """Tokens that are no plain line: for each row, or all, ``parents`` (earlier indices, -1: the text), ``depths``
    (negative: text that runs again), ``hidden`` slots before them, and ``ids`` where the host knows them."""

    parents: Sequence[Sequence[int]]
    depths: Sequence[Sequence[int]]
    hidden: int = 0
    ids: Sequence[Sequence[int]] | None = None
    _on: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False, repr=False, init=False)

    @classmethod
    def of_tree(cls, parents: Sequence[Sequence[int]], ids: Sequence[Sequence[int]] | None = None) -> TreeLayout:
        """The layout of each row's last token, node 0, and its draft: ``parents`` of nodes 1 and up, -1 for one that
        does not count and sees only itself and the text, and the ``ids`` of all, if the host knows them."""
        return cls([[-1, *row] for row in parents], [depths_of(row) for row in parents], ids=ids)

    @classmethod
    def of_packed(cls, packed: torch.Tensor) -> TreeLayout:
        """A layout that is on a device alone, see :meth:`packed`."""
        layout = cls([], [[0] * packed.shape[1]])
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
        """The ids ``[b, t]``."""
        return self.packed(device)[:, :, -1]

    def ancestry(self, device: torch.device) -> torch.Tensor:
        """Whether the column's token is the row's token or one of its ancestors, ``[1 or b, t, t]``."""
        return self.packed(device)[:, :, : self.size].bool()

    def packed(self, device: torch.device) -> torch.Tensor:
        """The :meth:`numbers`, uploaded once."""
        if device not in self._on:
            self._on[device] = upload(self.numbers(self.size), device)
        return self._on[device]

    def numbers(self, size: int) -> np.ndarray:
        """The ancestry, followed by depths and ids, ``[1 or b, size, size + 2]``; tokens that are missing see only
        themselves, at the position of the first one."""
        b, t = len(self.parents), self.size
        numbers = np.zeros((b, size, size + 2), dtype=np.int64)
        numbers[:, :t, size] = self.depths
        if self.ids is not None:
            numbers[:, :t, -1] = self.ids
        ancestry = list[int]()  # of each token, a bit for each of the row
        for row, parents in enumerate(self.parents):
            for index, parent in enumerate(parents):
                ancestry.append(1 << index | (ancestry[row * size + parent] if parent >= 0 else 0))
            ancestry += [1 << index for index in range(t, size)]
        in_bytes = b"".join(bits.to_bytes(-(-size // 8), "little") for bits in ancestry)
        bits = np.unpackbits(np.frombuffer(in_bytes, np.uint8).reshape(b, size, -1), axis=-1, bitorder="little")
        numbers[:, :, :size] = bits[:, :, :size]
        return numbers

    def parents_on(self, device: torch.device) -> torch.Tensor:
        """The parents of one row's tokens ``[t]``, counted from 1 on, 0 for the text."""
        numbers = torch.arange(1, self.size + 1, device=device)
        return (self.ancestry(device)[0].tril(-1) * numbers).amax(-1)

    def windows(self, width: int, device: torch.device) -> torch.Tensor:
        """For each token of one row the last ``width`` columns on its path, of the text's last ``width`` and the
        tokens, side by side ``[t * width]``."""
        if (device, width) not in self._on:
            # The column before each one, and the paths from their ends on.
            before = torch.cat([torch.arange(-1, width - 1, device=device), self.parents_on(device) + (width - 1)])
            columns = [torch.arange(width, width + self.size, device=device)]
            for _ in range(width - 1):
                columns.append(before[columns[-1]])
            self._on[device, width] = torch.stack(columns[::-1], 1).flatten()
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

    given: Tokens
    device: torch.device  # where they are to be
    starts: RowNumbers  # slot of each row's first token
    last: int  # the last position that one can have
    nodes: TreeLayout | None = None  # the draft tree, None for a line
    first_node: int = 0  # the first of its nodes that is among the tokens; earlier ones are in the cache
    counts: Sequence[int] | None = None  # for a prefill the number of real tokens in each row

    @cached_property
    def tokens(self) -> torch.Tensor:
        """``[b, s]`` or ``[b, s, d]``; those that the host knows are uploaded together with their layout."""
        if isinstance(self.given, torch.Tensor):
            return self.given
        return upload(self.given, self.device) if self.nodes is None else self.nodes.tokens(self.device)

    @property
    def shape(self) -> tuple[int, int]:
        """``(b, s)``."""
        return len(self.given), len(self.given[0])

    def positions(self) -> torch.Tensor:
        (b, s), device = self.shape, self.device
        if self.nodes is None:
            return self.starts.onwards(s, device).expand(b, s)
        offsets = self.nodes.offsets(device)[:, self.first_node :] - self.first_node
        return (self.starts.on(device) + offsets).expand(b, s)
