"""State-space models with one decay per head (Mamba-2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..layout import TreeLayout
from .linear_attention import advance, attend
from .recurrence import Entries, in_blocks


class StateSpace:
    """Mamba-2's recurrence; state ``[b, k, n, h]``. See :class:`Recurrence`.

    It is linear attention without the delta rule: ``B`` are keys, ``C`` queries, ``Δ x`` values, ``Δ A`` the decay.
    """

    kernel = "mamba2_chunk_scan"
    parameters: tuple[str, ...] = (
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus",
        "dt_limit", "return_final_states", "kwargs",
    )  # fmt: skip
    continues = True
    token_dim = 1

    def prefill(
        self,
        kernel: Any,
        state: torch.Tensor | None,
        kept: torch.Tensor | None,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Recurrence.prefill`; ``Δ = 0`` leaves the state as it is."""
        options |= {"initial_states": None if state is None else self.store(state), "return_final_states": True}
        if kept is not None:
            dt = _steps(dt, options.get("dt_bias"), options.get("dt_softplus", False))
            least, most = options.get("dt_limit", (0.0, torch.inf))
            dt = dt.clamp(least, most) * kept[..., None]
            options |= {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, torch.inf)}
        output, state = kernel(hidden_states, dt, *args, **options)
        return output, self.load(state, 0)

    def step(
        self,
        state: torch.Tensor,
        nodes: TreeLayout | None,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, Entries]:
        """See :meth:`Recurrence.step`; ``x`` ``[b, t, k, h]``, ``B`` and ``C`` ``[b, t, groups, n]``.

        As in transformers' one-token steps, ``dt_limit`` has no effect.
        """
        group = hidden_states.shape[2] // b.shape[2]
        x = hidden_states.transpose(1, 2).float()
        dt = _steps(dt, dt_bias, dt_softplus).float().transpose(1, 2)[..., None]
        query, key = (y.transpose(1, 2).float().repeat_interleave(group, dim=1) for y in (c, b))
        inputs = (query, key, dt * x, dt * a.float()[:, None, None])
        output, entries = in_blocks(self._outputs, advance, state, inputs, nodes)
        if (direct := options.get("D")) is not None:
            output = output + x * direct[:, None, None]
        return output.transpose(1, 2).contiguous().to(hidden_states.dtype), entries

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Recurrence.advance`."""
        return advance(state, entries, kept)

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """See :meth:`Recurrence.load`; transformers has the dimensions of keys and values in the other order."""
        return state.float().transpose(2, 3).contiguous()

    def store(self, state: torch.Tensor) -> torch.Tensor:
        """See :meth:`Recurrence.store`."""
        return state.transpose(2, 3).contiguous()

    @staticmethod
    def _outputs(state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        query, key, value, decay = inputs
        output, _ = attend(state, query, key, value, decay, None, nodes)
        return output, (key, value, decay)


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The ``Δ`` of each token."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt
