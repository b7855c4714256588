"""``SelfSpec(exact=True)``: greedy ids of bfloat16 models are plain's, since all results are, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from helpers.architectures import build
from helpers.calls import PAST
from helpers.models import BATCH, ROW, ragged_batch, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SettingTypeError, SkipLayers, TopKTree
from hf_selfspec.errors import UnsupportedModelError, UnsupportedOptionError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.exact import exact_linears
from hf_selfspec.model.invariance import differing_part

OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SPECS = {
    "free and skips": SelfSpec(exact=True),
    "exit": SelfSpec(EarlyExit(2), FixedLength(4), exact=True),
    "skips": SelfSpec(SkipLayers(attention=[1], mlp=[2]), FixedLength(3), exact=True),
    "tree": SelfSpec(EarlyExit(2), FixedLength(3), TopKTree(((0.9999, 3), (1.0, 1))), exact=True),
}
EXACT = SPECS["exit"]
# Grouped heads, sliding windows, soft-caps, sinks, ALiBi, MLA, experts, gated delta net, convolutions.
NAMES = (
    "llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "opt", "phi3", "qwen2", "qwen3", "granite", "olmo2",
    "cohere", "cohere2", "bloom", "mpt", "deepseek_v3", "mixtral", "qwen3_moe", "qwen3_next", "lfm2", "gpt_neox",
)  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    model = build(name).to(torch.bfloat16)
    part = differing_part(model, Anatomy.of(model))
    assert not (part and name in ("llama", "mistral")), part  # nothing but what is run alone, norms and activations
    if part:
        pytest.skip(f"this machine's kernels: {part} rounds differently when tokens go through together")
    return model


@pytest.mark.filterwarnings("ignore:.*cannot take a tree mask:UserWarning")
@pytest.mark.every_run("llama|mistral|gpt2|gpt_oss")
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_plains(name: str) -> None:
    """And all logits, bit for bit."""
    model = model_of(name)
    for seed in range(3):
        torch.manual_seed(seed)
        prompt = {"input_ids": torch.randint(1, 90, (1, 9)), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
        expected = model.generate(**prompt, **OPTIONS, return_dict_in_generate=True, output_logits=True)
        for spec in SPECS.values():
            found = model.generate(
                **prompt, **OPTIONS, assistant=spec, return_dict_in_generate=True, output_logits=True
            )
            assert torch.equal(found.sequences, expected.sequences)
            for ours, plain in zip(found.logits, expected.logits, strict=True):
                assert torch.equal(ours, plain)
            assert spec.stats is not None
            assert spec.stats.promise == "bit for bit"
    assert SPECS["tree"].stats.drafted


def test_other_promises() -> None:
    model = tiny_llama()
    model.generate(**ROW, max_new_tokens=4, assistant=EXACT)
    assert EXACT.stats.promise == "token for token"
    model.to(torch.bfloat16).generate(**ROW, max_new_tokens=4, assistant=(spec := SelfSpec.lookup()))
    assert spec.stats.promise == "near-ties"


@pytest.mark.parametrize("shape", [(1, 11, 1536), (13, 64), (1, 6, 127)])
def test_each_row_is_what_it_is_alone(shape: tuple[int, ...]) -> None:
    """On processors that add in another order, too; what cancels shows the order."""
    layer = torch.nn.Linear(shape[-1], 576, dtype=torch.bfloat16)
    with torch.no_grad():
        half = layer.weight[:, : shape[-1] // 2].clone()
        layer.weight[:, : 2 * half.shape[1]] = torch.cat([half, half], dim=-1)
        row = torch.randn(*shape[:-1], half.shape[1])
        input = torch.nn.functional.pad(torch.cat([row, -row], dim=-1), (0, shape[-1] % 2)).bfloat16()
        alone = torch.cat([layer(one) for one in input.split(1, dim=-2)], dim=-2)
        with exact_linears(layer, lambda: True):
            assert torch.equal(layer(input), alone)


def test_what_differs_is_named() -> None:
    """Where a module looks at how many tokens there are; the model is as it was afterwards."""
    model = model_of("llama")
    hook = model.model.layers[1].mlp.register_forward_hook(lambda _, given, out: out * (1 + (out.shape[1] == 8) / 64))
    unknown = build("llama").to(torch.bfloat16)
    unknown.model.layers[1].mlp = model.model.layers[1].mlp
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp of .* Leave `exact` out"):
        unknown.generate(**ROW, max_new_tokens=4, assistant=EXACT)
    hook.remove()
    assert not any("forward" in module.__dict__ for module in unknown.modules())


def test_calls_that_are_refused() -> None:
    model = tiny_llama().to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    model(ROW["input_ids"][:, :-1], **{PAST: cache})
    for given in (BATCH, ragged_batch((3, 9)), ROW | {PAST: cache}, ROW | {"prefill_chunk_size": 2}):
        with pytest.raises(UnsupportedOptionError, match="serves one row of text"):
            model.generate(**given, max_new_tokens=4, assistant=EXACT)
    with pytest.raises(UnsupportedOptionError, match="compiled graphs"):
        model.generate(**ROW, max_new_tokens=4, assistant=SelfSpec(compile=True, exact=True))
    with pytest.raises(UnsupportedModelError, match="in float16 numbers may round"):
        model.to(torch.float16).generate(**ROW, max_new_tokens=4, assistant=EXACT)
    with pytest.raises(SettingTypeError, match=r"SelfSpec\(exact\) must be True or False, got None"):
        SelfSpec(exact=None)  # type: ignore[arg-type]
