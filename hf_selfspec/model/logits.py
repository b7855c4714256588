"""The full model's logits of one round."""

from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import pad

from .partial import ActiveRows, Best

# Tokens of a vocabulary whose maximum is found at once.
STRETCH = 64


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
        """The tokens with the highest logits, and these, from one pass; of equal ones the first, a NaN before all."""
        if self._best is not None:
            return self._best
        if "maxima" in self.__dict__:
            piece = self.maxima.argmax(-1, keepdim=True)
            tokens = piece * STRETCH + self.within(piece).argmax(-1)
        else:
            tokens = best_tokens(self.found)[..., None]
        return Best(*(self.spread(values)[..., 0] for values in (tokens, self.found.gather(-1, tokens).float())))
