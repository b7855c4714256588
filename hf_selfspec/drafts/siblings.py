"""How many siblings a drafted token gets."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from ..errors import SettingError, SettingTypeError
from ..learned.saving import register
from ..model.transfer import read
from ..validation import MOST_CANDIDATES, check_count


@register("tree")
@dataclass(frozen=True)
class TopKTree:
    """Top-k siblings at each depth; only the first token is extended (SWIFT §4.2).

    The more confident the draft, the fewer siblings. With sampling, the siblings are drawn without replacement.

    Args:
        widths: ``(confidence, k)`` pairs in order of increasing confidence: a token whose top-1 probability is at most
            ``confidence`` gets ``k`` candidates in all, 256 at most. The last confidence must be 1. The default is the
            paper's.
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
        rising = all(low < high for low, high in pairwise((0.0, *edges)))  # false for NaN
        if not edges or not rising or edges[-1] != 1.0:
            raise SettingError(
                f"TopKTree(widths) needs confidences that rise from above 0 to 1, got {edges!r}. {example}"
            )
        for _, width in self.widths:
            check_count("TopKTree(widths): k", width, most=MOST_CANDIDATES)

    @property
    def most(self) -> int:
        """The most candidates at one depth."""
        return max(width for _, width in self.widths)

    def width(self, top: torch.Tensor) -> int:
        """Returns the number of candidates at one depth, the most that any row needs.

        Args:
            top: ``[b]`` the draft's highest probability.
        """
        lowest = read(top.min())[0]
        # The last width also where the draft's probabilities are no numbers.
        return next((width for edge, width in self.widths if lowest <= edge + 1e-6), self.widths[-1][1])


Tree = TopKTree
