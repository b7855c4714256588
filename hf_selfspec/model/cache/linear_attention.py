"""Linear attention with decay over a few tokens at once, with and without the delta rule.

A state ``S`` ``[b, k, n, h]`` maps keys to values. Each token decays it by ``exp(g)`` and adds ``key ⊗ u``. With the
delta rule ``u = beta (value - key S)``, without it ``u = value``; the output is ``query S``. The ``u`` of a block of
tokens follow from one triangular system (Yang et al., arXiv 2412.06464), and the state after any number of these tokens
follows from their ``u``: no token has to be run again.
"""

from typing import Any

import torch

from ..layout import TreeLayout
from .recurrence import Arguments, Entries, Recurrence

_EPSILON = 1e-6  # for the norm of queries and keys, as in transformers' and FLA's functions


class LinearAttention(Recurrence):
    """What they have in common. Entries are keys ``[b, k, t, n]``, ``u`` and decays ``[b, k, t, 1 or n]``."""

    def advance(self, state: torch.Tensor, entries: Entries, kept: torch.Tensor | None) -> torch.Tensor:
        key, added, decay = entries
        if kept is not None:
            here = kept[:, None, :, None]
            key, decay = key * here, decay * here
        if key.shape[2] > 1:
            total = decay.cumsum(2)
            decay = total[:, :, -1:]
            key = key * (decay - total).exp()
        left = (state * decay.exp().transpose(2, 3)).flatten(0, 1)
        return left.baddbmm_(key.transpose(2, 3).flatten(0, 1), added.flatten(0, 1)).view_as(state)

    def outputs(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        # Queries and keys [b, k, t, n], values [b, k, t, h], decays (logarithms, at most 0) [b, k, t, n], or
        # [b, k, t, 1] if there is one for the whole head, `beta` [b, k, t] for the delta rule alone.
        query, key, value, decay, *betas = inputs
        beta, t = betas[0][..., None] if betas else None, key.shape[2]
        # The ancestors of each token, itself included: [1, 1, t, t], or [b, 1, t, t].
        before = None if nodes is None else nodes.ancestry(key.device)[:, None]
        total = decay.cumsum(2) if before is None else before.to(decay.dtype) @ decay
        left = total.exp()
        if beta is None:
            read, added = (query * left) @ state, value
        else:
            read, expected = (torch.cat([query, key], 2) * torch.cat([left, left], 2) @ state).split(t, 2)
            added = (value - expected) * beta
        if t == 1:
            return read + (query * key).sum(-1, keepdim=True) * added, (key, added, decay)
        if before is None:
            before = torch.ones(t, t, dtype=torch.bool, device=total.device).tril()
        # How much of the column's token is left at the row's [b, k, t, t, 1 or n]; 0 unless it comes before that.
        weights = (total[:, :, :, None] - total[:, :, None]).masked_fill_(~before[..., None], -torch.inf).exp_()
        if beta is not None:
            system = _pairs(key, key, weights).tril(-1) * beta
            added = torch.linalg.solve_triangular(system, added, upper=False, unitriangular=True)
        return read + _pairs(query, key, weights) @ added, (key, added, decay)


class GatedDelta(LinearAttention):
    """The gated delta rule with one decay per head; state ``[b, k, n, h]``. See :class:`Recurrence`."""

    kernel = "torch_chunk_gated_delta_rule"
    parameters: tuple[str, ...] = (
        "query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "kwargs",
    )  # fmt: skip

    def prefill(
        self, kernel: Any, state: torch.Tensor | None, kept: torch.Tensor | None, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if kept is not None:  # g = beta = 0 leaves the state as it is
            g, beta = arguments["g"], arguments["beta"]
            arguments |= {"g": g * kept.view(*kept.shape, *[1] * (g.dim() - 2)), "beta": beta * kept[..., None]}
        output, state = kernel(**arguments | {"initial_state": state, "output_final_state": True})
        assert state is not None
        return output, state

    def step(self, state: torch.Tensor, nodes: TreeLayout | None, arguments: Arguments) -> tuple[torch.Tensor, Entries]:
        # Queries and keys [b, t, k, n], values [b, t, k, h].
        query, key, value, g, beta = (arguments[name] for name in ("query", "key", "value", "g", "beta"))
        dtype = query.dtype
        query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
        if arguments.get("use_qk_l2norm_in_kernel", False):
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        if (group := value.shape[1] // key.shape[1]) > 1:
            query, key = (x.repeat_interleave(group, dim=1) for x in (query, key))
        decay = g if g.dim() == 4 else g[..., None]
        inputs = (query, key, value, decay, beta)
        output, entries = self.in_blocks(state, inputs, nodes)
        return output.transpose(1, 2).contiguous().to(dtype), entries


class KimiDelta(GatedDelta):
    """The gated delta rule with a decay for each channel of the keys."""

    kernel = "chunk_kimi_delta_attention"


class StateSpace(LinearAttention):
    """Mamba-2's recurrence, state ``[b, k, n, h]``: linear attention without the delta rule, where ``B`` are keys,
    ``C`` queries, ``Δ x`` values, ``Δ A`` the decay."""

    kernel, prefix = "mamba2_chunk_scan", "dt"
    parameters: tuple[str, ...] = (
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus",
        "dt_limit", "return_final_states", "kwargs",
    )  # fmt: skip

    def prefill(
        self, kernel: Any, state: torch.Tensor | None, kept: torch.Tensor | None, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if kept is not None:  # Δ = 0 leaves the state as it is
            least, most = arguments.get("dt_limit", (0.0, torch.inf))
            arguments |= {"dt": self.time_steps(arguments).clamp(least, most) * kept[..., None]}
            arguments |= {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, torch.inf)}
        before = None if state is None else self.store(state)
        output, state = kernel(**arguments | {"initial_states": before, "return_final_states": True})
        return output, self.load(state, 0)

    def step(self, state: torch.Tensor, nodes: TreeLayout | None, arguments: Arguments) -> tuple[torch.Tensor, Entries]:
        # x [b, t, k, h], B and C [b, t, groups, n]; as in transformers' one-token steps, `dt_limit` has no effect.
        hidden_states, a, b, c = (arguments[name] for name in ("hidden_states", "A", "B", "C"))
        group = hidden_states.shape[2] // b.shape[2]
        x = hidden_states.transpose(1, 2).float()
        dt = self.time_steps(arguments).float().transpose(1, 2)[..., None]
        query, key = (y.transpose(1, 2).float().repeat_interleave(group, dim=1) for y in (c, b))
        inputs = (query, key, dt * x, dt * a.float()[:, None, None])
        output, entries = self.in_blocks(state, inputs, nodes)
        if (direct := arguments.get("D")) is not None:
            output = output + x * direct[:, None, None]
        return output.transpose(1, 2).contiguous().to(hidden_states.dtype), entries

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        # Transformers has the dimensions of keys and values in the other order.
        return state.float().transpose(2, 3).contiguous()

    def store(self, state: torch.Tensor) -> torch.Tensor:
        return state.transpose(2, 3).contiguous()


def _pairs(rows: torch.Tensor, columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted products ``[b, k, t, t]`` of vectors ``[b, k, t, n]``."""
    if weights.shape[-1] == 1:
        return (rows @ columns.transpose(2, 3)) * weights[..., 0]
    return ((rows[:, :, :, None] * columns[:, :, None]) * weights).sum(-1)
