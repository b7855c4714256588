"""The full model's logits of one round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from .forks import cached_property
from .forward_pass import ActiveRows
from .graphs.captures import drawing
from .transfer import Pending, read

# Tokens in a piece of the vocabulary, whose maximum is looked for at once.
PIECE = 64
# How many of the likeliest tokens are looked for.
WIDTH = 8
# Of how many pieces all probabilities are summed, to estimate the sum of what pieces hold beside their maxima.
_SAMPLED = 16


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The index ``[...]`` of the highest of ``[..., v]``; on a CPU by NumPy, in a tenth of torch's time."""
    return torch.from_numpy(np.asarray(scores.numpy().argmax(-1))) if scores.device.type == "cpu" else scores.argmax(-1)


def draw_without_replacement(q: torch.Tensor, count: int) -> torch.Tensor:
    """Tokens ``[b, count]`` drawn one after another from ``q`` ``[b, v]`` without replacement, in that order.

    Dividing by exponential noise and taking the largest is the same as drawing in turn (Efraimidis and Spirakis 2006,
    algorithm A; the Gumbel-top-k trick of Kool et al. 2019, arXiv:1903.06059, in logarithms). Where fewer than
    ``count`` tokens have a probability, the rest are tokens of probability 0.
    """
    with drawing:
        noise = torch.empty_like(q).exponential_()
    return (q / noise).topk(count, dim=-1).indices


def draw(p: torch.Tensor) -> torch.Tensor:
    """Draws a token ``[...]`` from each of the distributions ``[..., v]``, which need not add up to 1.

    Of the exponential variables ``E(x) / p(x)``, which have the rates ``p(x)``, the one of ``x`` is the smallest with
    probability ``p(x) / sum(p)``. Unlike ``torch.multinomial`` this does not make the host wait for a GPU.
    """
    with drawing:
        noise = torch.empty_like(p).exponential_()
    return best_tokens(p / noise)


def likeliest(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What :class:`Tops` has of logits ``[rows, s, v]``."""
    missing, vocabulary = -values.shape[-1] % PIECE, values.shape[-1]
    pieces = (pad(values, (0, missing), value=-torch.inf) if missing else values).unflatten(-1, (-1, PIECE))
    # The largest logits are in the pieces with the largest maxima.
    maxima = pieces.amax(-1)  # [rows, s, n]
    most, chosen = maxima.topk(min(WIDTH, maxima.shape[-1]), dim=-1)
    candidates = pieces.gather(-2, chosen[..., None].expand(*chosen.shape, PIECE)).flatten(-2)
    highest, places = candidates.topk(min(WIDTH, vocabulary), dim=-1)
    tokens = (chosen.gather(-1, places // PIECE) * PIECE + places % PIECE).clamp_(max=vocabulary - 1)
    if values.device.type != "cpu":
        shares = values.softmax(-1, dtype=torch.float32).gather(-1, tokens)
    else:  # where each exponential counts, most of the sum is estimated
        top = highest[..., :1].float()
        lifted, sampled = (maxima - top).exp_(), slice(None, None, -(-maxima.shape[-1] // _SAMPLED))
        sample = (pieces[..., sampled, :] - top[..., None]).exp_().sum((-1, -2))
        others = (lifted.sum(-1) - (most - top).exp_().sum(-1)).clamp_(min=0.0) * sample
        others /= lifted[..., sampled].sum(-1).clamp_(min=torch.finfo(torch.float32).tiny)
        whole = (candidates - top).exp_().sum(-1) + others
        shares = (highest - top).exp_() / whole[..., None]
    # Logits that overflow (float16) carry no information.
    return tokens, shares.nan_to_num_(0.0), highest.float()


class Logits:
    """Logits ``[b, s, v]``, computed for the rows that still run; only what is small is always spread to all rows."""

    def __init__(
        self,
        values: torch.Tensor | None,
        active: ActiveRows | None = None,
        told: Pending | None = None,
        shape: Sequence[int] = (),
    ) -> None:
        """``values`` ``[rows, s, v]`` may be left out where the ``shape`` is given and only that is read which a graph
        has ``told``, of ``s`` tokens or more: :attr:`best` and, where a forward ``looks``, the :class:`Tops`."""
        self._values, self._active, self.told = values, active, told
        rows, self.size, self.vocabulary = shape if values is None else values.shape
        self.rows: Sequence[int] = range(rows) if active is None else active.kept  # those that still run

    @property
    def values(self) -> torch.Tensor:
        assert self._values is not None
        return self._values

    @cached_property
    def of_all(self) -> torch.Tensor:
        """``[b, s, v]``, zeros in rows that have ended."""
        return self._spread(self.values)

    @cached_property
    def best(self) -> tuple[torch.Tensor, ...]:
        """The tokens ``[b, s]`` with the highest logits, and these; of equal ones the first, a NaN before all."""
        tokens = best_tokens(self.values)[..., None]
        return tuple(self._spread(part)[..., 0] for part in (tokens, self.values.gather(-1, tokens).float()))

    def best_on_host(self) -> list[Any]:
        """:attr:`best` as lists."""
        told = None if self.told is None else self.told.arrays[:2]
        return read(*self.best) if told is None else [part[:, : self.size].tolist() for part in told]

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        """Expands what belongs to each node, ``[rows, s, any]``, to all rows."""
        return values if self._active is None else self._active.spread(values)


class Tops:
    """The likeliest next tokens after each node of the rows that still run, their probabilities (on a CPU about, since
    what is learned of them are factors of four) and logits, read in one transfer to the host."""

    def __init__(self, logits: Logits) -> None:
        self.rows, self._size, self._vocabulary = logits.rows, logits.size, logits.vocabulary
        self.pending = logits.told or Pending(*likeliest(logits.values))

    @cached_property
    def _parts(self) -> list[np.ndarray]:
        """Tokens, probabilities and logits ``[rows, s, 8]``, the likeliest first; fewer of a small vocabulary."""
        return [array[:, : self._size] for array in self.pending.arrays[-3:]]

    def of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens ``[s, 8]`` after a row's nodes, and their probabilities."""
        place = self.rows.index(row)
        return self._parts[0][place], self._parts[1][place]

    def best(self, num_rows: int) -> tuple[list[list[int]], list[list[float]]] | None:
        """The tokens with the highest logits and these, as :attr:`Logits.best` has them, nothing for rows that have
        ended; ``None`` where there is a NaN, or so many are equal that the first may be missing."""
        likeliest, _, highest = self._parts
        if not (highest[..., -1] < highest[..., 0]).all():
            return None
        chosen = np.where(highest == highest[..., :1], likeliest, self._vocabulary).min(-1).tolist()
        tokens = [list[int]() for _ in range(num_rows)]
        for row, of_row in zip(self.rows, chosen, strict=True):
            tokens[row] = of_row
        return tokens, highest[..., 0].tolist()
