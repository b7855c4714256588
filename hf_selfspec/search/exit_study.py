"""Chooses the exit layer and stop rule with the most tokens per second, from agreement and measured costs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..learned.findings import Findings
from ..model.forks import new_lock
from ..model.plan import LayerPlan
from ..stats import GenerationStats
from .choice import Choice, ExitChoice, replayed
from .forward_costs import ForwardCosts, Stopwatch
from .replay import Rule, Trace

# Tokens of text after which a probe stops looking.
ENOUGH = 1024
# Single exits are tried on this many tokens before a model counts as one without an exit that pays. One may pay if it
# would by this factor if drafted and verified tokens cost nothing but the layers up to the exit.
_TRIED, _MAY_PAY = 128, 1.1
# Where the exits lie that are tried, in turn: shares of those that can be compared.
_PLACES = (1 / 3, 1 / 6, 2 / 3)
# Duration of a look at all exits, in forwards of the same size, until one was timed.
_LOOK = 3.0


class ExitStudy(Findings):
    """What one model's texts have shown about its exits, and the choice that follows; threads may share it."""

    is_promising = False  # whether a single exit that was tried may pay

    def __init__(self, num_layers: int, layer: int | None = None) -> None:
        self.num_layers = num_layers
        self.layers = exits_to_try(num_layers) if layer is None else [layer]
        self.timings = Stopwatch(LayerPlan.early_exit(num_layers, self.layers[len(self.layers) // 3]))
        self.look = _LOOK  # duration of a look at all exits, in forwards of the same size
        self.tokens = 0  # of text that was looked at
        self.choice: ExitChoice | None = None
        self.unspent = 0.0  # seconds that earlier calls could have spent and have not, or a debt
        self._bounds: dict[int, float] = {}
        self._trials = 0
        self._traces: dict[int, list[Trace]] = {}
        self._lock = new_lock()

    def best(self, count: int) -> list[int]:
        """The ``count`` exits that look fastest, in order; all that are compared if there are fewer."""
        choice = self.choice
        assert choice is not None
        return sorted(sorted(choice.by_layer, key=lambda layer: -choice.by_layer[layer])[:count])

    @property
    def is_over(self) -> bool:
        """Whether no more text is looked at: the choice rests on enough of it, or all exits that were tried are bad."""
        return self.choice is not None and (self.tokens >= ENOUGH or self._rests_on_trials)

    @property
    def _rests_on_trials(self) -> bool:
        """Whether single exits alone have led to the choice, which is of this process."""
        return self.choice is not None and self._trials > 0 and not self.timings.texts

    @property
    def is_idle(self) -> bool:
        """Whether no draft pays and no more text is looked at."""
        return self.choice is not None and not self.choice.drafts and self.is_over

    @property
    def bound(self) -> float:
        """How much faster the best of the tried exits may make generation, at most."""
        return max(self._bounds.values(), default=math.inf)

    def next_exit(self) -> int:
        return self.layers[int(_PLACES[self._trials % len(_PLACES)] * len(self.layers))]

    def add_trial(self, layer: int, trace: Trace, candidates: Sequence[Rule], max_draft: int) -> None:
        """Records what one exit predicts along a few tokens: it may pay, or no exit does where enough were tried."""
        free = ForwardCosts(0.0, 1.0, 0.0, several=0.0, token=0.0, step=0.0, num_layers=self.num_layers)
        bound = replayed(LayerPlan.early_exit(self.num_layers, layer), candidates, [trace], free, max_draft)
        assert bound.expected_speedup is not None
        with self._lock:
            self._trials += 1
            self.tokens += trace.tokens
            self._bounds[layer] = bound.expected_speedup
            self.is_promising = bound.expected_speedup >= _MAY_PAY
            if not self.is_promising and self.tokens >= _TRIED and self._trials >= 2 * len(_PLACES):
                self.choice = _exit_choice(replace(bound, drafts=False), self._bounds, self.tokens)

    def report(self, stats: GenerationStats) -> None:
        stats.drafts = self.choice is None or self.choice.drafts

    def add(
        self,
        traces: dict[int, list[Trace]],
        candidates: Sequence[Rule],
        max_draft: int,
        rounds: Sequence[float] | None = None,
    ) -> ExitChoice:
        """Adds what each exit predicts along more text, and chooses again; ``rounds`` as in :class:`Stopwatch`."""
        with self._lock:
            # An exit that is no longer compared is left out, so that all have seen the same texts.
            compared = traces.keys() & self._traces.keys() if self._traces else traces.keys()
            self._traces = {layer: self._traces.get(layer, []) + traces[layer] for layer in sorted(compared)}
            self.tokens = _tokens(self._traces)
            if rounds is not None:
                self.timings.complete(rounds)
            assert self.timings.latest is not None, "the first text comes with timings"
            choice = choose_exit(self._traces, candidates, self.timings.latest, max_draft)
            if self.choice is not None and self.choice.tokens > choice.tokens:
                choice = self.choice  # from a file, and based on more text
            self.choice = choice
        self.changed()
        return choice

    def state(self) -> dict[str, Any]:
        return {} if self.choice is None or self._rests_on_trials else self.choice.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned; raises KeyError, TypeError or ValueError for anything else."""
        if state:
            self.choice = ExitChoice.of_state(state, self.num_layers)
            self.tokens = self.choice.tokens


def choose_exit(
    traces: dict[int, list[Trace]], candidates: Sequence[Rule], costs: ForwardCosts, max_draft: int
) -> ExitChoice:
    """The exit and rule with the least expected time per token, by what each exit predicts along the same texts."""
    choices = {
        layer: replayed(LayerPlan.early_exit(costs.num_layers, layer), candidates, texts, costs, max_draft)
        for layer, texts in traces.items()
    }
    speeds = {layer: choice.expected_speedup or 0.0 for layer, choice in choices.items()}
    best = choices[max(speeds, key=lambda layer: speeds[layer])]
    return _exit_choice(best, speeds, _tokens(traces), costs.reuse_from(best.plan.first_altered))


def _exit_choice(choice: Choice, by_layer: dict[int, float], tokens: int, reuse_from: int = 0) -> ExitChoice:
    """An exit that pays, or no draft, with the stop rule of one that does not."""
    if not choice.drafts:
        none = LayerPlan(choice.plan.num_layers)
        choice, reuse_from = replace(choice, plan=none, expected_speedup=1.0, acceptance_rate=0.0), 0
    return ExitChoice(**vars(choice), by_layer=dict(by_layer), reuse_from=reuse_from, tokens=tokens)


def _tokens(traces: dict[int, list[Trace]]) -> int:
    return sum(text.tokens for text in next(iter(traces.values())))


def exits_to_try(num_layers: int) -> list[int]:
    """The exit layers to look at: all in models of up to 12 layers, else the first four and some above."""
    if num_layers <= 12:
        return list(range(1, num_layers))
    half = num_layers // 2
    return [*range(1, min(5, num_layers)), *range(6, half, 2), *range(max(6, half), num_layers, 4)]
