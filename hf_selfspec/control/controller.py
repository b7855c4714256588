"""The one place that decides who drafts in a round, if anyone, by what the rounds before have brought and taken."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .arms import FREE, LEAST_SPEEDUP, Measurements
from .costs import CostCurve

# Free drafts in a round in which nothing would draft, but the last tokens have occurred before.
MATCHES = "matches"


class Controller:
    """Chooses in each round of a call between its sources and nothing.

    Where it ``is_frozen``, nothing is timed, so that all processes of a model decide alike.
    """

    def __init__(self, found: Measurements, device: str, on_cpu: bool, is_frozen: bool = False) -> None:
        self.curve = CostCurve(on_cpu, is_frozen=is_frozen)  # until the first round
        self._found, self._device, self._on_cpu, self._is_frozen = found, device, on_cpu, is_frozen
        self._rows = 0
        found.begin_text()

    def begin(self, rows: int, running: int, context: int) -> None:
        """Begins a round: rows that may draft, rows that forwards run over, tokens of the longest text."""
        self._rows = rows
        self.curve = self._found.curve(self._device, running, context, self._on_cpu, self._is_frozen)

    def speedup(self, name: str, promised: float | None = None) -> float:
        """Expected tokens per second of a source, divided by those of rounds in which nothing is drafted.

        ``promised`` is its own estimate for this round, ``None`` if it has none, 0 where it would not draft.
        """
        if not self._rows:
            return 0.0
        if self._is_frozen:
            return math.inf if name == FREE else 0.0
        # The first rounds tell what nothing costs, against which all else is measured.
        return 0.0 if self.curve.wants_plain else self._found.of(name).speedup(promised)

    def pays(self, name: str, promised: float | None = None) -> bool:
        """Whether a source is expected to be faster than nothing by more than the error of the estimate."""
        return self.speedup(name, promised) >= LEAST_SPEEDUP

    def expected(self, nodes: int, tokens: float) -> float:
        """The speed-up of a round that verifies ``nodes`` drafted tokens and brings ``tokens`` over all rows."""
        return tokens / self._rows * self.curve.plain / self.curve.costs.seconds[nodes]

    def choose(self, promised: Mapping[str, float | None], free: float = 0.0) -> str | None:
        """Returns the source that is expected to be the fastest, ``None`` for free drafts or nothing."""
        best = max(promised, key=lambda name: self.speedup(name, promised[name]), default=None)
        if best is None:
            return None
        speedup = self.speedup(best, promised[best])
        return best if speedup >= LEAST_SPEEDUP and speedup > free else None

    def record(
        self, name: str | None, nodes: int, tokens: int, seconds: float, accepted: int = 0, drafted: int = 0
    ) -> None:
        """Records a round.

        ``name`` drafted or was asked in vain (``None`` for nobody); ``nodes`` of each row were verified, all rows
        gained ``tokens``, and of the source's own tokens some were ``accepted``.
        """
        if not self._rows:
            return
        curve = self.curve
        if name is None:
            curve.add_plain(tokens, seconds)
        elif name in (FREE, MATCHES):
            curve.add(nodes, tokens, seconds)
            seconds = curve.costs.seconds[min(nodes, len(curve.costs.seconds) - 1)]  # whatever disturbed this round
        elif curve.is_measured:
            curve.see(tokens, seconds)
        if curve.is_measured:
            used = self._found.arms.get(name or "")
            pace = max(used.speedup(1.0), 1.0) if used is not None else 1.0
            for stats in list(self._found.arms.values()):
                if stats is used:
                    stats.add(tokens / self._rows, seconds / curve.plain, accepted, drafted)
                else:
                    stats.wait(pace)

    def acceptance_rate(self, name: str) -> float:
        """The share of a source's tokens that are accepted."""
        return self._found.of(name).acceptance_rate

    def round_seconds(self) -> tuple[float, ...]:
        """Seconds of a round like the last one with 0, 1, 2, ... drafted tokens; empty before one was timed."""
        return self.curve.costs.seconds if self.curve.is_measured else ()
