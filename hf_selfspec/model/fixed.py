"""Forwards over a few tokens at fixed shapes, which nothing but tensors tells apart from round to round."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from ..transfer import RowNumbers
from .graphs import Graphs, size_for
from .layout import TreeLayout
from .masks import Geometry, at_positions
from .partial import ForwardPass, obeying

if TYPE_CHECKING:
    from .target import Target


class FixedShapes:
    """Serves the forwards of one generation with the graphs of its model.

    Args:
        target: the model during the generation.
        graphs: of the model.
    """

    def __init__(self, target: Target, graphs: Graphs) -> None:
        self.target = target
        self.graphs = graphs

    def serve(self, tokens: torch.Tensor, run: ForwardPass, nodes: TreeLayout | None, first_node: int) -> int | None:
        """The number of tokens of the graph that takes a forward, ``None`` where none does; see ``Target._call``."""
        has_hooks = run.stop_fn is not None or run.after_layer is not None or run.head_input_fn is not None
        is_tree = nodes is not None and (first_node or nodes.hidden or len(nodes.parents) != len(tokens))
        if tokens.dim() != 2 or has_hooks or is_tree or self.graphs.refused:
            return None
        return size_for(tokens.shape[1])

    def call(
        self,
        module: nn.Module,
        tokens: torch.Tensor,
        starts: RowNumbers,
        last: RowNumbers,
        run: ForwardPass,
        nodes: TreeLayout | None,
    ) -> torch.Tensor | None:
        """Logits ``[b, s, v]``, or ``None`` where the module gives none; leaves states behind as the model's own does.

        Args:
            module: the model, or its decoder.
            tokens: ``[b, s]``.
            starts: slot of each row's first token.
            last: the last position of each row.
            run: what runs.
            nodes: the draft tree, ``None`` for a line.
        """
        cache, device, (b, s) = self.target.cache, tokens.device, tokens.shape
        size = size_for(s)
        assert size is not None
        buffers = cache.buffers()
        inputs = [
            _filled(tokens, size),
            starts.on(device).expand(b, 1).contiguous(),
            last.on(device).expand(b, 1).contiguous(),
            *([] if nodes is None else [_filled_layout(nodes.packed(device), size)]),
            *([] if run.state is None else [_filled(run.state, size)]),
            *buffers,
        ]
        parts = [module is self.target.model, nodes is not None, run.state is not None]
        key: Hashable = (*parts, run.plan, run.start, run.stop, run.capture, _shapes(inputs))

        def forward(*given: torch.Tensor) -> list[torch.Tensor]:
            return self._forward(module, run, nodes is not None, given)

        found = list(self.graphs.find(key, forward, inputs, self.target.anatomy.model_name)(*inputs))
        logits = found.pop(0)[:, :s] if module is self.target.model else None
        run.captured = found.pop(0)[..., :s, :] if run.capture >= 0 else None
        run.exit_state = found.pop(0)[..., :s, :]
        return logits

    def _forward(
        self, module: nn.Module, run: ForwardPass, is_tree: bool, given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Logits, captured and exit state, as far as there are any, by tensors alone."""
        target, rest = self.target, list(given)
        tokens, cursor, last = rest.pop(0), rest.pop(0), rest.pop(0)
        layout = rest.pop(0) if is_tree else None
        state = rest.pop(0) if run.state is not None else None
        b, size = tokens.shape
        slots = cursor + torch.arange(size, device=tokens.device)
        length, keys, visible, positions = rest[0].shape[2], None, None, slots
        if layout is not None:
            tree = TreeLayout.of_packed(layout)
            positions = cursor + tree.offsets(tokens.device)
            keys, visible = tree.keys(slots, length, 0)
        fresh = replace(run, state=state, captured=None, exit_state=None)
        kwargs: dict[str, Any] = {target.cache_name: target.cache, "use_cache": True, "return_dict": True}
        if target.anatomy.takes_positions:
            kwargs["position_ids"] = positions.minimum(last)
        geometry = Geometry(positions, length, keys, visible, is_fixed=True)
        with target.cache.written_at(slots, rest), obeying(fresh), at_positions(geometry):
            logits = getattr(module(input_ids=tokens, **kwargs), "logits", None)
        found = [logits if module is target.model else None, fresh.captured, fresh.exit_state]
        return [value for value in found if value is not None]


def _shapes(tensors: Sequence[torch.Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)


def _filled(values: torch.Tensor, size: int) -> torch.Tensor:
    """``[b, s, ...]`` as ``[b, size, ...]`` with zeros behind."""
    missing = size - values.shape[1]
    if not missing:
        return values.contiguous()
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)


def _filled_layout(packed: torch.Tensor, size: int) -> torch.Tensor:
    """``[b, t, t + 2]`` a packed layout as one of ``size`` tokens; those behind see themselves alone."""
    b, t = packed.shape[:2]
    filled = torch.eye(size, size + 2, dtype=packed.dtype, device=packed.device).repeat(b, 1, 1)
    filled[:, :t, :t] = packed[:, :, :t]
    filled[:, :t, size:] = packed[:, :, t:]
    return filled
