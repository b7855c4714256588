"""Forwards over the rows of a batch that are still generating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from .forward_pass import ForwardPass
from .layout import TreeLayout
from .transfer import RowNumbers, upload

_T = TypeVar("_T")
# States are [b, s, d], with further dimensions in front in some models.
_ROW_DIM = -3


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
        changes: dict[str, Any] = {}
        if (stop_fn := run.stop_fn) is not None:
            changes["stop_fn"] = lambda layer, states: stop_fn(layer, self.spread(states))
        if (head_input_fn := run.head_input_fn) is not None:
            changes["head_input_fn"] = lambda states: self.pick(head_input_fn(self.spread(states)), _ROW_DIM)
        if run.state is not None:
            changes["state"] = self.pick(run.state, _ROW_DIM)
        if nodes is not None and len(nodes.parents) > 1:
            packed, nodes = nodes._on, TreeLayout(self.of_list(nodes.parents), self.of_list(nodes.depths), nodes.hidden)
            nodes._on.update({device: self.pick(values, 0) for device, values in packed.items()})
        numbers = RowNumbers.made(self.of_list(starts), lambda device: self.pick(starts.on(device), 0))
        return self.pick(tokens, 0), numbers, nodes, replace(run, **changes)

    def leave(self, run: ForwardPass) -> None:
        """Expands the results of the forward to the whole batch."""
        for name in ("captured", "exit_state", *(["logits"] if run.spreads else [])):
            if (states := getattr(run, name)) is not None:
                setattr(run, name, self.spread(states))
