"""Exact distributions of what a verification chooses, and uniform numbers that are given."""

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch

from hf_selfspec.generate import acceptance
from hf_selfspec.generate.acceptance import choose_sampled

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


def outcomes(
    p: torch.Tensor, drafted: list[int], q: torch.Tensor, num_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The distribution of ``choose_sampled``'s token given its candidates, by bisecting its uniform numbers."""
    residuals: list[torch.Tensor] = []

    def draw(residual: torch.Tensor) -> torch.Tensor:
        residuals.append(residual)
        return torch.zeros((), dtype=torch.long)

    def accepted(*uniform: float) -> int | None:
        fix_uniform(monkeypatch, *uniform, *[ALMOST_ONE] * len(drafted))
        return choose_sampled(p.log(), drafted, q, num_drawn)[1]

    monkeypatch.setattr(acceptance, "draw", draw)
    found, reached = torch.zeros(len(p)), 1.0
    # What is left is drawn, and may be one of the named ones.
    for index, token in enumerate(drafted[:num_drawn]):
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if accepted(*[ALMOST_ONE] * index, middle) == index else (low, middle)
        found[token] += reached * high
        reached *= 1.0 - high
    residuals.clear()
    accepted()
    return found + reached * residuals[0] if residuals and reached > 1e-6 else found
