"""Logits of the full model that are kept for later looks at the text."""

from __future__ import annotations

from collections import deque

import torch

from ..batch import Text, Verdict


class LastLogits:
    """The full model's logits for the last tokens of each row, which sampled tokens alone do not reveal."""

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
        """For each row how many tokens' logits are known."""
        return [len(row) for row in self._rows]

    def of(self, like: torch.Tensor) -> torch.Tensor:
        """The logits ``[b, n, v]``, with the shape of ``like``; unknown ones, at the left, are zero."""
        found = torch.zeros_like(like)
        for row, known in enumerate(self._rows):
            if known:
                last = torch.stack(list(known)[-like.shape[1] :])
                found[row, -len(last) :] = last
        return found
