"""What drafts have in common that look for a better one along the text: trials and timed forwards, within a budget."""

from collections import deque
from dataclasses import replace

import torch

from ...batch import Text, Verdict
from ...model.head import HeadRows
from ...model.plan import LayerPlan
from ...search.forward_costs import Budget, Stopwatch
from ...search.replay import Trace, rules_for, trace
from ..layers.partial import PartialDraft
from ..source import Session
from ..stop.rules import StopRule, confidence


class LookingDraft(PartialDraft):
    """A draft that chooses its blocks, and a stop rule where the session has none, by looking at the text; subclasses
    set the budget and the timings."""

    _budget: Budget
    _timings: Stopwatch

    def __init__(
        self, session: Session, usual_stop: StopRule, plan: LayerPlan, window: int, head: HeadRows | None = None
    ) -> None:
        super().__init__(session.with_usual_stop(usual_stop), plan, head)
        self._stop, self._rules = session.stop, rules_for(session.stop, session.max_draft)
        self._round_seconds = session.round_seconds
        self.reads_logits = self.scorer.do_sample
        self._last_logits = LastLogits(window if self.reads_logits else 0)

    def _has_time(self, tokens: int) -> bool:
        return self._timings.expected(tokens) <= self._budget.left

    def _trace(self, logits: torch.Tensor | None, following: torch.Tensor) -> Trace:
        """What logits ``[b, n, v]`` of a draft are worth where the text goes on with these tokens ``[b, n]``."""
        assert logits is not None
        logits = logits.to(following.device, torch.float32)
        drafted, sure = self.scorer.roughly(logits), confidence(logits)
        if not self.scorer.do_sample:
            return Trace.of(drafted.argmax(-1) == following, sure)
        return trace(drafted, self.scorer.roughly(self._last_logits.of(drafted)), sure, do_sample=True)

    def measure(self, text: Text, repeats: int) -> bool:
        """Times forwards at the end of the text as far as there is time; the text in the cache stays as it is."""
        device, steps, usual = text.ids.device, self.steps, (self.plan, self.session)
        self.plan, self.session = self._timings.early, replace(self.session, tree=None)
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            complete = self._timings.measure(
                self.target, text, repeats, lambda: self._in_steps(text, [1] * text.batch_size), self._has_time
            )
        self.steps, self._drafted, (self.plan, self.session) = steps, [], usual
        return complete


class LastLogits:
    """The full model's logits for the last ``window`` tokens of each row, which tell what sampled text does not: what
    else the model might have chosen. Greedy text needs none of them, and ``window`` is 0."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._rows: list[deque[torch.Tensor]] = []
        self._lengths: list[int] = []

    def add(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Adds the last verification's logits ``[b, nodes, v]``, after its tokens were added to the text."""
        if not self._window:
            return
        if not self._rows:
            self._rows = [deque(maxlen=self._window) for _ in verdicts]
            self._lengths = lengths_before(text, verdicts)
        for row, verdict in enumerate(verdicts):
            # Where all rows advance by the shortest acceptance, a verdict's first tokens are kept.
            for source in verdict.sources[: text.lengths[row] - self._lengths[row]]:
                self._rows[row].append(logits[row, source].clone())
        self._lengths = list(text.lengths)

    def forget(self) -> None:
        """Starts over, since some tokens' logits are missing."""
        self._rows = []

    def counts(self, most: list[int]) -> list[int]:
        """For each row, of its ``most`` last tokens, how many have what it takes to judge a draft of them."""
        return list(map(min, most, map(len, self._rows))) if self._window else most

    def of(self, like: torch.Tensor) -> torch.Tensor:
        """The logits ``[b, n, v]``, with the shape of ``like``; unknown ones, at the left, are zero."""
        logits = torch.zeros_like(like)
        for row, of_row in enumerate(self._rows):
            if of_row:
                last = torch.stack(list(of_row)[-like.shape[1] :])
                logits[row, -len(last) :] = last
        return logits


def lengths_before(text: Text, verdicts: list[Verdict]) -> list[int]:
    """The lengths of the rows before the tokens of these verdicts."""
    return [length - len(verdict.tokens) for length, verdict in zip(text.lengths, verdicts, strict=True)]
