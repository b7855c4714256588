"""How many siblings a drafted token gets."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from ..errors import SettingError, SettingTypeError
from ..learned.saving import register
from ..model.transfer import read
from ..validation import MOST_CANDIDATES, check_count, check_share

_USUAL_PRICE = 0.05


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

    def width(self, top: torch.Tensor, reach: torch.Tensor) -> int:
        """Returns the number of candidates at one depth, the most that any row needs.

        Args:
            top: ``[b, most]`` the draft's highest probabilities, in order.
            reach: ``[b]`` the probability that all earlier tokens of the draft are accepted.
        """
        lowest = read(top[:, 0].min())[0]
        # The last width also where the draft's probabilities are no numbers.
        return next((width for edge, width in self.widths if lowest <= edge + 1e-6), self.widths[-1][1])


@register("tree")
@dataclass(frozen=True)
class CostTree:
    """As many siblings as pay, by the cost of one more token in a verification; only the first token is extended.

    A sibling brings one more token if it is reached and is what the full model predicts. That has the probability that
    the draft gives it, times the probabilities of the tokens before it. It is added if that is above its price.

    Args:
        price: the cost of one more token in a verification, in one-token steps of the whole model. ``None`` for the
            cost that a search for layers to skip has measured; 0.05 until then or without one.
        most: the most candidates at one depth, at most 256.
    """

    price: float | None = None
    most: int = 8

    def __post_init__(self) -> None:
        if self.price is not None:
            check_share("CostTree(price)", self.price, zero=True, one=True)
        check_count("CostTree(most)", self.most, most=MOST_CANDIDATES)

    def width(self, top: torch.Tensor, reach: torch.Tensor) -> int:
        """Returns the number of candidates at one depth, see :meth:`TopKTree.width`."""
        price = _USUAL_PRICE if self.price is None else self.price
        return max(1, read((top * reach[:, None] > price).sum(-1).max())[0])


Tree = TopKTree | CostTree
