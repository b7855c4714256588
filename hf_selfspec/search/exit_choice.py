"""The exit layer and stop rule that give the most tokens per second, from agreement and measured costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..model.partial import LayerPlan
from ..types import GenerationStats
from .costs import ForwardCosts, Stopwatch
from .replay import LEAST_SPEEDUP, Replay, Rule, Trace, replays, rule_of, rule_state
from .tries import number, whole

# Tokens of text after which nothing more is looked at.
ENOUGH = 1024


@dataclass(frozen=True)
class ExitChoice:
    """What a probe found.

    Attributes:
        layer: the exit layer ``E``, ``None`` if no draft would have been faster than none.
        stop: when a draft ends.
        expected_speedup: tokens per second over those of one-token steps, as replayed on the probed text.
        acceptance_rate: α of that replay.
        by_layer: the best expected speed-up of each exit that was tried.
        reuse_from: drafted tokens from which on KVQ reuse pays.
        tokens: tokens of text behind it.
    """

    layer: int | None
    stop: Rule
    expected_speedup: float
    acceptance_rate: float
    by_layer: dict[int, float]
    reuse_from: int
    tokens: int

    def __str__(self) -> str:
        what = "no draft" if self.layer is None else f"exit layer {self.layer}, {self.stop}"
        rows = [f"{layer:>4} {speedup:>8.2f}" for layer, speedup in sorted(self.by_layer.items())]
        return "\n".join(
            [
                f"{what}: expected speed-up {self.expected_speedup:.2f}, acceptance rate {self.acceptance_rate:.2f} "
                f"({self.tokens} tokens)",
                "exit  speed-up",
                *rows,
            ]
        )


class Evidence:
    """What one model's texts have shown so far, and the choice that follows; threads may share it.

    Attributes:
        tokens: tokens of text that were looked at.
        timings: how often forwards were timed.
        choice: the best exit and rule on all texts together, ``None`` before the first.
        changed: is called when there is a new choice, ``None`` where nobody wants to know.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] | None = None
        self.tokens = 0
        self.timings = 0
        self.choice: ExitChoice | None = None
        self._traces: dict[int, list[Trace]] = {}
        self._stopwatch: Stopwatch | None = None
        self._lock = threading.Lock()

    def best(self, count: int) -> list[int]:
        """The ``count`` exits that look fastest, in order; all that were asked if there are fewer."""
        choice = self.choice
        assert choice is not None
        return sorted(sorted(choice.by_layer, key=lambda layer: -choice.by_layer[layer])[:count])

    @property
    def is_idle(self) -> bool:
        """Whether no draft pays and nothing more is looked at."""
        return self.choice is not None and self.choice.layer is None and self.tokens >= ENOUGH

    def rest(self, tokens: int, seconds: float) -> None:
        """Nothing to learn from a call without a draft."""

    def report(self, stats: GenerationStats) -> None:
        """Says that no draft pays, where that is so."""
        stats.drafts = self.choice is None or self.choice.layer is not None

    def add(
        self,
        traces: dict[int, list[Trace]],
        stopwatch: Stopwatch | None,
        candidates: Sequence[Rule],
        max_draft: int,
    ) -> ExitChoice:
        """Takes in more text and chooses again.

        Args:
            traces: what each exit says along the texts.
            stopwatch: new timings, ``None`` where there are enough.
            candidates: stop rules to compare.
            max_draft: most tokens in a draft.
        """
        with self._lock:
            # Exits that are not asked any more are out, so that all have the same texts behind them.
            asked = traces.keys() & self._traces.keys() if self._traces else traces.keys()
            self._traces = {layer: self._traces.get(layer, []) + traces[layer] for layer in sorted(asked)}
            self.tokens = _tokens(self._traces)
            if stopwatch is not None:
                self.timings += 1
                if self._stopwatch is None:
                    self._stopwatch = stopwatch
                else:
                    self._stopwatch.add(stopwatch)
            assert self._stopwatch is not None, "the first text comes with timings"
            choice = choose(self._traces, candidates, self._stopwatch.costs(), max_draft)
            if self.choice is not None and self.choice.tokens > choice.tokens:
                choice = self.choice  # from a file, and more text is behind it
            self.choice = choice
        if self.changed is not None:
            self.changed()
        return choice

    def state(self) -> dict[str, Any]:
        """The choice, as JSON has it."""
        if self.choice is None:
            return {}
        stop = rule_state(self.choice.stop)
        return {**asdict(self.choice), "stop": stop, "by_layer": list(self.choice.by_layer.items())}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave."""
        if state:
            layer = state["layer"]
            by_layer = {whole(exit_layer): number(speed) for exit_layer, speed in state["by_layer"]}
            if not by_layer or not (layer is None or whole(layer) in by_layer):
                raise ValueError(f"exit layer {layer!r}, of {sorted(by_layer)}")
            self.choice = ExitChoice(
                layer=layer,
                stop=rule_of(state["stop"]),
                expected_speedup=number(state["expected_speedup"]),
                acceptance_rate=number(state["acceptance_rate"]),
                by_layer=by_layer,
                reuse_from=whole(state["reuse_from"]),
                tokens=whole(state["tokens"]),
            )
            self.tokens = self.choice.tokens


def choose(
    traces: dict[int, list[Trace]], candidates: Sequence[Rule], costs: ForwardCosts, max_draft: int
) -> ExitChoice:
    """The exit and rule with the least expected time per token.

    Args:
        traces: what each exit says along the same texts.
        candidates: stop rules to compare.
        costs: measured forwards.
        max_draft: most tokens in a draft.
    """
    best: dict[int, tuple[Replay, Rule]] = {}
    for layer, texts in traces.items():
        plan = LayerPlan.early_exit(costs.num_layers, layer)
        runs = zip(replays(texts, candidates, plan, costs, max_draft), candidates, strict=True)
        best[layer] = min(runs, key=lambda run: run[0].seconds / run[0].tokens)
    tokens = _tokens(traces)
    by_layer = {layer: costs.plain() * run.tokens / run.seconds for layer, (run, _) in best.items()}
    layer = max(by_layer, key=lambda layer: by_layer[layer])
    run, rule = best[layer]
    if by_layer[layer] < LEAST_SPEEDUP:
        return ExitChoice(None, rule, 1.0, 0.0, by_layer, 0, tokens)
    rate = run.accepted / run.drafted
    return ExitChoice(layer, rule, by_layer[layer], rate, by_layer, costs.reuse_from(layer), tokens)


def _tokens(traces: dict[int, list[Trace]]) -> int:
    return sum(text.tokens for text in next(iter(traces.values())))


def exits_to_try(num_layers: int) -> list[int]:
    """Exit layers that a probe looks at: all of 12 layers; of more the first four, some up to half-way, fewer above."""
    if num_layers <= 12:
        return list(range(1, num_layers))
    half = num_layers // 2
    return [*range(1, min(5, num_layers)), *range(6, half, 2), *range(max(6, half), num_layers, 4)]
