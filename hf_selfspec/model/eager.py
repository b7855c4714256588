"""Forwards of a generation by the model's own code; those by compiled graphs are in ``fixed.py``."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from .autocast import within
from .kernels import turns
from .layout import TreeLayout
from .masks import Geometry, at_positions, padded_mask
from .partial import ForwardPass, obeying
from .states import Feed
from .transfer import RowNumbers

if TYPE_CHECKING:
    from .target import Target


@dataclass(frozen=True)
class Forward:
    """One forward of the rows that take part.

    Attributes:
        module: the model, or its decoder.
        tokens: ``[b, s]`` ids, or ``[b, s, d]`` embeddings.
        starts: slot of each row's first token.
        last: the last position of each row.
        run: what runs; the forward stores its states there.
        nodes: the draft tree, ``None`` for a line.
        first_node: the first of its nodes that ``tokens`` has.
        keep: how many of the last tokens need logits, 0 for all.
        simple: whether transformers builds the masks.
        counts: for a prefill the number of real tokens in each row, else ``None``.
    """

    module: nn.Module
    tokens: torch.Tensor
    starts: RowNumbers
    last: RowNumbers
    run: ForwardPass
    nodes: TreeLayout | None
    first_node: int
    keep: int
    simple: bool
    counts: list[int] | None


class EagerForwards:
    """Runs the forwards of one generation with the model's own code.

    Args:
        target: the model during the generation.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def call(self, forward: Forward) -> torch.Tensor | None:
        """Returns the logits ``[b, s, v]``, ``None`` if the module returns none."""
        target, tokens = self.target, forward.tokens
        s = tokens.shape[1]
        target.cache.seek(forward.starts, s, Feed.of(forward.starts, forward.counts, forward.nodes))
        kwargs: dict[str, Any] = {target.cache_name: target.cache, "use_cache": True, "return_dict": True}
        kwargs["input_ids" if tokens.dim() == 2 else "inputs_embeds"] = tokens
        geometry = None
        if target.padding is None:
            positions = self._positions(forward)
            if not forward.simple:
                geometry = Geometry.of(positions, forward.starts, forward.nodes, forward.first_node, target.holes)
        else:
            mask = padded_mask(target.padding, forward.starts[0] + s)
            kwargs["attention_mask"] = mask
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -s:]
        if target.anatomy.takes_positions:
            kept = None if target.active_rows is None else target.active_rows.kept
            if any(start + s - 1 > end for start, end in zip(forward.starts, forward.last, strict=True)):
                positions = positions.minimum(forward.last.on(tokens.device))
            kwargs["position_ids"] = target.following.positions(positions, kept)
        if target.takes_logits_to_keep and forward.module is target.model:
            kwargs["logits_to_keep"] = forward.keep
        kwargs.update(target.following.extra)
        kwargs.update(target.following.marks_of(s))
        begun = perf_counter()
        with within(target.autocast), obeying(forward.run), at_positions(geometry), turns():
            logits: torch.Tensor | None = getattr(forward.module(**kwargs), "logits", None)
        target.forward_seconds += perf_counter() - begun
        return logits

    def _positions(self, forward: Forward) -> torch.Tensor:
        """The position of each token, ``[b, s]``."""
        (b, s), device = forward.tokens.shape[:2], forward.tokens.device
        if forward.nodes is None:
            return forward.starts.onwards(s, device).expand(b, s)
        offsets = forward.nodes.offsets(device)[:, forward.first_node :] - forward.first_node
        return (forward.starts.on(device) + offsets).expand(b, s)
