"""Where two greedy texts of one model diverge, and whether rounding explains it."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from ..errors import SettingError
from ..model.prompt import cache_name

# Noise is measured over the likeliest tokens, since smaller logits have finer steps, with the text's last tokens going
# through the model one at a time: after fewer than 16 it is smaller than in whole texts of plain ``generate``.
_LIKELIEST, _STEPS = 64, 32
# Of 2,183 positions of bfloat16 texts (the demo model, SmolLM2-135M) the gap of the two likeliest tokens changed by
# more than this many times the noise in 9 when five tokens went through together; 5 % and 17 % of gaps are smaller.
_NOISES = 6


@dataclass(frozen=True)
class Difference:
    """The first position at which one row of two texts differs.

    Attributes:
        row, column: where; in an :class:`Audit` the index of the prompt, and that of the generated token.
        expected, token: the two tokens; negative where a text has ended.
        margin: how far the lower one's logit is below the full model's highest; infinite where a token is forbidden, or
            where one text has ended.
        tolerance: the largest margin that rounding can explain: six times the noise that was measured there, between
            the logits of tokens that go through the model one at a time and together, or one step of their dtype.
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
    differences = []
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
        pair = int(expected[row, column]), int(tokens[row, column])
        differences.append(difference_at(row, column, *pair, model, expected[row : row + 1, start:column]))
    return differences


@torch.no_grad()
def difference_at(
    row: int,
    column: int,
    expected: int,
    token: int,
    model: PreTrainedModel,
    text: torch.Tensor,
    scores: torch.Tensor | None = None,
) -> Difference:
    """The difference between two tokens that a model chose after ``text`` ``[1, s]``, from ``scores`` ``[v]`` or from
    its logits."""
    stepwise, together = _last_logits(model, text, _STEPS), _last_logits(model, text, 0)
    likeliest = stepwise.topk(min(_LIKELIEST, len(stepwise))).indices
    # What all logits have in common chooses no other token.
    noise = float((together.float() - stepwise.float())[likeliest].std(correction=0))
    step = torch.finfo(stepwise.dtype).eps * 2.0 ** (math.frexp(float(stepwise.max()))[1] - 1)
    scores = (stepwise if scores is None else scores).float()
    lower = -math.inf if min(expected, token) < 0 else float(scores[[expected, token]].min())
    return Difference(row, column, expected, token, float(scores.max()) - lower, max(_NOISES * noise, step))


def _last_logits(model: PreTrainedModel, text: torch.Tensor, steps: int) -> torch.Tensor:
    """The logits ``[v]`` behind a text ``[1, s]`` whose last ``steps`` tokens go through the model one at a time."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    forward = partial(model, **{cache_name(model): cache, "use_cache": True})
    first = max(1, text.shape[1] - steps)  # tokens that go through together
    logits: torch.Tensor = forward(text[:, :first]).logits
    for column in range(first, text.shape[1]):
        logits = forward(text[:, column : column + 1]).logits
    return logits[0, -1]
