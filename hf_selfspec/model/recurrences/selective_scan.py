"""State-space models with a decay for each channel and state (Mamba-1)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..layout import TreeLayout
from .recurrence import Entries, Recurrence, time_steps


class SelectiveScan(Recurrence):
    """Mamba-1's recurrence; state ``[b, d, n]``. See :class:`Recurrence`.

    Transformers' function starts from zero whatever the cache holds, so text that continues from a state takes steps.
    """

    kernel = "mamba_selective_scan"
    parameters: tuple[str, ...] = (
        "hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state",
        "use_mambapy", "use_associative_scan", "kwargs",
    )  # fmt: skip
    continues = False
    token_dim = 2

    def __init__(self) -> None:
        self._a = torch.empty(0, dtype=torch.float32, device="cpu")

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
        options |= {"return_last_state": True}
        if kept is not None:
            dt = _steps(dt, options.get("delta_bias"), options.get("delta_softplus", False)) * kept[:, None]
            options |= {"delta_bias": None, "delta_softplus": False}
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
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, Entries]:
        """See :meth:`Recurrence.step`; ``x``, ``Δ`` ``[b, d, t]``, ``A`` ``[d, n]``, ``B``, ``C`` ``[b, n, t]``."""
        self._a = a.float()
        dt = _steps(dt, delta_bias, delta_softplus).float()
        inputs = (dt, dt * hidden_states.float(), b.float(), c.float())
        output, entries = self.in_blocks(state, inputs, nodes)
        if (direct := options.get("D")) is not None:
            output = output + hidden_states * direct[:, None]
        if z is not None:
            output = output * F.silu(z)
        return output.to(hidden_states.dtype), entries

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Recurrence.advance`."""
        dt, x, b = entries
        if kept is not None:
            dt, x = dt * kept[:, None], x * kept[:, None]
        left, added = self._terms(dt, x, b)
        for token in range(dt.shape[2]):
            state = torch.addcmul(added[:, :, token], left[:, :, token], state)
        return state

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """See :meth:`Recurrence.load`; Zamba calls the function for each head and concatenates the states."""
        return (state if state.dim() == 3 else state[:, part]).float()

    def outputs(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        """See :meth:`Recurrence.outputs`."""
        # One token after another, since a state is small.
        dt, x, b, c = inputs
        left, added = self._terms(dt, x, b)
        states: list[torch.Tensor] = []
        for token in range(dt.shape[2]):
            before = _parent(states, state, token, nodes)
            states.append(torch.addcmul(added[:, :, token], left[:, :, token], before))
        return (torch.stack(states, 2) * c.transpose(1, 2)[:, None]).sum(-1), (dt, x, b)

    def _terms(self, dt: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor by which each token scales a state, and what it adds, ``[b, d, t, n]``."""
        left = (dt[..., None] * self._a[:, None]).exp()
        return left, x[..., None] * b.transpose(1, 2)[:, None]


def _parent(states: list[torch.Tensor], first: torch.Tensor, token: int, nodes: TreeLayout | None) -> torch.Tensor:
    """The state ``[b, d, n]`` before a token."""
    known = [first, *states]
    if nodes is None:
        return known[-1]
    parents = [row[token] + 1 for row in nodes.parents]
    if min(parents) == max(parents):
        return known[parents[0]]
    return torch.stack([known[parent][row] for row, parent in enumerate(parents)])


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The ``Δ`` ``[b, d, t]`` of each token."""
    return time_steps(dt, None if bias is None else bias[:, None], softplus)
