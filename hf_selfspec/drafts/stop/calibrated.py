"""A bound on entropy that is calibrated while drafts are verified (DSSD §3.4)."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...learned.saving import register
from ...modules.heads import entropy, threshold
from ...validation import check_share
from .rules import ConfidenceThreshold, Memory, RunningBound, RunningRule

# Number of last verified tokens that count, number before which no draft ends, and tokens between two calibrations.
_REMEMBERED, _LEAST, _EVERY = 1024, 32, 16


@register("stop")
@dataclass(frozen=True)
class CalibratedEntropy:
    """Stops after a token whose entropy is too high for a share ``epsilon`` of such tokens to be accepted.

    The threshold is the highest entropy at or below which that share of the last verified tokens was accepted. DSSD
    calibrates the thresholds of its heads in this way on held-out text; here the drafts themselves are used, of all
    rows and calls with a model. No draft is ended before 32 tokens were verified.

    Args:
        epsilon: the target share, between 0 and 1, both excluded.

    Raises:
        SettingError, SettingTypeError: ``epsilon`` is not allowed.
    """

    epsilon: float = 0.9

    def __post_init__(self) -> None:
        check_share("CalibratedEntropy(epsilon)", self.epsilon, zero=False, one=False)

    def start(self, rows: int, max_draft: int, memory: Memory) -> RunningRule:
        return _Calibrating(self.epsilon, rows, memory)


class _Calibrating(RunningBound):
    def __init__(self, epsilon: float, rows: int, memory: Memory) -> None:
        super().__init__(ConfidenceThreshold(confidence=lambda logits, _: -entropy(logits.float())), [-math.inf] * rows)
        self._epsilon = epsilon
        self._memory = memory
        self._draft: list[torch.Tensor] = []
        self._unseen = 0
        with memory.lock:
            if memory.value is None:
                memory.value = deque(maxlen=_REMEMBERED)
            self._calibrate()

    def begin(self) -> None:
        self._draft = []

    def values(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        self._draft.append(super().values(logits, hidden_states))
        return self._draft[-1]

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        certainties = torch.stack(self._draft).tolist()
        with self._memory.lock:
            for row, (count, kept) in enumerate(zip(drafted, accepted, strict=True)):
                # Nothing is known about tokens after the first wrong one.
                for depth in range(min(count, kept + 1)):
                    self._memory.value.append((certainties[depth][row], depth < kept))
                    self._unseen += 1
            if self._unseen >= _EVERY:
                self._unseen = 0
                self._calibrate()

    def _calibrate(self) -> None:
        """Sets the lowest certainty allowed, one that no token has where the share is never reached."""
        if len(self._memory.value) >= _LEAST:
            certainties, right = torch.tensor(list(self._memory.value), dtype=torch.float64, device="cpu").unbind(1)
            lowest = threshold(certainties, right, self._epsilon)
            self.thresholds = (math.inf if lowest is None else lowest,) * len(self.thresholds)
