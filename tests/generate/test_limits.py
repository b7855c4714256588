"""What a call hands on to a model: arguments of its forward, positions without end, masks for flash kernels."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.architectures import build
from helpers.calls import check_lossless, new_spec
from helpers.models import ROW, ragged_batch, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, TopKTree, UnsupportedOptionError

SPEC = new_spec()


class Flipped(LlamaForCausalLM):
    def forward(self, *args: Any, flip: bool = False, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits if flip else output.logits
        return output


def test_own_forward_argument_reaches_every_forward(llama: LlamaForCausalLM) -> None:
    model = Flipped(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    options: dict[str, Any] = ROW | {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**options, flip=True)
    assert not torch.equal(expected, model.generate(**options))
    assert torch.equal(model.generate(**options, flip=True, assistant=SPEC), expected)
    assert not SPEC.stats.left_to_generate


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *((name, (140,)) for name in ("llama", "jamba", "mamba2", "nemotron_h")),
        *((name, (120, 100, 118)) for name in ("mistral", "gpt_neox", "falcon-alibi", "xglm")),
    ],
)
def test_positions_that_are_computed_have_no_end(name: str, lengths: tuple[int, ...]) -> None:
    """The models have ``max_position_embeddings=128``; drafts go on beyond."""
    spec = SelfSpec(draft=EarlyExit(2), stop=FixedLength(3))
    (stats,) = check_lossless(build(name), spec, 12, [ragged_batch(lengths)])
    assert stats.drafted >= 2 * stats.rounds


FLASH = "kernels-community/flash-attn2"


def flash_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Takes no mask but that of padding, as flash kernels do."""
    s, n = query.shape[2], key.shape[2]
    is_visible = torch.ones(1, 1, s, n, dtype=torch.bool).tril(n - s)
    if attention_mask is not None:
        is_visible = is_visible & attention_mask[:, None, None, :n].bool()
    return ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"](module, query, key, value, is_visible, **kwargs)


@pytest.mark.parametrize("tree", [None, TopKTree(((1.0, 3),))])
def test_flash_kernels_of_the_hub(tree: TopKTree | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are registered as transformers registers them."""
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FLASH, flash_attention)
    monkeypatch.setitem(masks, FLASH, masks["flash_attention_2"])
    model = tiny_llama()
    model.config._attn_implementation = FLASH
    check_lossless(model, SelfSpec(EarlyExit(3), FixedLength(4), tree), 12)
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    assert not ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    model.config._attn_implementation = "paged|" + FLASH
    with pytest.raises(UnsupportedOptionError, match=rf"'paged.{FLASH}'.*eager.*, {FLASH}"):
        model.generate(**ragged_batch(), max_new_tokens=4, assistant=SPEC)
