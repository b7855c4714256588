"""Sets of skipped blocks, tried on windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..model.partial import LayerPlan
from .replay import Replay, Rule, Trace

# Tries that are replayed anew when text has become harder or easier.
_REPLAYED = 4
_NOTHING = Replay(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Try:
    """One set, tried on one window of text.

    Attributes:
        plan: the set.
        traces: what it says there, one for each row.
        window: number of the window.
        generated: tokens generated until then, all calls of this kind.
    """

    plan: LayerPlan
    traces: tuple[Trace, ...]
    window: int = 0
    generated: int = 0

    def state(self) -> dict[str, Any]:
        """It, as JSON has it."""
        traces = [{"accept": _short(t.accept[0]), "confidence": _short(t.confidence[0])} for t in self.traces]
        return {"set": self.plan.picture(), "window": self.window, "generated": self.generated, "rows": traces}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Try:
        """The reverse of :meth:`state`."""
        rows = tuple(Trace(_shares(row["accept"]), _shares(row["confidence"])) for row in state["rows"])
        if not rows or any(row.accept.shape != row.confidence.shape for row in rows):
            raise ValueError("a try has rows of as many acceptances as confidences")
        return cls(LayerPlan.of_picture(state["set"]), rows, whole(state["window"]), whole(state["generated"]))

    @property
    def matchness(self) -> float:
        """Share of the text's tokens that the set says, too (SWIFT §4.1)."""
        return float(sum(trace.accept.sum() for trace in self.traces)) / self.tokens

    @property
    def tokens(self) -> int:
        """Tokens that it was tried on."""
        return sum(trace.tokens for trace in self.traces)


@dataclass(frozen=True)
class SkipChoice:
    """What a search has found so far.

    Attributes:
        plan: the set.
        drafts: whether it drafts; it does not where no draft would be faster than none.
        stop: when its drafts end, as far as the search chooses that.
        expected_speedup: over one-token steps, as replayed; ``None`` where the ratio was given and matchness decides.
        acceptance_rate: α that drafts of it promise.
        matchness: share of the text's tokens that the set says, too.
    """

    plan: LayerPlan
    drafts: bool
    stop: Rule | None
    expected_speedup: float | None
    acceptance_rate: float
    matchness: float


class Known:
    """The tries of one set, each with its replays by all rules.

    Attributes:
        rule: the index of the best rule.
        run: what it brings.
    """

    def __init__(self, tries: Iterable[tuple[Try, list[Replay]]] = ()) -> None:
        self.tries = list(tries)
        self._count()

    def add(self, done: Try, replays: list[Replay]) -> None:
        """Takes in one more."""
        self.tries.append((done, replays))
        self._count()

    def keep(self, last: int) -> None:
        """Forgets all but the last tries."""
        del self.tries[: max(0, len(self.tries) - last)]

    def _count(self) -> None:
        runs = [Replay.of_all(run) for run in zip(*(replays for _, replays in self.tries), strict=True)]
        self.rule = _fastest(runs) if runs else 0
        self.run = runs[self.rule] if runs else _NOTHING
        self._eased: dict[float, list[Replay]] = {}

    def with_ease(self, ease: float, replayed: Callable[[Try, float], list[Replay]]) -> tuple[int, Replay, Replay]:
        """The best rule where tokens are accepted ``ease`` times as often as on the tries.

        Args:
            ease: that factor.
            replayed: replays of a try by all rules with it.

        Returns:
            The rule's index, what it brings there, and what it brings on the same tries as they were.
        """
        recent = self.tries[-_REPLAYED:]
        if ease not in self._eased:
            runs = zip(*(replayed(done, ease) for done, _ in recent), strict=True)
            self._eased = {ease: [Replay.of_all(run) for run in runs]}
        rule = _fastest(self._eased[ease])
        return rule, self._eased[ease][rule], Replay.of_all(replays[rule] for _, replays in recent)


def _fastest(runs: Sequence[Replay]) -> int:
    return min(range(len(runs)), key=lambda index: runs[index].seconds / runs[index].tokens)


def _shares(values: list[float]) -> np.ndarray:
    found = np.array([values], float)
    if found.ndim != 2 or not found.size or not ((found >= 0) & (found <= 1)).all():
        raise ValueError("acceptances and confidences lie between 0 and 1")
    return found


def whole(value: Any) -> int:
    """A count that was read from a file.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def number(value: Any) -> float:
    """A number of at least 0 that was read from a file.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise TypeError(f"{value!r} is no number of at least 0")
    return float(value)


def _short(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
