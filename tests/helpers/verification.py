"""Exact marginals of what a verification chooses, and uniform numbers that are given."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch

from hf_selfspec.verify.sampling import choose_sampled

ALMOST_ONE = 1 - 2**-30


def fix_uniform(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The next calls of ``torch.rand`` return these."""
    script = iter(values)
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.tensor(next(script), dtype=torch.float64))


def orders(q: torch.Tensor, count: int) -> Iterator[tuple[list[int], float]]:
    """Every sequence of ``count`` distinct tokens, with the probability of drawing it from ``q`` one after another."""
    for drawn in permutations(range(len(q)), count):
        probability, left = 1.0, 1.0
        for token in drawn:
            probability *= float(q[token]) / left if probability else 0.0
            left -= float(q[token])
        if probability > 0.0:
            yield list(drawn), probability


def exact_marginal(
    p: torch.Tensor, q: torch.Tensor | None, drafts: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Distribution of ``choose_sampled``'s token, by bisecting for the uniform numbers up to which it accepts."""
    last_draw = []

    def draw(residual: torch.Tensor, count: int) -> torch.Tensor:
        last_draw[:] = [residual]
        return torch.zeros(1, dtype=torch.long)

    def accepted(drafted: list[int], *uniform: float) -> int | None:
        fix_uniform(monkeypatch, *uniform, *[ALMOST_ONE] * len(drafted))
        return choose_sampled(p.log(), drafted, q, len(drafted))[1]

    monkeypatch.setattr(torch, "multinomial", draw)
    marginal = torch.zeros(len(p))
    for drafted, reached in drafts:
        # Named ones are among what is drawn at the end.
        for index, token in enumerate(drafted if q is not None else []):
            rejections = [ALMOST_ONE] * index
            low, high = 0.0, 1.0
            while high - low > 1e-8:
                middle = (low + high) / 2
                low, high = (middle, high) if accepted(drafted, *rejections, middle) == index else (low, middle)
            marginal[token] += reached * high
            reached *= 1.0 - high
        accepted(drafted)
        if reached > 1e-6:
            marginal += reached * last_draw[0]
    return marginal
