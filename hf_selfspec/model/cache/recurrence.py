"""Recurrences, those of linear attention and of Mamba, and convolutions."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..graphs.captures import capturing
from ..layout import TreeLayout

# What tokens feed into a state, [b, c, t, ...]: tokens are the third dimension of each tensor.
Entries = tuple[torch.Tensor, ...]
# Those of a call of the model's function, by the names of its parameters.
Arguments = dict[str, Any]
# Tokens that a step processes at a time, so that what it computes for pairs of tokens stays small.
BLOCK = 32
_EPSILON = 1e-6  # for the norm of queries and keys, as in transformers' and FLA's functions


class Recurrence:
    """A recurrence, with the function of transformers that computes it."""

    kernel: str  # name of the function in the model's own file, for text of any length
    parameters: tuple[str, ...]  # its parameters; functions of other versions with other ones are not supported
    continues = True  # whether it can start from a state
    token_dim = 1  # dimension of the tokens in its first argument
    prefix: str  # of the names of the arguments that its time steps have beside `dt`, where it has any

    @abstractmethod
    def prefill(
        self, kernel: Any, state: torch.Tensor | None, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model's own function from a state ``[b, ...]``, ``None`` at the beginning; returns its output, and
        the state after the tokens."""

    @abstractmethod
    def step(self, state: torch.Tensor, nodes: TreeLayout | None, arguments: Arguments) -> tuple[torch.Tensor, Entries]:
        """Returns the same output for a few tokens, and what they feed into the state, which is not changed."""

    @abstractmethod
    def advance(self, state: torch.Tensor, entries: Entries) -> torch.Tensor:
        """Returns the state after these tokens."""

    @abstractmethod
    def shapes(self, state: torch.Tensor, count: int) -> list[tuple[int, ...]]:
        """Returns the shapes of the entries of so many tokens."""

    def prepare(self, arguments: Arguments) -> None:
        """Takes what entries do not tell of how states advance from the arguments of the running call."""

    def after(
        self, state: torch.Tensor, entries: Sequence[torch.Tensor], count: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        """Returns the state after the entries that are ``there`` ``[n]``, the first ``count`` ``[1]``: as if others had
        fed nothing into it."""
        return self.advance(state, _masked(entries, there))

    @abstractmethod
    def outputs(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        """Returns output and entries of a block of tokens, of whose inputs tokens are the third dimension."""

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        """Returns the state of one call of the function, from the states of all calls in transformers' cache."""
        return state

    def store(self, state: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`load`; the states of several calls are concatenated in the second dimension."""
        return state

    def in_blocks(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        """Returns :meth:`outputs` of a tree, or of a line of any length, a block at a time."""
        if nodes is not None:
            return self.outputs(state, inputs, nodes)
        count = inputs[0].shape[2]
        outputs, of_blocks = [], []
        for start in range(0, count, BLOCK):
            output, entries = self.outputs(state, tuple(x[:, :, start : start + BLOCK] for x in inputs), None)
            outputs.append(output)
            of_blocks.append(entries)
            if start + BLOCK < count:
                state = self.advance(state, entries)
        if len(outputs) == 1:
            return outputs[0], entries
        return torch.cat(outputs, 2), tuple(torch.cat(parts, 2) for parts in zip(*of_blocks, strict=True))

    def time_steps(self, arguments: Arguments) -> torch.Tensor:
        """The ``Δ`` of each token."""
        dt, bias = arguments["dt"], arguments.get(f"{self.prefix}_bias")
        if bias is not None:
            dt = dt + (bias if self.token_dim == 1 else bias[:, None]).to(dt.dtype)
        return F.softplus(dt) if arguments.get(f"{self.prefix}_softplus", False) else dt


class Convolution:
    """The inputs of a causal convolution that the next tokens may need; state ``[b, c, width]``."""

    def __init__(self, width: int) -> None:
        self.width = width

    def windows(self, state: torch.Tensor, inputs: torch.Tensor, nodes: TreeLayout) -> torch.Tensor:
        """For each token of a tree the last inputs on its path, ``[t, c, width]``, from inputs ``[1, c, t]``."""
        whole = torch.cat([state, inputs], 2)
        places = nodes.windows(self.width, whole.device)
        return whole.index_select(2, places).unflatten(2, (-1, self.width)).transpose(1, 2).flatten(0, 1)

    def advance(self, state: torch.Tensor, entries: Entries) -> torch.Tensor:
        """The state after more inputs; see :meth:`Recurrence.advance`."""
        return torch.cat([state, *entries], 2)[:, :, -self.width :].clone()

    def shapes(self, state: torch.Tensor, count: int) -> list[tuple[int, ...]]:
        return [(*state.shape[:2], count)]

    def after(
        self, state: torch.Tensor, entries: Sequence[torch.Tensor], count: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        """See :meth:`Recurrence.after`."""
        columns = count + torch.arange(self.width, device=count.device)
        return torch.cat([state, *entries], 2).index_select(2, columns)


class SelectiveScan(Recurrence):
    """Mamba-1's recurrence, state ``[b, d, n]``; text that continues takes steps, since transformers' function starts
    from zero whatever the cache holds."""

    kernel = "mamba_selective_scan"
    parameters: tuple[str, ...] = (
        "hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state",
        "use_mambapy", "use_associative_scan", "kwargs",
    )  # fmt: skip
    continues = False
    token_dim, prefix = 2, "delta"

    def __init__(self) -> None:
        # [d, n] that of the last forward, and that of one which is captured, in memory of the graph's.
        self._rates: dict[bool, torch.Tensor] = {}

    @property
    def _a(self) -> torch.Tensor:
        return self._rates[capturing.now is not None]

    def prepare(self, arguments: Arguments) -> None:
        self._rates[capturing.now is not None] = arguments["A"].float()

    def shapes(self, state: torch.Tensor, count: int) -> list[tuple[int, ...]]:
        b, d, n = state.shape
        return [(b, d, count), (b, d, count), (b, n, count)]

    def after(
        self, state: torch.Tensor, entries: Sequence[torch.Tensor], count: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        dt, x, b = _masked(entries, there)
        total = dt.cumsum(2)
        left = ((total[:, :, -1:] - total)[..., None] * self._a[:, None]).exp()
        added = (left * x[..., None] * b.transpose(1, 2)[:, None]).sum(2)
        return torch.addcmul(added, (total[:, :, -1:] * self._a).exp(), state)

    def prefill(
        self, kernel: Any, state: torch.Tensor | None, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = kernel(**arguments | {"return_last_state": True})
        return output, self.load(state, 0)

    def step(self, state: torch.Tensor, nodes: TreeLayout | None, arguments: Arguments) -> tuple[torch.Tensor, Entries]:
        # x and Δ [b, d, t], B and C [b, n, t].
        hidden_states, b, c = (arguments[name] for name in ("hidden_states", "B", "C"))
        dt = self.time_steps(arguments).float()
        inputs = (dt, dt * hidden_states.float(), b.float(), c.float())
        output, entries = self.in_blocks(state, inputs, nodes)
        if (direct := arguments.get("D")) is not None:
            output = output + hidden_states * direct[:, None]
        if (z := arguments.get("z")) is not None:
            output = output * F.silu(z)
        return output.to(hidden_states.dtype), entries

    def advance(self, state: torch.Tensor, entries: Entries) -> torch.Tensor:
        dt, x, b = entries
        return self._states(state, dt, x, b)[-1]

    def load(self, state: torch.Tensor, part: int) -> torch.Tensor:
        # Zamba calls the function for each head and concatenates the states.
        return (state if state.dim() == 3 else state[:, part]).float()

    def outputs(self, state: torch.Tensor, inputs: Entries, nodes: TreeLayout | None) -> tuple[torch.Tensor, Entries]:
        dt, x, b, c = inputs
        states = torch.stack(self._states(state, dt, x, b, nodes)[1:], 2)
        return (states * c.transpose(1, 2)[:, None]).sum(-1), (dt, x, b)

    def _states(
        self, state: torch.Tensor, dt: torch.Tensor, x: torch.Tensor, b: torch.Tensor, nodes: TreeLayout | None = None
    ) -> list[torch.Tensor]:
        """The state ``[b, d, n]`` and those after each token, one after another, since a state is small."""
        # [b, d, t, n]: the factor by which each token scales a state, and what it adds.
        left, added = (dt[..., None] * self._a[:, None]).exp(), x[..., None] * b.transpose(1, 2)[:, None]
        if nodes is not None and not nodes.parents:  # which a device alone knows
            whole, parents = state.new_empty(dt.shape[2] + 1, *state.shape), nodes.parents_on(dt.device)
            whole[0] = state
            for token in range(dt.shape[2]):
                before = whole.index_select(0, parents[token : token + 1])[0]
                whole[token + 1] = torch.addcmul(added[:, :, token], left[:, :, token], before)
            return list(whole.unbind(0))
        states = [state]
        for token in range(dt.shape[2]):
            before = states[token if nodes is None else nodes.parents[0][token] + 1]
            states.append(torch.addcmul(added[:, :, token], left[:, :, token], before))
        return states


class LinearAttention(Recurrence):
    """Linear attention with decay over a few tokens at once, with and without the delta rule.

    A state ``S`` ``[b, k, n, h]`` maps keys to values. Each token decays it by ``exp(g)`` and adds ``key ⊗ u``. With
    the delta rule ``u = beta (value - key S)``, without it ``u = value``; the output is ``query S``. The ``u`` of a
    block of tokens follow from one triangular system (Yang et al., arXiv 2412.06464), and the state after any number of
    these tokens follows from their ``u``: no token has to be run again. Entries are keys ``[b, k, t, n]``, ``u`` and
    decays ``[b, k, t, 1 or n]``.
    """

    by_channel = False  # whether each channel of the keys has a decay

    def shapes(self, state: torch.Tensor, count: int) -> list[tuple[int, ...]]:
        b, k, n, h = state.shape
        return [(b, k, count, n), (b, k, count, h), (b, k, count, n if self.by_channel else 1)]

    def advance(self, state: torch.Tensor, entries: Entries) -> torch.Tensor:
        key, added, decay = entries
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
        # The ancestors of each token, itself included: [1, 1, t, t].
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
            # Seen in captures of the pretended device alone; where CUDA refuses it, such forwards have no graphs.
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
        self, kernel: Any, state: torch.Tensor | None, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
    by_channel = True


class StateSpace(LinearAttention):
    """Mamba-2's recurrence, state ``[b, k, n, h]``: linear attention without the delta rule, where ``B`` are keys,
    ``C`` queries, ``Δ x`` values, ``Δ A`` the decay."""

    kernel, prefix = "mamba2_chunk_scan", "dt"
    parameters: tuple[str, ...] = (
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus",
        "dt_limit", "return_final_states", "kwargs",
    )  # fmt: skip

    def prefill(
        self, kernel: Any, state: torch.Tensor | None, arguments: Arguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
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


def _masked(entries: Sequence[torch.Tensor], there: torch.Tensor) -> Entries:
    """The entries, with zeros in the place of those that are not ``there`` ``[n]``."""
    return tuple(values.masked_fill(~there.view(-1, *[1] * (values.dim() - 3)), 0) for values in entries)


def _pairs(rows: torch.Tensor, columns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted products ``[b, k, t, t]`` of vectors ``[b, k, t, n]``."""
    if weights.shape[-1] == 1:
        return (rows @ columns.transpose(2, 3)) * weights[..., 0]
    return ((rows[:, :, :, None] * columns[:, :, None]) * weights).sum(-1)
