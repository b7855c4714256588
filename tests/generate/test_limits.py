"""Where texts, models and processes end: positions, lengths, numbers, threads, registrations."""

import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.architectures import build
from helpers.calls import check_lossless, new_spec
from helpers.models import ragged_batch, tiny_gpt2, tiny_llama
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    SelfSpec,
    TopKTree,
    UnsupportedOptionError,
)

SPEC = new_spec()


class Flipped(LlamaForCausalLM):
    def forward(
        self, input_ids: Any = None, position_ids: Any = None, logits_to_keep: Any = 0, flip: Any = False, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs)
        if flip:
            output.logits = -output.logits
        return output


def test_own_forward_argument_reaches_every_forward() -> None:
    llama = tiny_llama()
    model = Flipped(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    batch = ragged_batch()
    expected = model.generate(**batch, max_new_tokens=20, do_sample=False, flip=True)
    assert not torch.equal(expected, model.generate(**batch, max_new_tokens=20, do_sample=False))
    assert torch.equal(model.generate(**batch, max_new_tokens=20, do_sample=False, flip=True, assistant=SPEC), expected)


GROWN = (120, 100, 118)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("llama", (140,)),
        ("mistral", GROWN),
        ("gpt_neox", GROWN),
        ("falcon-alibi", GROWN),
        ("xglm", GROWN),
        ("jamba", (140,)),
        ("mamba2", (140,)),
        ("nemotron_h", (140,)),
    ],
)
def test_positions_that_are_computed_have_no_end(name: str, lengths: tuple[int, ...]) -> None:
    """The models have ``max_position_embeddings=128``; drafts go on beyond."""
    model, spec = build(name), SelfSpec(draft=EarlyExit(2), stop=FixedLength(3))
    batch = ragged_batch(lengths)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**batch, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot take")
        assert torch.equal(model.generate(**batch, **options, assistant=spec), expected)
    assert spec.stats.drafted >= 2 * spec.stats.rounds


def test_padding_does_not_count_as_prompt() -> None:
    model = tiny_gpt2()
    batch = {name: torch.nn.functional.pad(value, (30, 0)) for name, value in ragged_batch().items()}
    expected = model.generate(**batch, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(**batch, max_new_tokens=20, do_sample=False, assistant=SPEC), expected)


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
