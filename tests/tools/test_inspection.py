"""What is told of a model: the same from its config as from its weights."""

import pytest
from transformers import BertConfig, CLIPConfig, LlamaConfig, T5Config, T5ForConditionalGeneration

from helpers.architectures import build
from helpers.models import tiny_llama
from hf_selfspec import SettingTypeError, UnsupportedModelError, inspect_model

NAMES = ("llama", "gpt2", "bloom", "gemma2", "deepseek_v3", "gpt_neo", "qwen3_next", "mamba2", "opt")


@pytest.mark.every_run("llama|gpt2|gpt_neo|mamba2")
@pytest.mark.parametrize("name", NAMES)
def test_a_config_tells_what_the_model_tells(name: str) -> None:
    model = build(name)
    told = inspect_model(model.config)
    assert told == inspect_model(model)
    assert told.parameters == model.num_parameters()
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
    assert "batches are left to plain generate" in str(told["gpt_neo"])
    assert "rolled back when a draft is rejected" in str(told["mamba2"])
    assert told["mamba2"].mlp == 0
    assert told["gpt2"].position_limit
    assert "128, and no more" in str(told["gpt2"])
    assert not told["llama"].position_limit
    assert inspect_model(tiny_llama(vocabulary=112)).packed
    mixtral = inspect_model(build("mixtral").config)
    assert not mixtral.packed
    assert "no: most weights are quantised already, not in linear layers" in str(mixtral)


def test_what_can_be_skipped() -> None:
    told = inspect_model(tiny_llama(6).config)
    assert told.skippable == 8, "attention and MLP of all layers but the first and the last"
    assert "blocks to skip         8\n" in str(told)
    few = inspect_model(tiny_llama(3).config)
    assert few.skippable == 0
    assert "at least 4 layers" in few.no_skips
    assert few.no_skips in str(few)


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
