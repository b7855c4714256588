"""Replays drafts by part of a model along texts that the whole model generated, to estimate their speed.

What a draft would have done on such a text is known without drafting: its prediction after each token is the token that
it would have drafted there. (For an early exit this is exact, by the exact prefix; other drafts read keys and values of
their own when they continue from drafted tokens.) So one forward over the text replaces all possible drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..drafts.stop.rules import ConfidenceThreshold, FixedLength, ProductThreshold
from ..model.plan import LayerPlan
from .forward_costs import ForwardCosts

Rule = FixedLength | ConfidenceThreshold | ProductThreshold

_LENGTHS = (1, 2, 3, 4, 5, 6)
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PRODUCTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Trace:
    """What part of a model predicts along texts ``[b, n]``: the probability to ``accept`` its token after accepted
    ones, and its top-1 ``confidence``."""

    accept: np.ndarray
    confidence: np.ndarray

    @classmethod
    def of(cls, accept: torch.Tensor, confidence: torch.Tensor) -> Trace:
        """The trace of tensors ``[b, n]``; a draft that overflows (float16) counts as never accepted."""
        columns = torch.stack([accept.float(), confidence.float()]).cpu()  # one wait for a GPU
        return cls(*np.nan_to_num(columns.double().numpy(), nan=0.0))

    @property
    def tokens(self) -> int:
        return self.accept.size

    def part(self, row: int, start: int, end: int) -> Trace:
        return Trace(self.accept[row : row + 1, start:end], self.confidence[row : row + 1, start:end])


def trace(drafted: torch.Tensor, scores: torch.Tensor, confidence: torch.Tensor, do_sample: bool) -> Trace:
    """The trace of a draft from processed logits ``[b, n, v]``; drawn tokens are accepted with ``Σ min(p, q)``."""
    if do_sample:
        accept = torch.minimum(drafted.softmax(-1), scores.softmax(-1)).sum(-1)
    else:
        accept = (drafted.argmax(-1) == scores.argmax(-1)).float()
    return Trace.of(accept, confidence)


class Replays(NamedTuple):
    """Expected sums along texts that were drafted with each of some rules, each ``[rules]``."""

    seconds: np.ndarray
    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    @property
    def seconds_per_token(self) -> np.ndarray:
        return np.asarray(self.seconds / self.tokens)

    @property
    def acceptance_rate(self) -> np.ndarray:
        """α, the share of drafted tokens that are accepted."""
        return np.asarray(self.accepted / self.drafted)

    @property
    def fastest(self) -> int:
        return int(self.seconds_per_token.argmin())

    @classmethod
    def total(cls, parts: Iterable[Replays]) -> Replays:
        return cls(*np.sum(list(parts), axis=0))


def replays(
    traces: Iterable[Trace], rules: Sequence[Rule], plan: LayerPlan, costs: ForwardCosts, max_draft: int
) -> Replays:
    """The expected results of each rule if ``plan`` drafts along all texts, each row as if alone. Confidences after a
    rejection are this text's; a draft that reaches the end continues at the beginning."""
    prefix, counts = plan.first_altered, np.arange(max_draft + 1)
    seconds = counts * costs.draft(plan) + [costs.verify(prefix, length) for length in counts.tolist()]
    sums = np.zeros((4, len(rules)))
    for trace in traces:
        b, n = trace.accept.shape
        lengths = np.stack([rule.lengths(trace.confidence, max_draft) for rule in rules])
        ahead = (np.arange(n)[:, None] + counts[:-1]) % n
        # [b, n, max_draft + 1]: the probability that at least 0, 1, ... tokens of a long draft are accepted;
        # [rules, b, n, ...]: that exactly so many tokens of each rule's draft are.
        at_least = np.concatenate([np.ones((b, n, 1)), trace.accept[:, ahead].cumprod(-1)], -1)
        exactly = np.where(counts < lengths[..., None], at_least - np.roll(at_least, -1, -1), at_least)
        exactly *= counts <= lengths[..., None]
        starts = np.zeros((len(rules), b, n + max_draft + 1))
        starts[..., 0] = 1.0
        for i in range(n):
            starts[..., i + 1 : i + max_draft + 2] += starts[..., i, None] * exactly[..., i, :]
        begun, ended = starts[..., :n], starts[..., n:]
        sums[0] += (begun * seconds[lengths]).sum((1, 2))
        sums[1] += (ended * np.arange(n, n + max_draft + 1)).sum((1, 2))
        sums[2] += (begun * lengths).sum((1, 2))
        sums[3] += (begun * (exactly @ counts)).sum((1, 2))
    return Replays(*sums)


def rules_for(stop: Any, max_draft: int) -> list[Rule]:
    """The stop rules to compare: only the given one, if a trace is enough to find where it would end drafts."""
    if isinstance(stop, Rule) and stop.confidence is None:
        return [stop]
    return [
        *(FixedLength(length) for length in _LENGTHS if length <= max_draft),
        *(ConfidenceThreshold(threshold) for threshold in _THRESHOLDS),
        *(ProductThreshold(threshold) for threshold in _PRODUCTS),
    ]
