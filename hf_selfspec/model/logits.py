"""The full model's logits of one round."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from .partial import ActiveRows, Best


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
    def best(self) -> Best:
        """The tokens with the highest logits, and these, from one pass; a NaN counts as the highest."""
        if self._best is not None:
            return self._best
        tokens = best_tokens(self.found)[..., None]
        return Best(*(self.spread(values)[..., 0] for values in (tokens, self.found.gather(-1, tokens).float())))
