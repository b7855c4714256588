"""Grammars of a user: automata that can go back, one for each row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor

import hf_selfspec


@dataclass
class Automaton:
    """Allows tokens by a table of states; each token leads on."""

    table: list[list[int]]
    states: list[int] = field(default_factory=lambda: [0])

    def mask(self, vocabulary: int) -> torch.Tensor:
        found = torch.zeros(vocabulary, dtype=torch.bool)
        found[self.table[self.states[-1]]] = True
        return found

    def advance(self, token: int) -> None:
        assert token in self.table[self.states[-1]], "nothing forbidden may be taken in"
        self.states.append((3 * self.states[-1] + token) % len(self.table))

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self.states)
        del self.states[-count:]


class Expecting(Automaton):
    """Expects the first token where there are few."""

    def expected(self) -> int | None:
        allowed = self.table[self.states[-1]]
        return allowed[0] if len(allowed) < 4 else None


class Ending(Automaton):
    """Nothing may be asked after token 7."""

    def advance(self, token: int) -> None:
        super().advance(token)
        self.states[-1] = len(self.table) if token == 7 else self.states[-1]


class Own(LogitsProcessor):
    """A processor of a user, with an automaton for each row."""

    def __init__(self, table: list[list[int]], kind: type[Automaton] = Automaton) -> None:
        self.table, self.kind, self.rows, self.calls = table, kind, [], 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not self.rows:
            self.rows = [self.kind(self.table) for _ in scores]
        else:
            for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
                row.advance(token)
        allowed = torch.stack([row.mask(scores.shape[1]) for row in self.rows])
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


hf_selfspec.register_grammar(Own, lambda processor, input_ids: processor.rows)
