"""The exit layer and stop rule that give the most tokens per second, from agreement and measured costs.

What a draft from exit ``E`` would have done on a text that the model wrote is known without drafting: the exact prefix
makes the exit's prediction after each token of that text the token it would have drafted there. So one forward over
the text, with all exits, stands for all drafts that could have been made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..stop.rules import ConfidenceThreshold, FixedLength
from .costs import ForwardCosts, Stopwatch

Rule = FixedLength | ConfidenceThreshold

LENGTHS = (1, 2, 3, 4, 5, 6)
# Less than that is within what such an estimate can be wrong by.
_LEAST_SPEEDUP = 1.02
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Trace:
    """What one exit says along texts that the full model wrote.

    Attributes:
        accept: ``[b, n]`` probability that the exit's draft is accepted at each position, after accepted ones.
        confidence: ``[b, n]`` the exit's top-1 probability there.
    """

    accept: np.ndarray
    confidence: np.ndarray

    def part(self, row: int, start: int, end: int) -> Trace:
        """Some positions of one row."""
        return Trace(self.accept[row : row + 1, start:end], self.confidence[row : row + 1, start:end])


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


@dataclass(frozen=True)
class Replay:
    """A draft replayed along texts.

    Attributes:
        seconds: expected time.
        drafted, accepted: expected tokens.
    """

    seconds: float
    drafted: float
    accepted: float


def replay(trace: Trace, rule: Rule, exit_layer: int, costs: ForwardCosts, max_draft: int) -> Replay:
    """Expected time when ``exit_layer`` drafts along ``trace`` by ``rule``.

    A round that starts at position ``i`` drafts ``D_i`` tokens and moves on by one more than are accepted. After a
    rejected token the draft would go on along another text; the confidences of this one stand for its. Rows of a batch
    are taken as if each were alone, although they wait for the one that drafts longest.
    """
    b, n = trace.accept.shape
    lengths = draft_lengths(trace.confidence, rule, max_draft)
    seconds = drafted = accepted = 0.0
    for row in range(b):
        starts = np.zeros(n + max_draft + 2)
        starts[0] = 1.0
        for i in range(n):
            share = float(starts[i])
            if share < 1e-9:
                continue
            length = int(lengths[row, i])
            seconds += share * (length * costs.draft(exit_layer) + costs.verify(exit_layer, length))
            drafted += share * length
            for k in range(length):
                chance = float(trace.accept[row, i + k])
                starts[i + k + 1] += share * (1 - chance)
                share *= chance
                accepted += share
            starts[i + length + 1] += share
    return Replay(seconds, drafted, accepted)


def draft_lengths(confidence: np.ndarray, rule: Rule, max_draft: int) -> np.ndarray:
    """``[b, n]`` how many tokens a draft has that starts at each position; never beyond the text."""
    n = confidence.shape[1]
    room = np.minimum(n - np.arange(n), max_draft)
    if isinstance(rule, FixedLength):
        return np.broadcast_to(np.minimum(room, rule.num_tokens), confidence.shape)
    lengths = np.empty(confidence.shape, dtype=int)
    unsure = np.full(confidence.shape[0], n - 1)
    for i in reversed(range(n)):
        unsure = np.where(confidence[:, i] < rule.threshold, i, unsure)
        lengths[:, i] = np.minimum(unsure - i + 1, room[i])
    return lengths


def rules(max_draft: int) -> list[Rule]:
    """Stop rules that a probe compares."""
    return [
        *(FixedLength(length) for length in LENGTHS if length <= max_draft),
        *(ConfidenceThreshold(threshold) for threshold in THRESHOLDS),
    ]


class Evidence:
    """What one model's texts have shown so far, and the choice that follows; threads may share it.

    Attributes:
        tokens: tokens of text that were looked at.
        timings: how often forwards were timed.
        choice: the best exit and rule on all texts together, ``None`` before the first.
    """

    def __init__(self) -> None:
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
            self.choice = choose(self._traces, candidates, self._stopwatch.costs(), max_draft)
            return self.choice


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
        runs = [(_sum(replay(text, rule, layer, costs, max_draft) for text in texts), rule) for rule in candidates]
        best[layer] = min(runs, key=lambda run: run[0].seconds)
    tokens = _tokens(traces)
    by_layer = {layer: costs.plain() * tokens / run.seconds for layer, (run, _) in best.items()}
    layer = max(by_layer, key=lambda layer: by_layer[layer])
    run, rule = best[layer]
    if by_layer[layer] < _LEAST_SPEEDUP:
        return ExitChoice(None, rule, 1.0, 0.0, by_layer, 0, tokens)
    rate = run.accepted / run.drafted
    return ExitChoice(layer, rule, by_layer[layer], rate, by_layer, costs.reuse_from(layer), tokens)


def _tokens(traces: dict[int, list[Trace]]) -> int:
    return sum(text.accept.size for text in next(iter(traces.values())))


def _sum(runs: Iterable[Replay]) -> Replay:
    parts = list(runs)
    return Replay(
        seconds=sum(part.seconds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
    )


def trace(exit_scores: torch.Tensor, scores: torch.Tensor, confidence: torch.Tensor, do_sample: bool) -> Trace:
    """The trace of one exit.

    Args:
        exit_scores: ``[b, n, v]`` processed logits of the exit.
        scores: ``[b, n, v]`` processed logits of the full model at the same positions.
        confidence: ``[b, n]`` the exit's top-1 probability.
        do_sample: tokens are drawn, so that a draft is accepted with probability ``Σ min(p, q)``.
    """
    if do_sample:
        accept = torch.minimum(exit_scores.softmax(-1), scores.softmax(-1)).sum(-1)
    else:
        accept = (exit_scores.argmax(-1) == scores.argmax(-1)).float()
    return Trace(accept.cpu().double().numpy(), confidence.cpu().double().numpy())


def exits_to_try(num_layers: int) -> list[int]:
    """Exit layers that a probe looks at: all of 12 layers; of more the first four, some up to half-way, fewer above."""
    if num_layers <= 12:
        return list(range(1, num_layers))
    half = num_layers // 2
    return [*range(1, min(5, num_layers)), *range(6, half, 2), *range(max(6, half), num_layers, 4)]
