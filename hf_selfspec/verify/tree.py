"""How many siblings a drafted token gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import SettingError, SettingTypeError
from ..settings import check_count


@dataclass(frozen=True)
class TopKTree:
    """Top-k siblings at each depth; only the first token is extended (SWIFT §4.2).

    The surer the draft, the fewer siblings. With sampling the siblings are drawn without replacement.

    Args:
        widths: ``(confidence, k)`` pairs with rising confidence: a token whose top-1 probability is at most
            ``confidence`` gets ``k`` candidates in all. The last confidence must be 1. The default is the paper's.
    """

    widths: tuple[tuple[float, int], ...] = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))

    def __post_init__(self) -> None:
        example = "Example: ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))."
        if not isinstance(self.widths, tuple) or not all(isinstance(w, tuple) and len(w) == 2 for w in self.widths):
            raise SettingError(
                f"TopKTree(widths) must be a tuple of (confidence, k) pairs, got {self.widths!r}. {example}"
            )
        for edge, _ in self.widths:
            if isinstance(edge, bool) or not isinstance(edge, (int, float)):
                raise SettingTypeError(f"TopKTree(widths): a confidence must be a number, got {edge!r}. {example}")
        edges = [edge for edge, _ in self.widths]
        if not edges or edges != sorted(set(edges)) or not edges[0] > 0.0 or edges[-1] != 1.0:
            raise SettingError(
                f"TopKTree(widths) needs confidences that rise from above 0 to 1, got {edges!r}. {example}"
            )
        for _, width in self.widths:
            check_count("TopKTree(widths): k", width)

    def width(self, confidence: torch.Tensor) -> int:
        """Candidates at one depth for confidences ``[b]``: the most that any row asks for."""
        lowest = float(confidence.min())
        return next(width for edge, width in self.widths if lowest <= edge + 1e-6)
