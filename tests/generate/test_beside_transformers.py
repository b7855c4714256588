"""The README's two tables beside transformers' own options: what these refuse or cannot do, and that ours does it."""

from typing import Any

import pytest
import torch

from helpers.architectures import STATEFUL, build
from helpers.models import ragged_batch
from hf_selfspec import SelfSpec

OPTIONS: list[dict[str, Any]] = [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}, {"use_mtp": True}]
ROWS = ragged_batch((8, 12, 10))
ROW = {name: values[1:2] for name, values in ROWS.items()}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
CASES = {
    **dict.fromkeys(STATEFUL, (ROW, OPTIONS, "not supported with stateful models")),
    "llama": (ROWS, OPTIONS[:2], "only supported for batch_size = 1"),
}


# transformers' early exit passes on a config and options together.
@pytest.mark.filterwarnings("ignore:Passing `generation_config` together")
@pytest.mark.every_run("(qwen3_5_text|falcon_h1|bamba|mamba2|llama)")
@pytest.mark.parametrize("name", CASES)
def test_what_others_refuse(name: str) -> None:
    """Recurrent states, and several prompts."""
    model, (inputs, refused, words) = build(name), CASES[name]
    for options in refused:
        with pytest.raises(ValueError, match=words):
            model.generate(**inputs, **GREEDY, **options)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant=SelfSpec()), expected)
