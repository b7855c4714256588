"""The autocast in which a model runs, for code that runs outside of its own forward.

Mixed precision of accelerate, and so of ``Trainer``, is wrapped around the model's ``forward``. Code that calls a part
of the model by itself has to do the same, or its keys and values have another dtype than the whole model's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Autocast:
    """The autocast that was on in a forward.

    Attributes:
        device_type: device type that it was on for.
        dtype: dtype that it casts to.
    """

    device_type: str
    dtype: torch.dtype

    @classmethod
    def around(cls, states: torch.Tensor) -> Autocast | None:
        """The autocast that is currently on for the device of ``states``, ``None`` if none is."""
        kind = states.device.type
        return cls(kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def within(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """Returns a context in which ``autocast`` is on again."""
    return nullcontext() if autocast is None else torch.autocast(autocast.device_type, autocast.dtype)
