"""A threshold that adapts to the acceptance rate (Draft & Verify, AdaSPEED appendix A)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import SettingTypeError
from ...learned.saving import register
from ...validation import check_share
from .rules import ConfidenceThreshold, Memory, ProductThreshold, RunningBound, RunningRule


@register("stop")
@dataclass(frozen=True)
class AdaptiveThreshold:
    """Raises a rule's threshold while the acceptance rate is below a target, and lowers it while it is above.

    After each round, with ``AR_e`` the share of its drafted tokens that were accepted::

        AR <- rate_memory AR + (1 - rate_memory) AR_e
        γ  <- threshold_memory γ + (1 - threshold_memory) (γ + step if AR <= target else γ - step)

    A draft of maximum length does not lower γ, since a lower threshold would not make it longer. Each row of a batch
    has a threshold of its own; the next call with the model starts with their mean. The constants are those of Draft &
    Verify.

    Args:
        rule: :class:`ConfidenceThreshold` (Draft & Verify) or :class:`ProductThreshold` (AdaSPEED); its threshold is
            the initial one.
        target: the target acceptance rate α.
        step: step of the threshold in a round, before smoothing (ε).
        rate_memory, threshold_memory: β1 and β2.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    rule: ConfidenceThreshold | ProductThreshold = field(default_factory=ConfidenceThreshold)
    target: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    threshold_memory: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.rule, (ConfidenceThreshold, ProductThreshold)):
            raise SettingTypeError(
                f"AdaptiveThreshold(rule) must be a ConfidenceThreshold or a ProductThreshold, got {self.rule!r}."
            )
        for name in ("target", "step"):
            check_share(f"AdaptiveThreshold({name})", getattr(self, name), zero=False, one=False)
        for name in ("rate_memory", "threshold_memory"):
            check_share(f"AdaptiveThreshold({name})", getattr(self, name), zero=True, one=False)

    def start(self, rows: int, max_draft: int, memory: Memory) -> RunningRule:
        return _Adapting(self, rows, max_draft, memory)


class _Adapting(RunningBound):
    def __init__(self, settings: AdaptiveThreshold, rows: int, max_draft: int, memory: Memory) -> None:
        with memory.lock:
            threshold, rate = memory.value or (settings.rule.threshold, settings.target)
        super().__init__(settings.rule, [threshold] * rows)
        self.rates = [rate] * rows
        self._settings = settings
        self._max_draft = max_draft
        self._memory = memory

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        settings, thresholds = self._settings, list(self.thresholds)
        for row, (count, kept) in enumerate(zip(drafted, accepted, strict=True)):
            if not count:
                continue
            rate = settings.rate_memory * self.rates[row] + (1 - settings.rate_memory) * kept / count
            self.rates[row] = rate
            if rate > settings.target and count >= self._max_draft:
                continue
            step = settings.step if rate <= settings.target else -settings.step
            thresholds[row] = min(max(thresholds[row] + (1 - settings.threshold_memory) * step, 0.0), 1.0)
        if thresholds != list(self.thresholds):
            self.thresholds = tuple(thresholds)
        with self._memory.lock:
            self._memory.value = sum(thresholds) / len(thresholds), sum(self.rates) / len(self.rates)
