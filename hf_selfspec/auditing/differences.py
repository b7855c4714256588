"""Where two greedy texts of one model diverge, and whether rounding explains it."""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..errors import SettingError

# Rounding errors add up over the layers; eight units in the last place of the largest logit bound the observed ones.
_UNITS = 8


@dataclass(frozen=True)
class Difference:
    """The first position at which one row of two texts differs.

    Attributes:
        row, column: where; in an :class:`Audit` the index of the prompt, and that of the generated token.
        expected, token: the two tokens; negative where a text has ended.
        margin: how far the lower one's logit is below the full model's highest; infinite where a token is forbidden, or
            where one text has ended.
        tolerance: the largest margin that rounding can explain, given the dtype and the size of the logits.
        texts: the two tokens as text, in an :class:`Audit`; ``None`` where a text has ended.
    """

    row: int
    column: int
    expected: int
    token: int
    margin: float
    tolerance: float
    texts: tuple[str | None, str | None] = (None, None)

    @property
    def is_near_tie(self) -> bool:
        """Whether kernels that round differently may choose either token."""
        return self.margin <= self.tolerance


@torch.no_grad()
def first_differences(
    model: PreTrainedModel, expected: torch.Tensor, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> list[Difference]:
    """Compares two greedy texts row by row and looks at the full model's logits where they diverge.

    In bfloat16 and float16 a forward over one token and one over several round differently, so texts may diverge where
    the highest logits, of two tokens or more, are almost equal, and only there.

    Args:
        model: the model that generated both, without logits processors.
        expected: ``[b, s]`` ids of plain ``generate``, prompt included.
        tokens: ``[b, s']`` ids to compare.
        attention_mask: ``[b, p]`` of the prompts where they are padded on the left.

    Returns:
        One :class:`Difference` for each row that differs; empty if none does.

    Raises:
        SettingError: the batch sizes differ, or one text is a prefix of the other.
    """
    if expected.shape[0] != tokens.shape[0]:
        raise SettingError(
            f"first_differences compares row by row, got {expected.shape[0]} and {tokens.shape[0]} rows. Pass the "
            "results of two calls with the same prompts."
        )
    found = []
    width = min(expected.shape[1], tokens.shape[1])
    for row in range(expected.shape[0]):
        different = (expected[row, :width] != tokens[row, :width]).nonzero()
        if not len(different):
            if expected.shape[1] != tokens.shape[1]:
                raise SettingError(
                    f"row {row} is the same in both texts for {width} columns, but they have {expected.shape[1]} and "
                    f"{tokens.shape[1]}. Pass the results of two calls with the same max_new_tokens."
                )
            continue
        column = int(different[0])
        start = 0 if attention_mask is None else int(attention_mask[row].argmax())
        logits = model(expected[row : row + 1, start:column]).logits[0, -1]
        pair = int(expected[row, column]), int(tokens[row, column])
        found.append(difference_at(row, column, *pair, logits, model.dtype))
    return found


def difference_at(
    row: int, column: int, expected: int, token: int, scores: torch.Tensor, dtype: torch.dtype
) -> Difference:
    """The difference between two tokens, chosen from ``scores`` ``[v]`` of a model of this dtype."""
    scores = scores.float()
    lower = -math.inf if min(expected, token) < 0 else float(scores[[expected, token]].min())
    largest = float(scores[scores.isfinite()].abs().max())  # processors forbid tokens with infinite scores
    tolerance = _UNITS * torch.finfo(dtype).eps * largest
    return Difference(row, column, expected, token, float(scores.max()) - lower, tolerance)
