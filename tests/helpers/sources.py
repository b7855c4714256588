"""A draft source and a stop rule as users write them, with findings of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import hf_selfspec
from hf_selfspec import FixedLength, GenerationStats
from hf_selfspec.batch import Draft, Text, Verdict
from hf_selfspec.drafts import Drafter, DraftSource, Session
from hf_selfspec.drafts.stop import start
from hf_selfspec.learned.knowledge import Findings


@dataclass
class Table(Findings):
    """What the model predicted after each token the last time that it stood there."""

    logits: dict[int, list[float]] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        return {"logits": [[token, *values] for token, values in self.logits.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        self.logits = {int(token): [float(value) for value in values] for token, *values in state["logits"]}


@hf_selfspec.register
@dataclass(frozen=True)
class Recalled(DraftSource):
    """Draws each token from what the model predicted after the token before it, the last time."""

    flatness: float = 1.0

    def start(self, session: Session) -> Drafter:
        return Recalling(self, session)


class Recalling(Drafter):
    def __init__(self, settings: Recalled, session: Session) -> None:
        self.flatness, self.scorer, self.vocabulary = settings.flatness, session.scorer, session.vocabulary
        self.session = session.with_usual_stop(FixedLength(3))
        self.table = session.knowledge.of("recalled", lambda other: Table() if other is None else Table(other.logits))
        self.rule = start(self.session.stop, session.num_rows, self.session.longest, self.session.memory)
        self._drafted: list[int] = []

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        lengths = [0] * text.batch_size
        tokens, qs = [], []
        last = text.last_tokens()[:, 0]
        self.rule.begin()
        for depth in range(min(self.session.longest, max(max_new))):
            rows = [self.table.logits.get(int(token)) for token in last]
            drafting = [
                length == depth and depth < most and known is not None
                for length, most, known in zip(lengths, max_new, rows, strict=True)
            ]
            if not any(drafting):
                break
            logits = torch.tensor([known or [0.0] * self.vocabulary for known in rows]) / self.flatness
            scores = self.scorer.ahead(text, depth, logits, drafting)
            if self.scorer.do_sample:
                qs.append(scores.softmax(-1))
                last = torch.multinomial(qs[-1], 1)[:, 0]
            else:
                last = scores.argmax(-1)
            text.write_draft(last, depth)
            tokens.append(last)
            lengths = [length + on for length, on in zip(lengths, drafting, strict=True)]
            self.steps += 1
            ends = self.rule(text.with_draft(depth + 1), logits, logits).tolist()
            if all(end for end, on in zip(ends, drafting, strict=True) if on):
                break
        self._drafted = lengths
        if not tokens:
            return Draft.none(text)
        return Draft(torch.stack(tokens, 1), lengths, q=torch.stack(qs, 1) if qs else None)

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        if any(self._drafted):
            self.rule.update(self._drafted, [sum(node > 0 for node in verdict.nodes) for verdict in verdicts])
        self.observe(text, verdicts, logits)

    def observe(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        """After a round of its own, and in a cascade after others'."""
        for row, verdict in enumerate(verdicts):
            kept = len(verdict.tokens)
            before = text.ids[row, text.lengths[row] - kept - 1 : text.lengths[row] - 1].tolist()
            for token, source in zip(before, verdict.sources, strict=True):
                self.table.logits[token] = logits[row, source].tolist()

    def report(self, stats: GenerationStats) -> None:
        stats.plan = f"{len(self.table.logits)} tokens recalled"


@hf_selfspec.register
@dataclass(frozen=True)
class Alternating:
    """Ends drafts after tokens whose id is a multiple of ``divisor``."""

    divisor: int = 2

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return input_ids[:, -1] % self.divisor == 0
