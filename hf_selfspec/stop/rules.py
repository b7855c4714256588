"""Rules that decide when a draft is long enough.

A rule is a callable in the manner of a ``LogitsProcessor``:
``rule(input_ids [b, s], logits [b, v], hidden_states [b, d]) -> BoolTensor [b]``. It is called after each drafted
token, which is the last column of ``input_ids``; ``logits`` are the draft's own, from which that token was chosen, and
``hidden_states`` are the states that the logits were computed from. In a batch, shorter rows are aligned right and
repeat their first column on the left. ``True`` ends the row's draft *after* that token: a rule never drops one. Any
function with this signature works as well.

A rule that remembers something, from token to token or from draft to draft, has a method ``start`` instead, which
returns what is called while one generation runs (:class:`RunningRule`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ..errors import SettingTypeError
from ..learned.registry import register
from ..model.transfer import upload
from ..validation import MOST_DRAFT, check_count, check_share
from .bound import NEVER, Bound, Reach

# Maps (logits [b, v], hidden_states [b, d]) of a drafted token to the probability [b] that it is accepted.
Confidence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
RuleFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RunningRule(Protocol):
    """A stop rule while one generation runs; ``b`` is the batch size."""

    def begin(self) -> None:
        """Starts a new draft in each row."""

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns ``[b]`` whether each row's draft ends with the token that was just drafted."""

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns how many tokens of each row's draft were accepted; rows with an empty draft are ignored."""


@runtime_checkable
class BoundedRule(Protocol):
    """A running rule that compares one number per token with a bound.

    A step needs no extra launches or reads for such a rule.
    """

    def bound(self) -> Bound | None:
        """Returns the rule for the next draft in that form, ``None`` if it has none and must be called."""


class Memory:
    """What a rule keeps from one generation to the next, shared by threads."""

    def __init__(self) -> None:
        self.value: Any = None
        self.lock = threading.Lock()


@runtime_checkable
class RememberingRule(Protocol):
    """A stop rule with a memory."""

    def start(self, rows: int, max_draft: int, memory: Memory) -> RunningRule:
        """Returns what decides in one generation.

        Args:
            rows: number of rows of the batch.
            max_draft: maximum number of tokens in a draft.
            memory: what was kept from earlier generations with the same model and the same kind of call.
        """


StopRule = RuleFunction | RememberingRule


class _Function:
    """A rule that remembers nothing."""

    def __init__(self, rule: RuleFunction, rows: int) -> None:
        self._rule = rule
        self._rows = rows

    def begin(self) -> None:
        pass

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._rule(input_ids, logits, hidden_states)

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass

    def bound(self) -> Bound | None:
        """See :meth:`BoundedRule.bound`."""
        if type(self._rule) is FixedLength:
            return NEVER
        if not isinstance(self._rule, ConfidenceThreshold):
            return None
        return _bound(self._rule, (self._rule.threshold,) * self._rows)


def start(rule: StopRule, rows: int, max_draft: int, memory: Memory) -> RunningRule:
    """Starts ``rule`` for one generation, see :meth:`RememberingRule.start`."""
    return rule.start(rows, max_draft, memory) if isinstance(rule, RememberingRule) else _Function(rule, rows)


@register("stop")
@dataclass(frozen=True)
class FixedLength:
    """Always drafts ``num_tokens`` tokens (LayerSkip §4.3).

    Args:
        num_tokens: length of a draft, from 1 to 1,024.

    Raises:
        SettingError, SettingTypeError: ``num_tokens`` is not allowed.
    """

    num_tokens: int

    def __post_init__(self) -> None:
        check_count("FixedLength(num_tokens)", self.num_tokens, most=MOST_DRAFT)

    @property
    def max_draft(self) -> int:
        """The upper bound that this rule sets on a draft's length."""
        return self.num_tokens

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)


@register("stop", "rule")
@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stops after a token whose confidence is below ``threshold`` (SWIFT 0.8, Kangaroo 0.6).

    Args:
        threshold: between 0 and 1, both excluded.
        confidence: returns the probability ``[b]`` that a drafted token is accepted, given its ``logits`` ``[b, v]``
            and ``hidden_states`` ``[b, d]``, for example a :class:`LinearProbe`; ``None`` for the top-1 probability.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    threshold: float = 0.8
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        _check_threshold(self)

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.reach(None, logits, hidden_states) < self.threshold

    def reach(self, before: torch.Tensor | None, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[b]`` what is compared with the threshold, given what was for the draft's token before."""
        return _confidence(self.confidence, logits, hidden_states)


@register("stop", "rule")
@dataclass(frozen=True)
class ProductThreshold:
    """Stops after the token at which the product of the draft's confidences falls below ``threshold``.

    AdaSPEED §II.A: verification accepts tokens up to the first wrong one, so all tokens before must be right, too.

    Args:
        threshold: between 0 and 1, both excluded. (AdaSPEED starts at 0.8 and adapts it, see
            :class:`AdaptiveThreshold`.)
        confidence: as in :class:`ConfidenceThreshold`.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    threshold: float = 0.4
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        _check_threshold(self)

    def reach(self, before: torch.Tensor | None, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[b]`` what is compared with the threshold, given what was for the draft's token before."""
        sure = _confidence(self.confidence, logits, hidden_states)
        return sure if before is None else before * sure

    def start(self, rows: int, max_draft: int, memory: Memory) -> RunningRule:
        """See :meth:`RememberingRule.start`."""
        return Comparing(self, [self.threshold] * rows)


class Comparing:
    """A rule with a threshold for each row, while one generation runs.

    Attributes:
        thresholds: one for each row. After each change they are uploaded to a device when they are needed there.
    """

    def __init__(self, rule: ConfidenceThreshold | ProductThreshold, thresholds: Sequence[float]) -> None:
        self.thresholds = tuple(thresholds)
        self._rule = rule
        self._reached: torch.Tensor | None = None
        self._bounds: tuple[tuple[float, ...], torch.Tensor] | None = None

    def begin(self) -> None:
        self._reached = None

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        self._reached = self._rule.reach(self._reached, logits, hidden_states)
        return self._reached < self._on(self._reached.device)

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass

    def bound(self) -> Bound | None:
        """See :meth:`BoundedRule.bound`."""
        return _bound(self._rule, self.thresholds)

    def _on(self, device: torch.device) -> torch.Tensor:
        """The thresholds ``[b]``; equal ones need no upload."""
        known = self._bounds
        if known is None or known[0] is not self.thresholds or known[1].device != device:
            first, are_equal = self.thresholds[0], len(set(self.thresholds)) == 1
            rows = len(self.thresholds)
            bounds = (
                torch.full((rows,), first, device=device, dtype=torch.float32)
                if are_equal
                else upload(np.array(self.thresholds, np.float32), device)
            )
            known = self._bounds = self.thresholds, bounds
        return known[1]


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """Returns the top-1 probability ``[b]`` of logits ``[b, v]``."""
    return logits.softmax(-1, dtype=torch.float32).amax(-1)


def _last(before: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """The value ``[b]`` that :class:`ConfidenceThreshold` compares."""
    return confidence(logits)


def _product(before: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """The value ``[b]`` that :class:`ProductThreshold` compares."""
    sure = confidence(logits)
    return sure if before is None else before * sure


# What each rule compares with its threshold, by its exact class: a subclass may compute something else.
_REACHES: dict[type, Reach] = {ConfidenceThreshold: _last, ProductThreshold: _product}


def _bound(rule: ConfidenceThreshold | ProductThreshold, thresholds: tuple[float, ...]) -> Bound | None:
    """The rule as a bound on one number per token, ``None`` if its confidence is the user's own function."""
    if rule.confidence is not None or type(rule) not in _REACHES:
        return None
    return Bound(_REACHES[type(rule)], thresholds)


def _confidence(metric: Confidence | None, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    if metric is None:
        return confidence(logits)
    sure = metric(logits, hidden_states)
    if not isinstance(sure, torch.Tensor) or sure.shape != logits.shape[:1]:
        raise SettingTypeError(
            f"the confidence {metric!r} must return a tensor [{logits.shape[0]}], one probability per row, got "
            f"{sure!r}."
        )
    return sure.float()


def _check_threshold(rule: ConfidenceThreshold | ProductThreshold) -> None:
    name = type(rule).__name__
    check_share(f"{name}(threshold)", rule.threshold, zero=False, one=False)
    if rule.confidence is not None and not callable(rule.confidence):
        raise SettingTypeError(
            f"{name}(confidence) must be a function of (logits, hidden_states), a LinearProbe or None, got "
            f"{rule.confidence!r}."
        )
