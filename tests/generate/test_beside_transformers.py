"""The README's two tables beside transformers' own options: what these refuse or cannot do, and that ours does it."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.architectures import STATEFUL, build
from helpers.models import ragged_batch
from hf_selfspec import SelfSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 2},
    "mtp": {"use_mtp": True},
}
ROWS = ragged_batch((8, 12, 10))
ROW = {name: values[1:2] for name, values in ROWS.items()}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}

# transformers' early exit passes on a config and options together.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `generation_config` together")


@pytest.mark.every_run("(qwen3_5_text|falcon_h1|bamba|mamba2)")
@pytest.mark.parametrize("name", STATEFUL)
def test_recurrent_states(name: str) -> None:
    model = build(name)
    for options in OPTIONS.values():
        with pytest.raises(ValueError, match="not supported with stateful models"):
            model.generate(**ROW, **GREEDY, **options)
    expected = model.generate(**ROW, **GREEDY)
    assert torch.equal(model.generate(**ROW, **GREEDY, assistant=SelfSpec()), expected)


@pytest.mark.parametrize("option", ["prompt lookup", "early exit"])
def test_several_prompts(option: str, llama: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        llama.generate(**ROWS, **GREEDY, **OPTIONS[option])
    expected = llama.generate(**ROWS, **GREEDY)
    assert torch.equal(llama.generate(**ROWS, **GREEDY, assistant=SelfSpec()), expected)
