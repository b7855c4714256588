"""The full model's logits of one round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from ..forks import cached_property
from .active import ActiveRows
from .partial import Best
from .transfer import Pending

# Tokens of a vocabulary whose maximum is found at once.
STRETCH = 64
# How many of the likeliest tokens are looked for.
WIDTH = 8
# How many pieces tell what others hold beside their maxima.
_SAMPLED = 16


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """The index ``[...]`` of the highest of ``[..., v]``; on a CPU by NumPy, in a tenth of torch's time."""
    return torch.from_numpy(np.asarray(scores.numpy().argmax(-1))) if scores.device.type == "cpu" else scores.argmax(-1)


class Logits:
    """Logits ``[b, s, v]``, computed for the rows that still run; only what is small is always spread to all rows."""

    def __init__(self, found: torch.Tensor, rows: ActiveRows | None = None, best: Best | None = None) -> None:
        self.found, self._rows, self._best = found, rows, best  # ``[rows, s, v]``

    @cached_property
    def of_all(self) -> torch.Tensor:
        """``[b, s, v]``, zeros in rows that have ended."""
        return self.spread(self.found)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Expands what belongs to each node, ``[rows, s, any]``, to all rows."""
        return values if self._rows is None else self._rows.spread(values)

    @cached_property
    def stretches(self) -> torch.Tensor:
        """The vocabulary in pieces, ``[rows, s, n, 64]``."""
        rest = -self.found.shape[-1] % STRETCH
        return (pad(self.found, (0, rest), value=-torch.inf) if rest else self.found).unflatten(-1, (-1, STRETCH))

    @cached_property
    def maxima(self) -> torch.Tensor:
        """The largest logit of each piece, ``[rows, s, n]``."""
        return self.stretches.amax(-1)

    def within(self, chosen: torch.Tensor) -> torch.Tensor:
        """The logits ``[rows, s, c, 64]`` of chosen pieces ``[rows, s, c]``."""
        return self.stretches.gather(-2, chosen[..., None].expand(*chosen.shape, STRETCH))

    @cached_property
    def best(self) -> Best:
        """The tokens with the highest logits, and these; of equal ones the first, a NaN before all."""
        if self._best is not None:
            return self._best
        tokens = best_tokens(self.found)[..., None]
        return Best(*(self.spread(values)[..., 0] for values in (tokens, self.found.gather(-1, tokens).float())))

    def places(self) -> Sequence[int]:
        """The rows that still run."""
        return range(len(self.found)) if self._rows is None else self._rows.kept


class Tops(Pending):
    """The likeliest next tokens after each node of the rows that still run, and about their probabilities, by one pass
    over the vocabulary and one transfer to the host."""

    def __init__(self, logits: Logits) -> None:
        self.rows, self._vocabulary = logits.places(), logits.found.shape[-1]
        # The largest logits are in the pieces with the largest maxima.
        maxima = logits.maxima
        most, chosen = maxima.topk(min(WIDTH, maxima.shape[-1]), dim=-1)
        found = logits.within(chosen)
        highest, places = found.flatten(-2).topk(min(WIDTH, self._vocabulary), dim=-1)
        top, step = highest[..., :1].float(), -(-maxima.shape[-1] // _SAMPLED)
        sums, lifted, some = (found - top[..., None]).exp_().sum(-1), (maxima - top).exp_(), slice(None, None, step)
        sample = (logits.stretches[..., some, :] - top[..., None]).exp_().sum((-1, -2))
        totals = torch.stack([lifted.sum(-1), sample, lifted[..., some].sum(-1)], dim=-1)
        super().__init__(chosen, places, torch.cat([highest, most, sums, totals], dim=-1))

    @cached_property
    def tokens(self) -> np.ndarray:
        """``[rows, s, 8]``, the likeliest first; fewer of a small vocabulary."""
        chosen, places, _ = self.arrays()
        found = np.take_along_axis(chosen, places // STRETCH, -1) * STRETCH + places % STRETCH
        return np.minimum(found, self._vocabulary - 1)

    @cached_property
    def shares(self) -> np.ndarray:
        """The probabilities ``[rows, s, 8]``; what is learned of them are factors of four."""
        chosen, places, numbers = self.arrays()
        w, n = places.shape[-1], chosen.shape[-1]
        with np.errstate(invalid="ignore", over="ignore"):
            shares = np.exp(numbers[..., : w + n] - numbers[..., :1])
            most, sums = shares[..., w:], numbers[..., w + n : -3]
            maxima, sample, of_maxima = np.moveaxis(numbers[..., -3:], -1, 0)
            rest = np.maximum(maxima - most.sum(-1), 0.0) * sample / np.maximum(of_maxima, np.finfo(np.float32).tiny)
            whole = sums.sum(-1) + rest
            # Logits that overflow (float16) carry no information.
            return np.nan_to_num(shares[..., :w] / whole[..., None], nan=0.0)

    def of(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens ``[s, 8]`` after a row's nodes, and their probabilities."""
        place = self.rows.index(row)
        return self.tokens[place], self.shares[place]

    def best(self, num_rows: int) -> tuple[list[list[int]], list[list[float]]] | None:
        """The tokens with the highest logits and these, as :attr:`Logits.best` has them, nothing for rows that have
        ended; ``None`` where there is a NaN, or so many are equal that the first may be missing."""
        highest = self.arrays()[2][..., : self.tokens.shape[-1]]
        if not (highest[..., -1] < highest[..., 0]).all():
            return None
        chosen = np.where(highest == highest[..., :1], self.tokens, self._vocabulary).min(-1).tolist()
        tokens = [list[int]() for _ in range(num_rows)]
        for row, of_row in zip(self.rows, chosen, strict=True):
            tokens[row] = of_row
        return tokens, highest[..., 0].tolist()
