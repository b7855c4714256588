"""Sets of skipped blocks, tried on windows of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..files import as_count
from ..model.partial import LayerPlan
from .choice import fastest_run
from .replay import Replay, Trace

# Trials that are replayed anew when text has become harder or easier.
_REPLAYED = 4


@dataclass(frozen=True)
class Trial:
    """One set, tried on one window of text.

    Attributes:
        plan: the set.
        traces: what it predicts there, one for each row.
        window: number of the window.
        generated: tokens generated until then, in all calls of this kind.
    """

    plan: LayerPlan
    traces: tuple[Trace, ...]
    window: int = 0
    generated: int = 0

    def state(self) -> dict[str, Any]:
        """The trial, as JSON has it."""
        traces = [{"accept": _short(t.accept[0]), "confidence": _short(t.confidence[0])} for t in self.traces]
        return {"set": self.plan.picture(), "window": self.window, "generated": self.generated, "rows": traces}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Trial:
        """The reverse of :meth:`state`."""
        rows = tuple(Trace(_shares(row["accept"]), _shares(row["confidence"])) for row in state["rows"])
        if not rows or any(row.accept.shape != row.confidence.shape for row in rows):
            raise ValueError("a trial has rows of as many acceptances as confidences")
        return cls(LayerPlan.of_picture(state["set"]), rows, as_count(state["window"]), as_count(state["generated"]))

    @property
    def matchness(self) -> float:
        """Share of the text's tokens that the set predicts (SWIFT §4.1)."""
        return float(sum(trace.accept.sum() for trace in self.traces)) / self.tokens

    @property
    def tokens(self) -> int:
        """Tokens that it was tried on."""
        return sum(trace.tokens for trace in self.traces)


class SetRecord:
    """The trials of one set, each with its replays by all rules.

    Attributes:
        trials: the trials and their replays, oldest first.
        rule: the index of the fastest rule on all of them.
        run: what that rule brings, ``None`` without replays.
    """

    def __init__(self, trials: Iterable[tuple[Trial, list[Replay]]] = ()) -> None:
        self.trials = list(trials)
        self._compare_rules()

    def add(self, trial: Trial, replays: list[Replay]) -> None:
        """Takes in one more trial."""
        self.trials.append((trial, replays))
        self._compare_rules()

    def keep(self, last: int) -> None:
        """Forgets all but the last trials."""
        del self.trials[: max(0, len(self.trials) - last)]

    def _compare_rules(self) -> None:
        runs = [Replay.of_all(run) for run in zip(*(replays for _, replays in self.trials), strict=True)]
        self.rule = fastest_run(runs) if runs else 0
        self.run = runs[self.rule] if runs else None
        self._eased: dict[float, list[Replay]] = {}

    def with_ease(self, ease: float, replay: Callable[[Trial, float], list[Replay]]) -> tuple[int, Replay, Replay]:
        """The fastest rule where tokens are accepted ``ease`` times as often as in the trials.

        Args:
            ease: that factor.
            replay: replays a trial by all rules with it.

        Returns:
            The rule's index, what it brings there, and what it brings on the same trials as they were.
        """
        recent = self.trials[-_REPLAYED:]
        if ease not in self._eased:
            runs = zip(*(replay(trial, ease) for trial, _ in recent), strict=True)
            self._eased = {ease: [Replay.of_all(run) for run in runs]}
        rule = fastest_run(self._eased[ease])
        return rule, self._eased[ease][rule], Replay.of_all(replays[rule] for _, replays in recent)


def _shares(values: list[float]) -> np.ndarray:
    found = np.array([values], float)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ValueError("acceptances and confidences lie between 0 and 1")
    return found


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
