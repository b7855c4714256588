"""Scores and logits of a generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig


@dataclass
class Record:
    """Scores and logits, where ``generate`` has to return them.

    Attributes:
        scores: for each row and token the scores ``[v]``; ``None`` if not requested.
        steps: for each token the scores ``[b, v]`` of all rows, in place of ``scores`` where rows advance together.
        logits: for each row and token the logits ``[v]``; ``None`` if not requested.
    """

    scores: list[list[torch.Tensor]] | None
    steps: list[torch.Tensor] | None
    logits: list[list[torch.Tensor]] | None

    @classmethod
    def of(cls, config: GenerationConfig, batch_size: int, in_step: bool) -> Record:
        """An empty record of what ``config`` requests; ``in_step`` where rows advance together."""
        returned = config.return_dict_in_generate
        scores = returned and config.output_scores
        return cls(
            scores=[[] for _ in range(batch_size)] if scores and not in_step else None,
            steps=[] if scores and in_step else None,
            logits=[[] for _ in range(batch_size)] if returned and config.output_logits else None,
        )


def by_step(rows: list[list[torch.Tensor]] | None, steps: int) -> tuple[torch.Tensor, ...] | None:
    """For each step one tensor ``[b, ...]`` of what the rows have for their tokens; zeros after a row's end."""
    if rows is None:
        return None
    empty = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else empty for row in rows]) for step in range(steps))
