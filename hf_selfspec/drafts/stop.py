"""Rules that decide when a draft is long enough.

A rule is a callable in the manner of a ``LogitsProcessor``:
``rule(input_ids [b, s], logits [b, v], hidden_states [b, d]) -> BoolTensor [b]``. It is called after each drafted
token, which is the last column of ``input_ids``; ``logits`` are the draft's own, from which that token was chosen, and
``hidden_states`` are the states that the logits were computed from. In a batch, shorter rows are aligned right and
repeat their first column on the left. ``True`` ends the row's draft *after* that token: a rule never drops one. Any
function with this signature works as well.

A rule that remembers something, from token to token or from draft to draft, has a method ``start`` instead, which
returns what is called while one generation runs (:class:`RunningRule`). On a GPU bounds decide later (LateBound).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import SettingTypeError
from ..learned.saving import register
from ..model.forks import new_lock
from ..model.transfer import Pending, send
from ..validation import MOST_DRAFT, check_count, check_share

# Draft & Verify's constants of thresholds that adapt: the step in a round before smoothing (ε), and the weights of the
# rounds before in the acceptance rate and in the threshold (β1, β2).
_STEP, _RATE_MEMORY, _THRESHOLD_MEMORY = 0.01, 0.5, 0.9

# On a GPU: tokens of the first draft, and the weight of one in their mean. (26 chats, SmolLM2 in four bits, simulated:
# 0.99 to 1.02 of the rule's own speed where a wait takes 0.05 of a forward, 1.10 to 1.13 where it takes 0.15.)
_FIRST_LENGTH, _LENGTH_STEP = 4.0, 0.2

# Maps (logits [b, v], hidden_states [b, d]) of a drafted token to the probability [b] that it is accepted.
Confidence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
RuleFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RunningRule:
    """A stop rule while one generation runs; ``b`` is the batch size. This one calls a function."""

    def __init__(self, rule: RuleFunction) -> None:
        self._rule = rule

    def begin(self) -> None:
        """Starts a new draft in each row."""

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns ``[b]`` whether each row's draft ends with the token that was just drafted."""
        return self._rule(input_ids, logits, hidden_states)

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learns how many tokens of each row's draft were accepted; rows with an empty draft are ignored."""


class Memory:
    """What a rule keeps from one generation to the next, shared by threads."""

    def __init__(self) -> None:
        self.value: Any = None
        self.lock = new_lock()


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


def start(rule: StopRule, rows: int, max_draft: int, memory: Memory) -> RunningRule:
    """Starts ``rule`` for one generation, see :meth:`RememberingRule.start`."""
    return rule.start(rows, max_draft, memory) if isinstance(rule, RememberingRule) else RunningRule(rule)


class BoundedRule:
    """A rule that compares one number per token with a bound, so that it is read in one transfer with the tokens."""

    threshold: float = -math.inf
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_share(f"{name}(threshold)", self.threshold, zero=False, one=False)
        if self.confidence is not None and not callable(self.confidence):
            raise SettingTypeError(
                f"{name}(confidence) must be a function of (logits, hidden_states), a LinearProbe or None, got "
                f"{self.confidence!r}."
            )

    def start(self, rows: int, max_draft: int, memory: Memory) -> RunningRule:
        return RunningBound(self, [self.threshold] * rows)

    def sure(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The confidence ``[b]`` of a token, finite where the logits are valid."""
        if self.confidence is None:
            return logits.softmax(-1, dtype=torch.float32).amax(-1)
        sure = self.confidence(logits, hidden_states)
        if not isinstance(sure, torch.Tensor) or sure.shape != logits.shape[:1]:
            raise SettingTypeError(
                f"the confidence {self.confidence!r} must return a tensor [{logits.shape[0]}], one probability per "
                f"row, got {sure!r}."
            )
        return sure.float()

    def value(self, before: torch.Tensor | None, sure: torch.Tensor) -> torch.Tensor:
        """What is compared with the threshold, given a token's confidence and this value for the token before it."""
        return sure


class RunningBound(RunningRule):
    """A :class:`BoundedRule` while one generation runs, with a threshold for each row."""

    def __init__(self, rule: BoundedRule, thresholds: Sequence[float]) -> None:
        self.thresholds = tuple(thresholds)
        self.are_cut = [False for _ in thresholds]  # whether the last draft ended before the rule would have ended it
        self._bounded = rule
        self._value: torch.Tensor | None = None

    def begin(self) -> None:
        self._value = None

    def values(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The value ``[b]`` of the next token; a draft ends where it is below the row's threshold."""
        self._value = self._bounded.value(self._value, self._bounded.sure(logits, hidden_states))
        return self._value

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        values = self.values(logits, hidden_states)
        return values < torch.tensor(self.thresholds, device=values.device)


class LateBound:
    """A bound that is looked at after the verification, since a GPU stands still while its host waits for a confidence:
    drafts get as many tokens as the rule would have let earlier ones have in the mean, ``most`` at most. One that it
    would have let go on counts with the mean beyond it, as where each token is as likely to be the last."""

    def __init__(self, rule: RunningBound, most: int) -> None:
        self._rule, self._most = rule, most
        self._lengths = [most if least == -math.inf else _FIRST_LENGTH for least in rule.thresholds]
        self._seen = list[list[torch.Tensor]]()
        self._sent = Pending()
        self.tops: list[float] = []  # the last one at each depth, of the rows that drafted the lowest

    def begin(self, max_new: Sequence[int]) -> list[int]:
        """Returns how many tokens of the next draft each row gets, of those that it may have."""
        self._seen = []
        return [min(count, round(length)) for count, length in zip(max_new, self._lengths, strict=True)]

    def add(self, logits: torch.Tensor, hidden_states: torch.Tensor, *top: torch.Tensor) -> None:
        """Notes the next token, see :meth:`RunningBound.values`; for a tree also its probability ``[b]``."""
        self._seen.append([self._rule.values(logits, hidden_states), *top])

    def send(self) -> None:
        """Lets the device tell what was noted when the host next waits for it."""
        if self._seen:
            self._sent = send(*map(torch.stack, zip(*self._seen, strict=True)))

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """As of a :class:`RunningRule`, of the tokens up to the one with which the rule would have ended the draft."""
        values, *tops = (array.tolist() for array in self._sent.arrays)  # [t, b]
        counted, self._rule.are_cut = list(drafted), []
        for row, (count, least) in enumerate(zip(drafted, self._rule.thresholds, strict=True)):
            end = next((depth + 1 for depth in range(count) if values[depth][row] < least), None)
            self._rule.are_cut.append(end is None)
            counted[row] = end or count
            whole = end or min(count + self._lengths[row], self._most)
            self._lengths[row] += _LENGTH_STEP * (whole - self._lengths[row]) * (count > 0)
        self._rule.update(counted, list(map(min, accepted, counted)))
        for depth, of_rows in enumerate(tops[0] if tops else ()):
            lowest = min(top for top, count in zip(of_rows, drafted, strict=True) if depth < count)
            self.tops[depth : depth + 1] = [lowest]


@register
@dataclass(frozen=True)
class FixedLength(BoundedRule):
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

    def sure(self, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return logits.amax(-1)  # any number will do, since none ends a draft; the maximum is cheap


@register
@dataclass(frozen=True)
class ConfidenceThreshold(BoundedRule):
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


@register
@dataclass(frozen=True)
class ProductThreshold(BoundedRule):
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

    def value(self, before: torch.Tensor | None, sure: torch.Tensor) -> torch.Tensor:
        return sure if before is None else before * sure


@register
@dataclass(frozen=True)
class AdaptiveThreshold:
    """Raises a rule's threshold while the acceptance rate is below a target, and lowers it while it is above.

    After each round, with ``AR_e`` the share of its drafted tokens that were accepted (Draft & Verify, AdaSPEED
    appendix A)::

        AR <- 0.5 AR + 0.5 AR_e
        γ  <- 0.9 γ + 0.1 (γ + 0.01 if AR <= target else γ - 0.01)

    A draft of maximum length does not lower γ, since a lower threshold would not make it longer. Each row of a batch
    has a threshold of its own; the next call with the model starts with their mean.

    Args:
        rule: :class:`ConfidenceThreshold` (Draft & Verify) or :class:`ProductThreshold` (AdaSPEED); its threshold is
            the initial one.
        target: the target acceptance rate α.

    Raises:
        SettingError, SettingTypeError: a setting is not allowed.
    """

    rule: ConfidenceThreshold | ProductThreshold = field(default_factory=ConfidenceThreshold)
    target: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.rule, (ConfidenceThreshold, ProductThreshold)):
            raise SettingTypeError(
                f"AdaptiveThreshold(rule) must be a ConfidenceThreshold or a ProductThreshold, got {self.rule!r}."
            )
        check_share("AdaptiveThreshold(target)", self.target, zero=False, one=False)

    @property
    def confidence(self) -> Confidence | None:
        """That of the rule."""
        return self.rule.confidence

    def start(self, rows: int, max_draft: int, memory: Memory) -> RunningRule:
        return _Adapting(self, rows, max_draft, memory)


class _Adapting(RunningBound):
    def __init__(self, settings: AdaptiveThreshold, rows: int, max_draft: int, memory: Memory) -> None:
        with memory.lock:
            threshold, rate = memory.value or (settings.rule.threshold, settings.target)
        super().__init__(settings.rule, [threshold] * rows)
        self._rates, self._target, self._max_draft, self._memory = [rate] * rows, settings.target, max_draft, memory

    def update(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        thresholds = list(self.thresholds)
        for row, (count, kept) in enumerate(zip(drafted, accepted, strict=True)):
            if not count:
                continue
            rate = self._rates[row] = _RATE_MEMORY * self._rates[row] + (1 - _RATE_MEMORY) * kept / count
            if rate <= self._target or (count < self._max_draft and not self.are_cut[row]):
                step = _STEP if rate <= self._target else -_STEP
                thresholds[row] = min(max(thresholds[row] + (1 - _THRESHOLD_MEMORY) * step, 0.0), 1.0)
        self.thresholds = tuple(thresholds)
        with self._memory.lock:
            self._memory.value = sum(thresholds) / len(thresholds), sum(self._rates) / len(self._rates)
