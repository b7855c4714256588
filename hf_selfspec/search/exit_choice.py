"""The exit layer and stop rule that give the most tokens per second, from agreement and measured costs.

What a draft from exit ``E`` would have done on a text that the model wrote is known without drafting: the exact prefix
makes the exit's prediction after each token of that text the token it would have drafted there. So one forward over
the text, with all exits, stands for all drafts that could have been made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..stop.rules import ConfidenceThreshold, FixedLength

Rule = FixedLength | ConfidenceThreshold

LENGTHS = (1, 2, 3, 4, 5, 6)
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


@dataclass(frozen=True)
class ForwardCosts:
    """Seconds of a forward over ``k`` layers and ``m`` tokens, ``fixed + k (layer + token (m - 1))``.

    Attributes:
        fixed: embedding, masks, head and whatever else does not depend on the layers.
        layer: a layer with one token.
        token: what each further token adds to a layer.
        step: what drafting a token takes beside its forward.
        num_layers: ``L``.
    """

    fixed: float
    layer: float
    token: float
    step: float
    num_layers: int

    @classmethod
    def fit(
        cls, early: int, early_one: float, full_one: float, full_many: float, many: int, layers: int
    ) -> ForwardCosts:
        """Costs from three measured forwards.

        Args:
            early: an exit layer.
            early_one: seconds of one token through the first ``early`` layers and the head.
            full_one: seconds of one token through all layers.
            full_many: seconds of ``many`` tokens through all layers.
            many: tokens of the third forward.
            layers: ``L``.
        """
        layer = max(full_one - early_one, 0.0) / (layers - early)
        fixed = max(full_one - layers * layer, 0.0)
        token = max(full_many - full_one, 0.0) / (layers * (many - 1))
        return cls(fixed, layer, token, 0.0, layers)

    def draft(self, exit_layer: int) -> float:
        """Drafting one token."""
        return self.fixed + exit_layer * self.layer + self.step

    def plain(self) -> float:
        """One token through the whole model."""
        return self.fixed + self.num_layers * self.layer

    def verify(self, exit_layer: int, drafted: int) -> float:
        """Verifying ``drafted`` tokens of which all but the last have been through ``exit_layer`` layers."""
        if not drafted:
            return self.plain()
        above = self.num_layers - exit_layer
        return 2 * self.fixed + self.num_layers * self.layer + above * self.token * drafted


@dataclass(frozen=True)
class ExitChoice:
    """What a probe found.

    Attributes:
        layer: the exit layer ``E``, ``None`` if no draft would have been faster than none.
        stop: when a draft ends.
        expected_speedup: tokens per second over those of one-token steps, as replayed on the probed text.
        acceptance_rate: α of that replay.
        by_layer: the best expected speed-up of each exit that was tried.
        tokens: tokens of text behind it.
    """

    layer: int | None
    stop: Rule
    expected_speedup: float
    acceptance_rate: float
    by_layer: dict[int, float]
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
    rejected token the draft would go on along another text; the confidences of this one stand for its.
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
    """What the probes of one model have seen so far, and the choice that follows.

    Attributes:
        probes: how many texts were looked at.
        choice: the best exit and rule on all of them together, ``None`` before the first.
    """

    def __init__(self) -> None:
        self.probes = 0
        self.choice: ExitChoice | None = None
        self._traces: dict[int, list[Trace]] = {}

    def add(
        self, traces: dict[int, Trace], candidates: Sequence[Rule], costs: ForwardCosts, max_draft: int
    ) -> ExitChoice:
        """Takes in another text and chooses again.

        Args:
            traces: what each exit says along the text.
            candidates: stop rules to compare.
            costs: measured forwards, the latest.
            max_draft: most tokens in a draft.
        """
        for layer, found in traces.items():
            self._traces.setdefault(layer, []).append(found)
        self.probes += 1
        self.choice = choose(self._traces, candidates, costs, max_draft)
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
    tokens = sum(text.accept.size for text in next(iter(traces.values())))
    by_layer = {layer: costs.plain() * tokens / run.seconds for layer, (run, _) in best.items()}
    layer = max(by_layer, key=lambda layer: by_layer[layer])
    run, rule = best[layer]
    if by_layer[layer] <= 1.0:
        return ExitChoice(None, rule, 1.0, 0.0, by_layer, tokens)
    return ExitChoice(layer, rule, by_layer[layer], run.accepted / run.drafted, by_layer, tokens)


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


def exits_to_try(num_layers: int) -> Sequence[int]:
    """Exit layers that a probe looks at: all, or every n-th of a deep model."""
    return range(1, num_layers, -(-num_layers // 32))
