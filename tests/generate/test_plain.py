"""Calls that are left to transformers' own loop: their ids, and what is counted of them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import PAST
from helpers.models import ROW, ragged_batch
from hf_selfspec import EarlyExit, SelfSpec, SettingError, attach


def test_one_new_token(llama: LlamaForCausalLM) -> None:
    """It costs what it costs in plain generate, and is refused where others are."""
    spec = SelfSpec(EarlyExit(2))
    llama.generate(**ROW, max_new_tokens=1, assistant=spec)
    assert spec.stats.left_to_generate == "it makes one new token"
    with pytest.raises(SettingError, match="99"):
        llama.generate(**ROW, max_new_tokens=1, assistant=SelfSpec(EarlyExit(99)))


@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.parametrize("is_attached", [False, True], ids=["passed", "attached"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neo", "qwen3_next"])
def test_masked_columns_behind_tokens(name: str, is_attached: bool) -> None:
    """At the end of a prompt and within it, alone or in a batch, and between the turns of a chat, whose cache stays the
    user's: plain ``generate`` goes on from the last column."""
    model, spec = build(name), SelfSpec.lookup()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assistant = {} if is_attached else {"assistant": spec}
    inputs = ragged_batch((12, 30, 30), seed=11)
    begun = model.generate(**inputs, **options, return_dict_in_generate=True)
    more = torch.arange(9).view(3, 3) + 20
    between = torch.ones(3, 12, dtype=torch.long)
    between[1, 7:] = 0
    turn = {
        "input_ids": torch.cat([begun.sequences, more], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], between, torch.ones_like(more)], 1),
    }
    ends = {name: values.flip(1) for name, values in inputs.items()}
    inputs["attention_mask"][1, -6:-3] = 0
    alone = {name: values[1:2] for name, values in inputs.items()}
    words = "padded on the right, or have masked columns between .* padding_side='left'"
    for call in (ends, inputs, alone, turn):
        warned = pytest.warns(UserWarning, match=words) if call is ends else nullcontext()
        caches = [{PAST: copy.deepcopy(begun.past_key_values)} if call is turn else {} for _ in range(2)]
        expected = model.generate(**call, **options, **caches[0])
        with attach(model, spec) if is_attached else nullcontext(), warned:
            assert torch.equal(model.generate(**call, **options, **caches[1], **assistant), expected)
        assert spec.stats.left_to_generate == "its prompts have masked columns after their first tokens"
    assert caches[0][PAST].get_seq_length() == caches[1][PAST].get_seq_length() == expected.shape[1] - 1
