"""What is told of a model: the same from its config as from its weights."""

import pytest
import torch
from transformers import BertConfig, CLIPConfig, LlamaConfig, T5Config, T5ForConditionalGeneration

from helpers.architectures import build
from helpers.models import tiny_gpt2, tiny_llama
from hf_selfspec import SettingTypeError, UnsupportedModelError, inspect_model

NAMES = ("llama", "gpt2", "bloom", "gemma2", "deepseek_v3", "gpt_neo", "qwen3_next", "mamba2", "opt")


@pytest.mark.every_run("llama|gpt2|gpt_neo|mamba2")
@pytest.mark.parametrize("name", NAMES)
def test_a_config_tells_what_the_model_tells(name: str) -> None:
    model = build(name)
    told = inspect_model(model.config)
    assert told == inspect_model(model)
    assert told.parameters == model.num_parameters()
    assert sum(share.bytes for share in told.shares) == 4 * told.parameters
    assert told.num_layers == 4
    assert told.refused == ""
    assert f"{type(model).__name__} ({model.config.model_type})" in str(told)


def test_no_weights_are_made() -> None:
    """A model that no machine here could hold."""
    config = LlamaConfig(hidden_size=16384, intermediate_size=65536, num_hidden_layers=100, num_attention_heads=128)
    told = inspect_model(config)
    assert told.parameters > 3e11
    assert told.num_layers == 100


def test_abilities() -> None:
    told = {name: inspect_model(build(name).config) for name in NAMES}
    assert {name for name, one in told.items() if not one.tree} == {"bloom", "gpt_neo"}
    assert {name for name, one in told.items() if not one.ragged} == {"gpt_neo"}
    assert {name for name, one in told.items() if one.is_recurrent} == {"qwen3_next", "mamba2"}
    assert {name for name, one in told.items() if not one.no_graphs} == {
        "llama", "gpt2", "gemma2", "deepseek_v3", "opt",
    }  # fmt: skip
    assert "lines: it cannot take a tree mask" in str(told["bloom"])
    assert "all rows advance by the shortest acceptance" in str(told["gpt_neo"])
    assert "rolled back when a draft is rejected" in str(told["mamba2"])
    assert told["mamba2"].mlp == 0
    assert told["gpt2"].position_limit
    assert "128, and no more" in str(told["gpt2"])
    assert not told["llama"].position_limit


def test_drafts_in_four_bits() -> None:
    """Five bits a weight in layers and the head, with a scale and a middle for 32."""
    told, mixtral = inspect_model(tiny_llama(vocabulary=112)), inspect_model(build("mixtral").config)
    _, layers, head = told.shares[:3]
    norms = 2 * 64 * told.num_layers
    assert told.packed_bytes == (layers.parameters - norms + head.parameters) * 5 // 8
    assert "of the model in bfloat16, which a step reads" in str(told)
    assert mixtral.packed_bytes is None
    assert "no: most weights are quantised already, not in linear layers" in str(mixtral)


def test_what_can_be_skipped() -> None:
    told = inspect_model(tiny_llama(6).config)
    inner = ("attention", "mlp")
    assert told.skippable == ((), inner, inner, inner, inner, ())
    assert "8 in layers 1-4 (counted from 0)" in str(told)
    few = inspect_model(tiny_llama(3).config)
    assert few.skippable == ((),) * 3
    assert "at least 4 layers" in few.no_skips
    assert few.no_skips in str(few)


def test_shares() -> None:
    model = tiny_gpt2()
    shares = {share.name: share.parameters for share in inspect_model(model).shares}
    assert shares["embeddings"] == shares["output head"] == 97 * 64
    assert shares["layers"] == sum(one.numel() for one in model.transformer.h.parameters())
    assert shares["the rest"] == 32 * 64 + 2 * 64
    tied = inspect_model(LlamaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, tie_word_embeddings=True))
    assert [share.name for share in tied.shares] == ["embeddings, head", "layers", "the rest"]


def test_the_cache_of_a_token() -> None:
    model = tiny_llama().to(torch.bfloat16)
    # 6 layers, keys and values, 2 heads of width 16, 2 bytes each.
    assert inspect_model(model).cache_bytes == 6 * 2 * 2 * 16 * 2
    assert inspect_model(build("deepseek_v3").config).cache_bytes is None
    assert inspect_model(build("mamba2").config).cache_bytes is None


def test_the_cache_of_a_text_with_windows() -> None:
    """Two of four layers keep 8 tokens and room for 16, with plain generate 7; a token has 128 bytes in each."""
    told = inspect_model(build("gemma3_text"))
    assert told.held_bytes == (128 * (2 * 128 + 2 * 24), 128 * (2 * 128 + 2 * 7))
    assert "cache of such a text   0.0 MiB, with plain generate 0.0" in str(told)
    assert inspect_model(tiny_llama()).held_bytes is None


def test_models_that_are_refused() -> None:
    told = inspect_model(T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)))
    assert "is an encoder-decoder model" in told.refused
    assert "not possible: T5ForConditionalGeneration is an encoder-decoder model" in str(told)
    assert told.parameters > 0
    with pytest.raises(UnsupportedModelError, match="has no causal LM for a CLIPConfig"):
        inspect_model(CLIPConfig())
    for given in ("llama", BertConfig):
        with pytest.raises(SettingTypeError, match="inspect_model takes a causal LM"):
            inspect_model(given)
