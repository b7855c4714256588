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
    """What :class:`Tops` reads of logits ``[rows, s, v]``, by one pass over the vocabulary."""
    missing = -values.shape[-1] % PIECE
    pieces = (pad(values, (0, missing), value=-torch.inf) if missing else values).unflatten(-1, (-1, PIECE))
    # The largest logits are in the pieces with the largest maxima.
    maxima = pieces.amax(-1)  # [rows, s, n]
    most, chosen = maxima.topk(min(WIDTH, maxima.shape[-1]), dim=-1)
    candidates = pieces.gather(-2, chosen[..., None].expand(*chosen.shape, PIECE))
    highest, places = candidates.flatten(-2).topk(min(WIDTH, values.shape[-1]), dim=-1)
    top = highest[..., :1].float()
    lifted = (maxima - top).exp_()
    sampled = slice(None, None, -(-maxima.shape[-1] // _SAMPLED))
    sample = (pieces[..., sampled, :] - top[..., None]).exp_().sum((-1, -2))
    sums = (candidates - top[..., None]).exp_().sum(-1)
    totals = torch.stack([lifted.sum(-1), sample, lifted[..., sampled].sum(-1)], dim=-1)
    return chosen, places, torch.cat([highest, most, sums, totals], dim=-1)


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
    """The likeliest next tokens after each node of the rows that still run, and about their probabilities, read in one
    transfer to the host."""

    def __init__(self, logits: Logits) -> None:
        self.rows, self._size, self._vocabulary = logits.rows, logits.size, logits.vocabulary
        self.pending = logits.told or Pending(*likeliest(logits.values))

    @property
    def _arrays(self) -> list[np.ndarray]:
        return [array[:, : self._size] for array in self.pending.arrays[-3:]]

    @cached_property
    def tokens(self) -> np.ndarray:
        """``[rows, s, 8]``, the likeliest first; fewer of a small vocabulary."""
        chosen, places, _ = self._arrays
        tokens = np.take_along_axis(chosen, places // PIECE, -1) * PIECE + places % PIECE
        return np.minimum(tokens, self._vocabulary - 1)

    @cached_property
    def shares(self) -> np.ndarray:
        """The probabilities ``[rows, s, 8]``; what is learned of them are factors of four."""
        chosen, places, numbers = self._arrays
        w, n = places.shape[-1], chosen.shape[-1]
        with np.errstate(invalid="ignore", over="ignore"):
            shares = np.exp(numbers[..., : w + n] - numbers[..., :1])
            most, sums = shares[..., w:], numbers[..., w + n : -3]
            maxima, sample, of_maxima = np.moveaxis(numbers[..., -3:], -1, 0)
            others = np.maximum(maxima - most.sum(-1), 0.0) * sample / np.maximum(of_maxima, np.finfo(np.float32).tiny)
            whole = sums.sum(-1) + others
            # Logits that overflow (float16) carry no information.
            return np.nan_to_num(shares[..., :w] / whole[..., None], nan=0.0)

    def of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens ``[s, 8]`` after a row's nodes, and their probabilities."""
        place = self.rows.index(row)
        return self.tokens[place], self.shares[place]

    def best(self, num_rows: int) -> tuple[list[list[int]], list[list[float]]] | None:
        """The tokens with the highest logits and these, as :attr:`Logits.best` has them, nothing for rows that have
        ended; ``None`` where there is a NaN, or so many are equal that the first may be missing."""
        highest = self._arrays[2][..., : self.tokens.shape[-1]]
        if not (highest[..., -1] < highest[..., 0]).all():
            return None
        chosen = np.where(highest == highest[..., :1], self.tokens, self._vocabulary).min(-1).tolist()
        tokens = [list[int]() for _ in range(num_rows)]
        for row, of_row in zip(self.rows, chosen, strict=True):
            tokens[row] = of_row
        return tokens, highest[..., 0].tolist()
