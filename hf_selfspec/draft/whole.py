"""Whole drafts as one graph: forwards, choices of tokens and the stop rule, without Python in between.

The graph always runs the maximum number of steps, and the draft's length is found afterwards. What the extra steps
write is overwritten by forwards of the next rounds before anything reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from ..control.clock import SIZES
from ..control.forms import Forms
from ..model.fixed import FixedShapes, OneForward
from ..model.partial import ForwardPass, LayerPlan
from ..stop.rules import RunningRule, TraceableRule
from ..stop.traced import Judged, TracedRule
from ..transfer import read
from ..types import Draft, Text
from ..verify.sampling import draw_by
from ..verify.scoring import Scorer
from .source import Limits

_FORMS = "forms of drafts"
# Devices whose results the host can read at any time; on others it would have to wait.
_READ_AT_ONCE = ("cpu",)


@dataclass(frozen=True)
class Wanted:
    """How a draft is made.

    Attributes:
        plan: blocks that run.
        prefix: the layer from whose input states verification starts, 0 for none.
        limits: the limits of drafts.
        rule: the running stop rule.
        reuse_from: minimum number of drafted tokens for verification to start from states.
        length_is_fixed: whether drafts have a fixed length, whatever the tokens.
    """

    plan: LayerPlan
    prefix: int
    limits: Limits
    rule: RunningRule
    reuse_from: int
    length_is_fixed: bool

    @property
    def steps(self) -> int:
        """Maximum number of tokens in a draft."""
        return self.limits.longest

    @property
    def has_states(self) -> bool:
        """Whether verification may start from states."""
        return bool(self.prefix) and self.steps >= self.reuse_from


@dataclass
class _Round:
    """A round whose draft is timed.

    Attributes:
        forms: times of both forms of such drafts.
        at_once: whether its draft is made in one graph.
        begun: when the round began.
        graphs: how many graphs had run before, and for how long.
        size: number of drafted tokens of a row.
    """

    forms: Forms
    at_once: bool
    begun: float
    graphs: tuple[int, float]
    size: int = 0


class WholeDrafts:
    """Makes drafts of one generation in one graph each, where that is faster than step by step.

    Args:
        fixed: runs the forwards of the generation.
        scorer: logits processors and the decoding mode.
    """

    def __init__(self, fixed: FixedShapes, scorer: Scorer) -> None:
        self._fixed = fixed
        self._target = fixed.target
        self._scorer = scorer
        self._processors = scorer.constants
        self._forms: dict[Hashable, Forms] = fixed.whole_drafts.beside.setdefault(_FORMS, {})
        self._round: _Round | None = None

    def propose(self, text: Text, max_new: list[int], wanted: Wanted) -> Draft | None:
        """The draft that steps would make, ``None`` where steps should make it.

        Args:
            text: the batch.
            max_new: for each row the maximum number of tokens.
            wanted: how the draft is made.
        """
        self._round = None
        rule = self._traced(wanted)
        if rule is None or not any(max_new):
            return None
        wanted.rule.begin()
        key = (
            wanted.plan,
            wanted.prefix if wanted.has_states else 0,
            rule.reach,
            self._scorer.do_sample,
            self._processors,
        )
        forms = self._forms_of((*key, wanted.steps, self._target.cache.capacity), text)
        at_once = forms.at_once()
        self._round = _Round(forms, at_once, self._now(), (self._fixed.runs, self._fixed.run_seconds))
        if not at_once:
            return None
        draft = self._draft(text, max_new, wanted, rule, key, forms.vocabulary)
        if draft is None:
            self._round = None  # the round would take the time of both forms
        return draft

    def proposed(self, draft: Draft, steps: int) -> None:
        """Notes the draft of a round and, if it was not made in one graph, its number of steps."""
        current = self._round
        if current is None:
            return
        current.size = draft.size
        if current.at_once:
            return
        runs, run_seconds = current.graphs
        if not steps or self._fixed.runs - runs < steps:
            self._round = None  # some of its forwards have no graph yet
            return
        drafting = self._now() - current.begun
        current.forms.add_steps(drafting - (self._fixed.run_seconds - run_seconds), drafting)
        if draft.q is not None:
            current.forms.vocabulary = draft.q.shape[-1]

    def update(self, tokens: int) -> None:
        """Ends a round, in which all rows together gained ``tokens`` tokens."""
        if self._round is not None:
            seconds = self._now() - self._round.begun
            self._round.forms.add(self._round.at_once, self._round.size, tokens, seconds)
            self._round = None

    def _now(self) -> float:
        return perf_counter() - self._target.compile_seconds

    def _traced(self, wanted: Wanted) -> TracedRule | None:
        """The stop rule for a graph, ``None`` where such drafts cannot be one graph."""
        is_line = wanted.limits.tree is None and 0 < wanted.steps <= SIZES[-1]
        if not is_line or self._processors is None or self._fixed.whole_drafts.refused:
            return None
        return wanted.rule.traced() if isinstance(wanted.rule, TraceableRule) else None

    def _forms_of(self, key: Hashable, text: Text) -> Forms:
        """The times of both forms of such drafts, for this batch size."""
        device, rows = text.ids.device, text.batch_size
        name = (key, device, rows)
        if name not in self._forms:
            self._forms[name] = Forms(device.type == "cpu", rows)
        return self._forms[name]

    def _draft(
        self, text: Text, max_new: list[int], wanted: Wanted, rule: TracedRule, key: Hashable, vocabulary: int
    ) -> Draft | None:
        """The draft, ``None`` where there is no graph of it (yet)."""
        device, steps, roots = text.ids.device, wanted.steps, text.last_slots()
        numbers = None
        if self._scorer.do_sample:
            numbers = _Numbers(min(steps, max(max_new)), (text.batch_size, vocabulary), device)
        further = [] if numbers is None else [numbers.filled(steps)]

        def function(forward: OneForward, tokens: torch.Tensor, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return self._steps(forward, tokens, given, wanted, rule)

        found = self._fixed.several(function, key, steps + wanted.has_states, text.last_tokens(), roots, further)
        if found is None:
            return None
        tokens, reached = found.pop(0), found.pop(0)
        most, listed = [min(steps, count) for count in max_new], None
        if wanted.length_is_fixed and device.type not in _READ_AT_ONCE:
            lengths, are_numbers = most, False  # as far as is known here; the full model rejects junk
        else:
            listed, values = read(tokens, reached)
            columns = zip(zip(*values, strict=True), zip(*listed, strict=True), strict=True)
            judged = [rule.judge(of, chosen, wanted.limits.eos_tokens) for of, chosen in columns]
            lengths = [_length(count, row, judged) for row, count in enumerate(most)]
            are_numbers = all(all(step.counts) for step in judged)
        t = max(lengths)
        if not are_numbers and t < steps:
            # NaN in a slot would reach even forwards whose mask hides it.
            self._target.cache.clear(roots.ahead(t + 1), steps - t)
        if numbers is not None:
            numbers.keep(t)
        if not t:
            return Draft.none(text)
        is_reused = wanted.has_states and t >= wanted.reuse_from
        return Draft(
            tokens=tokens[:, :t],
            lengths=lengths,
            q=found.pop(0)[:, :t] if self._scorer.do_sample else None,
            states=found.pop(0)[:, : t + 1] if is_reused else None,
            prefix=wanted.prefix if is_reused else 0,
            listed=None if listed is None else [row[:t] for row in listed],
        )

    def _steps(
        self,
        forward: OneForward,
        feed: torch.Tensor,
        given: Sequence[torch.Tensor],
        wanted: Wanted,
        rule: TracedRule,
    ) -> list[torch.Tensor]:
        """Runs all steps with tensor operations alone.

        Args:
            forward: runs one step.
            feed: ``[b, 1]`` the last token of each row.
            given: random numbers ``[t, b, v]`` for sampling, if there are any.
            wanted: how drafts are made.
            rule: their stop rule.

        Returns:
            Tokens and the rule's values, ``[b, t]`` each; ``[b, t, v]`` the distributions that tokens were sampled
            from; ``[b, t + 1, d]`` states. The last two only if they are needed.
        """
        tokens, values, qs, states = [], list[torch.Tensor](), [], []
        for depth in range(wanted.steps):
            run = ForwardPass(wanted.plan, capture=wanted.prefix if wanted.has_states else -1)
            output = forward(feed, depth, run, True)
            assert output is not None
            logits = output[:, -1].float()
            scores = self._scorer.everywhere(logits)
            if self._scorer.do_sample:
                qs.append(scores.softmax(-1))
                feed = draw_by(qs[-1], given[0][depth])[:, None]
            else:
                feed = scores.argmax(-1, keepdim=True)
            tokens.append(feed)
            values.append(rule.values(values[-1] if values else None, logits))
            states.append(run.captured)
        found = [torch.cat(tokens, dim=1), torch.stack(values, dim=1)]
        if qs:
            found.append(torch.stack(qs, dim=1))
        if wanted.has_states:
            # The last token goes through the exact prefix, too, so that verification starts after it for all tokens.
            run = ForwardPass(self._target.full_plan, stop=wanted.prefix, capture=wanted.prefix)
            forward(feed, wanted.steps, run, False)
            found.append(torch.cat([state for state in (*states, run.captured) if state is not None], dim=1))
        return found


class _Numbers:
    """Random numbers for sampling, the same ones that steps would take from a device's generator.

    How many of them steps would take is known only after the draft. A copy of the generator produces them, so that the
    device's own never has to be set back: other threads use it, too.

    Args:
        count: number of steps.
        shape: ``[b, v]``, the numbers of one step.
        device: where they are needed.
    """

    def __init__(self, count: int, shape: tuple[int, int], device: torch.device) -> None:
        self._shape, self._device = shape, device
        ahead = torch.Generator(device)
        ahead.set_state(_generator_state(device))
        self._drawn = [self._empty().exponential_(generator=ahead) for _ in range(count)]

    def filled(self, count: int) -> torch.Tensor:
        """The numbers ``[count, b, v]``; those of steps that are not needed are 1."""
        ones = [torch.ones(self._shape, device=self._device, dtype=torch.float32)] * (count - len(self._drawn))
        return torch.stack([*self._drawn, *ones])

    def keep(self, count: int) -> None:
        """Advances the device's generator by the numbers of ``count`` steps."""
        unused = self._empty()
        for _ in range(count):
            unused.exponential_()

    def _empty(self) -> torch.Tensor:
        return torch.empty(self._shape, device=self._device, dtype=torch.float32)


def _generator_state(device: torch.device) -> torch.Tensor:
    """The state of a device's generator, which is kept on the host."""
    if device.type == "cpu":
        return torch.get_rng_state()
    which = () if device.type == "mps" else (device,)  # Apple has one GPU
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*which)
    return state


def _length(most: int, row: int, judged: Sequence[Judged]) -> int:
    """How many of a row's tokens are its draft, at most ``most``."""
    for depth, step in enumerate(judged[:most]):
        if not step.counts[row]:
            return depth
        if step.ends[row]:
            return depth + 1
    return most
