"""What is told of a model: the same from its config as from its weights."""

import pytest
from transformers import BertConfig, CLIPConfig, LlamaConfig, T5Config, T5ForConditionalGeneration

from helpers.architectures import build
from helpers.models import tiny_llama
from hf_selfspec import SettingTypeError, UnsupportedModelError, inspect_model

NAMES = ("llama", "gpt2", "bloom", "gemma2", "deepseek_v3", "gpt_neo", "qwen3_next", "mamba2", "opt", "mixtral")


def test_what_a_config_tells() -> None:
    told = {}
    for name in NAMES:
        model = build(name)
        told[name] = one = inspect_model(model.config)
        assert one == inspect_model(model)
        assert (one.parameters, one.num_layers, one.refused) == (model.num_parameters(), 4, "")
        assert f"{type(model).__name__} ({model.config.model_type})" in str(one)
    for ability, names in {
        "tree": set(NAMES) - {"bloom", "gpt_neo"},
        "ragged": set(NAMES) - {"gpt_neo", "qwen3_next", "mamba2"},
        "is_recurrent": {"qwen3_next", "mamba2"},
        "position_limit": {"gpt2", "opt", "gpt_neo"},
    }.items():
        assert {name for name, one in told.items() if getattr(one, ability)} == names
    graphs = {name for name, one in told.items() if not one.no_graphs}
    assert graphs == {"llama", "gpt2", "gemma2", "deepseek_v3", "opt", "mixtral"}
    assert told["mamba2"].mlp == 0
    for name, words in (
        ("bloom", "lines: it cannot take a tree mask"),
        ("gpt_neo", "batches are left to plain generate"),
        ("mamba2", "rolled back when a draft is rejected"),
        ("gpt2", "128, and no more"),
        ("mixtral", "no: most weights are quantised already, not in linear layers"),
    ):
        assert words in str(told[name])
    assert (inspect_model(tiny_llama(vocabulary=112)).packed, told["mixtral"].packed) == (True, False)


def test_layers_and_sizes() -> None:
    """No weights are made: no machine here could hold the last model."""
    told = inspect_model(tiny_llama(6).config)
    assert told.skippable == 8, "attention and MLP of all layers but the first and the last"
    assert "blocks to skip         8\n" in str(told)
    few = inspect_model(tiny_llama(3).config)
    assert few.skippable == 0
    assert "at least 4 layers" in few.no_skips
    assert few.no_skips in str(few)
    sizes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100, "num_attention_heads": 128}
    assert inspect_model(LlamaConfig(**sizes)).parameters > 3e11


def test_models_that_are_refused() -> None:
    told = inspect_model(T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)))
    assert "not possible: T5ForConditionalGeneration is an encoder-decoder model" in str(told)
    assert told.parameters > 0
    with pytest.raises(UnsupportedModelError, match="has no causal LM for a CLIPConfig"):
        inspect_model(CLIPConfig())
    for given in ("llama", BertConfig):
        with pytest.raises(SettingTypeError, match="inspect_model takes a causal LM"):
            inspect_model(given)
