"""What drafts share that look at the text for a better one: trials along it and timed forwards, within a budget."""

from collections import deque
from dataclasses import replace

import torch

from ..batch import Text, Verdict
from ..model.head import HeadRows
from ..model.plan import LayerPlan
from ..search.forward_costs import Budget, Stopwatch
from ..search.replay import Trace, trace
from ..stop.rules import confidence
from .partial import PartialDraft
from .source import Session


class LookingDraft(PartialDraft):
    """A draft that chooses its blocks by looking at the text; subclasses set the budget and the timings."""

    _budget: Budget
    _timings: Stopwatch

    def __init__(self, session: Session, plan: LayerPlan, window: int, head: HeadRows | None = None) -> None:
        super().__init__(session, plan, head)
        # Greedy text shows what the model would have chosen; sampled text does not.
        self._last_logits = LastLogits(window) if self.scorer.do_sample else None
        self.reads_logits = self.scorer.do_sample

    def _has_time(self, tokens: int) -> bool:
        return self._timings.expected(tokens) <= self._budget.left

    def _known(self, counts: list[int]) -> list[int]:
        """For each row how many of its last ``counts`` tokens' continuations are known, as far as that needs logits."""
        return counts if self._last_logits is None else list(map(min, counts, self._last_logits.counts()))

    def _trace(self, logits: torch.Tensor | None, following: torch.Tensor) -> Trace:
        """What logits ``[b, n, v]`` of a draft are worth where the text goes on with these tokens ``[b, n]``."""
        assert logits is not None
        logits = logits.to(following.device, torch.float32)
        drafted, sure = self.scorer.roughly(logits), confidence(logits)
        if self._last_logits is None:
            return Trace.of(drafted.argmax(-1) == following, sure)
        return trace(drafted, self.scorer.roughly(self._last_logits.of(drafted)), sure, do_sample=True)

    def measure(self, text: Text, repeats: int) -> bool:
        """Times forwards at the end of the text as far as there is time; the text in the cache stays as it is."""
        device, steps, usual = text.ids.device, self.steps, (self.plan, self.limits)
        self.plan, self.limits = self._timings.early, replace(self.limits, tree=None)
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            complete = self._timings.measure(
                self.target, text, repeats, lambda: self._in_steps(text, [1] * text.batch_size), self._has_time
            )
        self.steps, self._drafted, (self.plan, self.limits) = steps, [], usual
        return complete


class LastLogits:
    """The full model's logits for the last ``window`` tokens of each row."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._rows: list[deque[torch.Tensor]] = []
        self._lengths: list[int] = []

    def add(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """Adds the last verification's logits ``[b, nodes, v]``, after its tokens were added to the text."""
        if not self._rows:
            self._rows = [deque(maxlen=self._window) for _ in verdicts]
            self._lengths = [length - len(v.tokens) for length, v in zip(text.lengths, verdicts, strict=True)]
        for row, verdict in enumerate(verdicts):
            # Where all rows advance by the shortest acceptance, a verdict's first tokens are kept.
            for source in verdict.sources[: text.lengths[row] - self._lengths[row]]:
                self._rows[row].append(logits[row, source].clone())
        self._lengths = list(text.lengths)

    def forget(self) -> None:
        """Starts over, since some tokens' logits are missing."""
        self._rows = []

    def counts(self) -> list[int]:
        return [len(row) for row in self._rows]

    def of(self, like: torch.Tensor) -> torch.Tensor:
        """The logits ``[b, n, v]``, with the shape of ``like``; unknown ones, at the left, are zero."""
        found = torch.zeros_like(like)
        for row, known in enumerate(self._rows):
            if known:
                last = torch.stack(list(known)[-like.shape[1] :])
                found[row, -len(last) :] = last
        return found
