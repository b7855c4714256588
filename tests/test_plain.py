"""Calls that are left to transformers' own loop: their ids, and what is counted of them."""

import pytest
import torch

from helpers.architectures import build
from helpers.models import ragged_batch
from hf_selfspec import SelfSpec


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.filterwarnings("ignore:A decoder-only architecture is being used:UserWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_right_padding(name: str) -> None:
    """Plain generate goes on from the padding; the padding after the end of a row is not counted."""
    inputs, model, spec = ragged_batch(), build(name), SelfSpec()
    inputs = {key: torch.cat([value[:1], value[1:].flip(1)]) for key, value in inputs.items()}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96, "pad_token_id": 0}
    ends = torch.tensor([9 + 3, 9 + 7, 9 + 9])
    options["stopping_criteria"] = [lambda input_ids, scores, **kwargs: input_ids.shape[1] >= ends]
    plain = model.generate(**inputs, **options)
    with pytest.warns(UserWarning, match=r"padded on the right.*='left'"):
        ids = model.generate(**inputs, **options, assistant=spec)
    assert torch.equal(ids, plain)
    assert ids[0, 12:].tolist() == [0] * 6
    stats = spec.stats
    assert stats.left_to_generate == "its prompts are padded on the right"
    assert (stats.tokens, stats.drafted, stats.drafts) == (3 + 7 + 9, 0, False)
    assert [len(row) for row in stats.from_draft] == [3, 7, 9]
