"""Settings and comparisons of compiled forwards."""

from typing import Any

import torch
from transformers import CompileConfig, LlamaForCausalLM, PreTrainedModel

from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import (
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    SelfSpec,
    SkipLayers,
    TopKTree,
)

# Dynamo alone, which is quick.
QUICK = CompileConfig(backend="eager", mode="default")

THREE = FixedLength(3)


def few_layers(layers: int = 2) -> LlamaForCausalLM:
    """Graphs take as long to make as there are layers; drafts of the first one are partly right."""
    return tiny_llama(layers, factor=0.7)


def same_ids(
    model: PreTrainedModel, spec: SelfSpec, rows: int = 1, new: int = 12, is_mixed: bool = True, **options: Any
) -> None:
    inputs = ragged_batch((9,)) if rows == 1 else ragged_batch((9, 5, 7))
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, assistant=spec), expected)
    assert spec.stats is not None
    assert not is_mixed or 0 < spec.stats.accepted < spec.stats.drafted


def specs(config: bool | CompileConfig = QUICK) -> dict[str, SelfSpec]:
    return {
        "exit": SelfSpec(EarlyExit(1), THREE, compile=config),
        "rule": SelfSpec(EarlyExit(1), ConfidenceThreshold(0.1), max_draft=5, compile=config),
        "tree": SelfSpec(EarlyExit(1), THREE, TopKTree(((0.9999, 3), (1.0, 1))), compile=config),
        "skips": SelfSpec(SkipLayers([1], [1]), THREE, compile=config),
    }
