"""The autocast in which a model runs, for what runs beside its own forward.

Mixed precision of accelerate, and so of ``Trainer``, is wrapped around the model's ``forward``: whatever calls a part
of the model by itself has to do the same, or its keys and values have another type than the whole model's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """Autocast that was on in a forward.

    Attributes:
        device_type: where.
        dtype: what it casts to.
    """

    device_type: str
    dtype: torch.dtype

    @classmethod
    def around(cls, states: torch.Tensor) -> Autocast | None:
        """What is on at present where ``states`` are, ``None`` for nothing."""
        kind = states.device.type
        return cls(kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def within(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """A context in which it is on again."""
    return nullcontext() if autocast is None else torch.autocast(autocast.device_type, autocast.dtype)
