"""Gated delta net (Qwen3-Next, OLMo hybrid) and Kimi delta attention."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import TreeLayout
from .linear_attention import advance, attend
from .recurrence import Entries, in_blocks

_EPSILON = 1e-6  # for the norm of queries and keys, as in transformers' and FLA's functions


class GatedDelta:
    """The gated delta rule with one decay per head; state ``[b, k, n, h]``. See :class:`Recurrence`."""

    kernel = "torch_chunk_gated_delta_rule"
    parameters: tuple[str, ...] = (
        "query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "kwargs",
    )  # fmt: skip
    continues = True
    token_dim = 1

    def prefill(
        self,
        kernel: Any,
        state: torch.Tensor | None,
        kept: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Recurrence.prefill`; ``g = beta = 0`` leaves the state as it is."""
        if kept is not None:
            g = g * kept.view(*kept.shape, *[1] * (g.dim() - 2))
            beta = beta * kept[..., None]
        options |= {"initial_state": state, "output_final_state": True}
        output, state = kernel(query, key, value, g=g, beta=beta, **options)
        assert state is not None
        return output, state

    def step(
        self,
        state: torch.Tensor,
        nodes: TreeLayout | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, Entries]:
        """See :meth:`Recurrence.step`; queries and keys ``[b, t, k, n]``, values ``[b, t, k, h]``."""
        dtype = query.dtype
        query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        if (group := value.shape[1] // key.shape[1]) > 1:
            query, key = (x.repeat_interleave(group, dim=1) for x in (query, key))
        decay = g if g.dim() == 4 else g[..., None]
        inputs = (query, key, value, decay, beta)
        output, entries = in_blocks(self._outputs, advance, state, inputs, nodes)
        return output.transpose(1, 2).contiguous().to(dtype), entries

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Recurrence.advance`."""
        return advance(state, entries, kept)

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """See :meth:`Recurrence.load`."""
        return state

    def store(self, state: torch.Tensor) -> torch.Tensor:
        """See :meth:`Recurrence.store`."""
        return state

    @staticmethod
    def _outputs(state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        query, key, value, decay, beta = inputs
        output, known = attend(state, query, key, value, decay, beta, nodes)
        return output, (key, known, decay)


class KimiDelta(GatedDelta):
    """The gated delta rule with a decay for each channel of the keys."""

    kernel = "chunk_kimi_delta_attention"
