"""Which exits take part in which training step (LayerSkip §4.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..settings import check_count


class Curriculum(Protocol):
    """``C(t, l)`` of LayerSkip, equation 6.

    ``enabled(step, steps, num_layers)`` returns the layers ``l`` (0 to ``L-1``, the exit being after the layer) whose
    loss counts in step ``t`` of ``T``. The last layer always counts, whatever is returned.
    """

    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]: ...


@dataclass(frozen=True)
class Rotational:
    """Every ``every``-th layer, shifted by one each step, so that each exit is on once in ``every`` steps.

    Args:
        every: ``R``, at least 1 (1: all exits in all steps). The paper uses 8 for continual pre-training of 32 layers
            and 16 for fine-tuning them.
    """

    every: int = 16

    def __post_init__(self) -> None:
        check_count("Rotational(R)", self.every)

    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]:
        return frozenset(range(step % self.every, num_layers, self.every))


@dataclass(frozen=True)
class Gradual:
    """From the last layer down to the first, one more every ``T / (2 L)`` steps; all exits are on from half-way."""

    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]:
        count = min(num_layers, 1 + step * 2 * num_layers // max(steps, 1))
        return frozenset(range(num_layers - count, num_layers))
