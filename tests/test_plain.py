"""Calls that are left to transformers' own loop: what is counted of them."""

from __future__ import annotations

import pytest
import torch

from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import SelfSpec


class RowsEnd:
    """Ends the rows after 3 and 7 tokens."""

    def __init__(self, width: int) -> None:
        self.ends = torch.tensor([width + 3, width + 7])

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


@pytest.mark.filterwarnings("ignore:the prompts are padded on the right:UserWarning")
@pytest.mark.filterwarnings("ignore:A decoder-only architecture is being used:UserWarning")
def test_padding_behind_the_end_of_a_row_is_not_counted() -> None:
    """With an end-of-text token rows that have ended otherwise are padded."""
    inputs = {name: value.flip(1) for name, value in ragged_batch((4, 9)).items()}
    spec, model = SelfSpec(), tiny_llama()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96, "pad_token_id": 0}
    ids = model.generate(**inputs, **options, stopping_criteria=[RowsEnd(9)], assistant=spec)
    assert ids[0, 12:].tolist() == [0] * 4
    assert spec.stats is not None
    assert spec.stats.left_to_generate == "its prompts are padded on the right"
    assert spec.stats.tokens == 3 + 7
    assert [len(row) for row in spec.stats.from_draft] == [3, 7]
