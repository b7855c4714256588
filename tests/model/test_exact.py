"""``SelfSpec(exact=True)``: greedy ids of bfloat16 models are plain's, since all results are, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache, PreTrainedModel

from helpers.architectures import build
from helpers.calls import PAST
from helpers.models import BATCH, ROW, tiny_llama
from helpers.watched import Proposing
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.batch import Draft
from hf_selfspec.errors import UnsupportedOptionError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.attention.exact import ExactForward, reduced_precision
from hf_selfspec.model.attention.invariance import differing_part

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SPECS = {
    "free and skips": SelfSpec(exact=True),
    "exit": SelfSpec(EarlyExit(2), FixedLength(4), exact=True),
    "chosen exit": SelfSpec(EarlyExit(), exact=True),
    "skips": SelfSpec(SkipLayers(attention=[1], mlp=[2]), FixedLength(3), exact=True),
    "tree": SelfSpec(EarlyExit(2), FixedLength(12), TopKTree(((0.9999, 9), (1.0, 1))), exact=True),
}
EXACT = SPECS["exit"]
# Grouped heads, sliding windows, MLA, experts, norms and activations of many kinds.
NAMES = (
    "llama", "mistral", "ministral", "gemma", "gemma3_text", "gpt2", "opt", "phi", "phi3", "qwen2", "qwen3", "granite",
    "olmo2", "olmo3", "cohere", "cohere2", "deepseek_v3", "glm4", "mixtral", "olmoe", "qwen3_moe", "gpt_neox",
    "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


def model_of(name: str) -> PreTrainedModel:
    model = build(name).to(torch.bfloat16)
    part = differing_part(model, Anatomy.of(model))
    assert not (part and name in ("llama", "mistral")), part  # nothing but what is run alone, norms and activations
    if part:
        pytest.skip(f"this machine's kernels: {part} rounds differently when tokens go through together")
    return model


@pytest.mark.every_run("mistral")
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_plains(name: str) -> None:
    """And all logits, bit for bit, whatever drafts; texts are longer than the windows."""
    model = model_of(name)
    torch.manual_seed(0)
    prompt = {"input_ids": torch.randint(1, 90, (1, 9)), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    options = OPTIONS | {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**prompt, **options)
    for spec in SPECS.values():
        found = model.generate(**prompt, **options, assistant=spec)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(torch.cat(found.logits), torch.cat(expected.logits))
        assert spec.stats is not None
        assert spec.stats.promise == "bit for bit"
    assert SPECS["tree"].stats.drafted
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_other_promises() -> None:
    model = tiny_llama()
    expected = model.generate(**ROW, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT), expected)
    assert EXACT.stats.promise == "token for token"
    model.generate(**ROW, max_new_tokens=4, do_sample=True, assistant=EXACT)
    assert EXACT.stats.promise == "distribution"
    model.to(torch.bfloat16)
    model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=(spec := SelfSpec.lookup()))
    assert spec.stats.promise == "near-ties"


@contextmanager
def full_precision_afterwards() -> Iterator[None]:
    places = torch.backends, torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    before = [place.fp32_precision for place in places]
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="flags of torch 2.9")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda: torch.set_float32_matmul_precision("high"), {"cpu": "tf32", "cuda": "tf32", "mps": "tf32"}),
        (lambda: torch.set_float32_matmul_precision("medium"), {"cpu": "bf16", "cuda": "tf32", "mps": "tf32"}),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), {"cuda": "tf32", "mps": "tf32"}),
        (lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"), {"cpu": "bf16", "mps": "bf16"}),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), {"cpu": "tf32", "cuda": "tf32", "mps": "tf32"}),
        (lambda: torch.set_float32_matmul_precision("highest"), {}),
    ],
)
def test_float32_is_what_it_is_multiplied_in(change: Callable[[], None], expected: dict[str, str]) -> None:
    """By the flags for the device of a model, however they are set; a device of which none is known may obey any."""
    with full_precision_afterwards():
        change()
        assert {d: p for d in ("cpu", "cuda", "mps") if (p := reduced_precision(torch.device(d)))} == expected
        for model, precision in ((tiny_llama(), expected.get("cpu")), (tiny_llama().double(), None)):
            model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=(spec := SelfSpec.lookup()))
            assert spec.stats.promise == ("near-ties" if precision else "token for token")
            refused = pytest.raises(UnsupportedOptionError, match=f"multiplied in {precision}")
            with refused if precision else nullcontext():
                model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT)


@pytest.mark.parametrize("shape", [(1, 11, 1536), (13, 64), (1, 6, 127), (1, 5, 4, 64)])
def test_each_token_is_what_it_is_alone(shape: tuple[int, ...]) -> None:
    """On processors that add in another order, too; what cancels shows the order."""
    layer, dim = torch.nn.Linear(shape[-1], 576, dtype=torch.bfloat16), min(1, len(shape) - 2)
    with torch.no_grad():
        half = layer.weight[:, : shape[-1] // 2].clone()
        layer.weight[:, : 2 * half.shape[1]] = torch.cat([half, half], dim=-1)
        row = torch.randn(*shape[:-1], half.shape[1])
        input = torch.nn.functional.pad(torch.cat([row, -row], dim=-1), (0, shape[-1] % 2)).bfloat16()
        alone = torch.cat([layer(one) for one in input.split(1, dim=dim)], dim=dim)
        assert torch.equal(ExactForward(layer, lambda: True)(input), alone)


@pytest.mark.every_run("True-3|False-29")
@pytest.mark.parametrize("count", [3, 8, 29])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_differs_is_named(count: int, everywhere: bool) -> None:
    """Where a module looks at how many tokens there are, whatever their number; afterwards the model is as it was, and
    what was found out does not outlive what it was about."""
    model = model_of("llama")

    def change(module: torch.nn.Module, given: Any, out: Any) -> Any:
        return out * (1 + (out.shape[1] == count)) if type(module) is type(mlp) else out

    mlp = model.model.layers[1].mlp
    hook = register_module_forward_hook(change) if everywhere else mlp.register_forward_hook(change)
    with pytest.raises(UnsupportedOptionError, match=r"model\.layers\.\d+ of .* Leave `exact` out"):
        model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT)
    assert not any("forward" in module.__dict__ for module in model.modules())
    hook.remove()
    model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT)
    assert EXACT.stats.promise == "bit for bit"


def test_calls_that_are_refused() -> None:
    model = tiny_llama().to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    model(ROW["input_ids"][:, :-1], **{PAST: cache})
    for given, why in (
        (BATCH, "one prompt of ids"),
        (ROW | {PAST: cache}, "a cache of your own"),
        (ROW | {"prefill_chunk_size": 2}, "prefill_chunk_size"),
        (ROW | {"cache_implementation": "static"}, "a static cache"),
    ):
        with pytest.raises(UnsupportedOptionError, match=why):
            model.generate(**given, max_new_tokens=4, do_sample=False, assistant=EXACT)
    too_long = Proposing(lambda text, max_new: Draft(text.ids.new_ones(1, 40), [40]))
    with pytest.raises(UnsupportedOptionError, match="drafts below 32 tokens: 40"):
        model.generate(**ROW, max_new_tokens=60, do_sample=False, assistant=SelfSpec(too_long, exact=True))
    for name, why in (("doge", "interface"), ("bloom", "tree"), ("lfm2", "recurrent"), ("gpt_oss", "not 'sdpa'")):
        with pytest.raises(UnsupportedOptionError, match=why):
            build(name).bfloat16().generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedOptionError, match="autocast"):
        model.generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT)
    with pytest.raises(UnsupportedOptionError, match="in float16 rounding may depend"):
        model.to(torch.float16).generate(**ROW, max_new_tokens=4, do_sample=False, assistant=EXACT)
