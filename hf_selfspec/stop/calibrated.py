"""A bound on entropy that is calibrated while drafts are verified (DSSD §3.4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..learned.registry import register
from ..modules.calibration import entropy, threshold
from ..validation import check_share
from .rules import Memory, RunningRule

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
        """See :meth:`RememberingRule.start`."""
        return _Calibrating(self.epsilon, memory)


class _Calibrating:
    def __init__(self, epsilon: float, memory: Memory) -> None:
        self._epsilon = epsilon
        self._memory = memory
        self._draft: list[torch.Tensor] = []
        self._unseen = 0
        with memory.lock:
            if memory.value is None:
                memory.value = deque(maxlen=_REMEMBERED)
            self.most = self._found()

    def begin(self) -> None:
        self._draft = []

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        self._draft.append(entropy(logits.float()))
        return self._draft[-1] > self.most

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        entropies = torch.stack(self._draft).tolist()
        with self._memory.lock:
            for row, (count, kept) in enumerate(zip(drafted, accepted, strict=True)):
                # Nothing is known about tokens after the first wrong one.
                for depth in range(min(count, kept + 1)):
                    self._memory.value.append((entropies[depth][row], depth < kept))
                    self._unseen += 1
            if self._unseen >= _EVERY:
                self._unseen, self.most = 0, self._found()

    def _found(self) -> float:
        """The highest entropy allowed, one that no token has where the share is never reached."""
        known = list(self._memory.value)
        if len(known) < _LEAST:
            return float("inf")
        columns = zip(*known, strict=True)
        entropies, right = (torch.tensor(column, dtype=torch.float64, device="cpu") for column in columns)
        found = threshold(-entropies, right, self._epsilon)
        return -1.0 if found is None else -found
