"""A model during one generation, and its forwards by its own code; those by compiled graphs are in ``runner.py``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .attention import MaskSpec, at_positions, padded_mask
from .cache import SpeculativeCache
from .given_cache import cache_name
from .inputs import DecodeInputs
from .layout import TreeLayout
from .modules import forward_parameters
from .partial import ForwardPass, obeying
from .patching import Autocast, within
from .prompt import Holes
from .recurrences.kernels import turns
from .rows import ActiveRows
from .transfer import RowNumbers

_NO_END = 1 << 62


@dataclass(frozen=True)
class Feed:
    """The tokens of one forward, of the rows that take part."""

    tokens: torch.Tensor  # [b, s] ids, or [b, s, d] embeddings
    starts: RowNumbers  # slot of each row's first token
    last: RowNumbers  # the last position that each row can have
    nodes: TreeLayout | None = None  # the draft tree, None for a line
    first_node: int = 0  # the first of its nodes that is among the tokens; earlier ones are in the cache
    counts: Sequence[int] | None = None  # for a prefill the number of real tokens in each row


@dataclass(eq=False)
class Context:
    """A model during one generation: what its forwards need, by its own code or by graphs."""

    model: PreTrainedModel
    anatomy: Anatomy
    cache: SpeculativeCache
    padding: torch.Tensor | None = None  # [b, m] mask of prompts that stay left-padded (not `anatomy.ragged`)
    holes: Holes | None = None
    reachable: Sequence[int] | None = None  # for each row the last position that its text can reach
    following: DecodeInputs = field(default_factory=DecodeInputs)
    active_rows: ActiveRows | None = field(init=False, default=None)  # None for all
    autocast: Autocast | None = field(init=False, default=None)  # in which the layers ran in the last prefill
    forward_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.roots = RowNumbers([0] * len(self.cache.cursors))  # slot of each row's last token
        self.cache_name = cache_name(self.model)
        self.takes_logits_to_keep = "logits_to_keep" in forward_parameters(self.model)
        self._last = RowNumbers([_NO_END])

    @property
    def takes_any_rows(self) -> bool:
        """Whether a forward depends only on the tokens and their positions."""
        following = self.following
        return self.padding is None and self.holes is None and not following.extra and not following.marks

    def needs_no_mask(self, cursors: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether prompts from these slots on take the masks of ``generate`` without padding, often none at all.

        Rows start on the left, so that the causal rule alone hides what stands after them.
        """
        is_causal = self.anatomy.causal or min(lengths) == max(lengths)
        return max(cursors) == 0 and self.holes is None and is_causal

    def module_of(self, run: ForwardPass) -> nn.Module:
        """What runs; only the whole model gets the user's own arguments."""
        return self.model if run.stop is None or self.following.extra else self.anatomy.decoder

    def last_positions(self) -> RowNumbers:
        """The last position that each active row's tokens can have; rows that have ended may be past their text."""
        rows = range(len(self.roots)) if self.active_rows is None else self.active_rows.kept
        found = tuple(self._last_position(row) for row in rows)
        if self._last != found:  # else what is on the device already serves
            self._last = RowNumbers(found)
        return self._last

    def _last_position(self, row: int) -> int:
        reachable = _NO_END if self.reachable is None else self.reachable[row]
        limit = self.anatomy.position_limit
        # A row's root is a real token, wherever it is; drafted ones stay within the limit.
        return reachable if limit is None else max(min(reachable, limit - 1), self.roots[row])


def run_eagerly(context: Context, feed: Feed, run: ForwardPass) -> torch.Tensor | None:
    """Runs a forward by the model's own code, and returns its logits ``[b, s, v]``, ``None`` if there are none."""
    tokens, module = feed.tokens, context.module_of(run)
    s = tokens.shape[1]
    context.cache.seek(feed.starts, s, feed.counts, feed.nodes)
    kwargs: dict[str, Any] = {context.cache_name: context.cache, "use_cache": True, "return_dict": True}
    kwargs["input_ids" if tokens.dim() == 2 else "inputs_embeds"] = tokens
    spec = None
    if context.padding is None:
        positions = _positions(feed)
        if feed.counts is None or not context.needs_no_mask(feed.starts, feed.counts):
            spec = MaskSpec.of(positions, feed.starts, feed.nodes, feed.first_node, context.holes)
    else:
        mask = padded_mask(context.padding, feed.starts[0] + s)
        kwargs["attention_mask"] = mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -s:]
    if context.anatomy.takes_positions:
        if any(start + s - 1 > end for start, end in zip(feed.starts, feed.last, strict=True)):
            positions = positions.minimum(feed.last.on(tokens.device))
        rows = None if context.active_rows is None else context.active_rows.kept
        kwargs["position_ids"] = context.following.positions(positions, rows)
    if context.takes_logits_to_keep and module is context.model:
        kwargs["logits_to_keep"] = run.keep
    kwargs.update(context.following.extra)
    kwargs.update(context.following.marks_of(s))
    states = turns() if context.anatomy.is_recurrent else nullcontext()
    begun = perf_counter()
    with within(context.autocast), obeying(run), at_positions(spec), states:
        logits: torch.Tensor | None = getattr(module(**kwargs), "logits", None)
    context.forward_seconds += perf_counter() - begun
    return logits


def _positions(feed: Feed) -> torch.Tensor:
    """The position of each token, ``[b, s]``."""
    (b, s), device = feed.tokens.shape[:2], feed.tokens.device
    if feed.nodes is None:
        return feed.starts.onwards(s, device).expand(b, s)
    offsets = feed.nodes.offsets(device)[:, feed.first_node :] - feed.first_node
    return (feed.starts.on(device) + offsets).expand(b, s)
