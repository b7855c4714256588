"""The model itself in four bits as its draft: what it drafts, and the life of packed weights."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPTQConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers.architectures import build
from helpers.calls import check_lossless, unchanged
from helpers.models import BATCH, ROW, tiny_llama
from helpers.processes import peft_calls_old_name
from hf_selfspec import FixedLength, Quantized, SelfSpec
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.model.graphs.model_graphs import graphs_of
from hf_selfspec.model.kernels import packing
from hf_selfspec.model.kernels.packing import GROUP_SIZE, PackedLinear, one_a_byte, rounded

in_float32 = pytest.mark.machine("packed_float32_is_fast")


@pytest.fixture(autouse=True)
def has_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has the kernels without it, too, where they do not pay."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """The layers that are rounded while a test runs, each as often as it is."""
    found: list[torch.nn.Module] = []

    def watched(module: torch.nn.Module) -> Any:
        found.append(module)
        return rounded(module)

    monkeypatch.setattr(packing, "rounded", watched)
    return found


def spec_of() -> SelfSpec:
    return SelfSpec(Quantized(), FixedLength(4))


def random_linear(kind: type[torch.nn.Module] = torch.nn.Linear, rows: int = 48, width: int = 128) -> torch.nn.Module:
    torch.manual_seed(0)
    return (kind(width, rows) if kind is torch.nn.Linear else kind(rows, width)).to(torch.bfloat16)


def weight_of(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight ``[n, k]`` that rounded numbers stand for."""
    scale, middle = scales.float().repeat_interleave(2 * numbers.shape[1] // len(scales), dim=0).unbind(-1)
    return (one_a_byte(numbers).float() - 8) * scale.t() + middle.t()


@torch.no_grad()
@pytest.mark.parametrize("kind", [torch.nn.Linear, Conv1D])
def test_kernels_multiply_with_the_rounded_weight(kind: type[torch.nn.Module]) -> None:
    module = random_linear(kind)
    weight = weight_of(*rounded(module))
    input = torch.randn(3, 1, 128).to(torch.bfloat16).transpose(0, 1)  # as recurrent layers have it
    found = PackedLinear(module)(module, input)
    torch.testing.assert_close(found.float(), linear(input.float(), weight, module.bias.float()), rtol=0.02, atol=0.03)
    many = torch.randn(2, 20, 128).to(torch.bfloat16)  # for which the layer itself is faster
    assert torch.equal(PackedLinear(module)(module, many), module(many))


@torch.no_grad()
def test_rounding_is_close() -> None:
    """Closer than the nearest of evenly spaced values from the smallest to the largest of a group."""
    module = random_linear()
    values = module.weight.float().unflatten(1, (-1, GROUP_SIZE))
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = (high - low) / 15
    nearest = (((values - low) / step).round() * step + low).flatten(1)
    errors = [(one - module.weight.float()).square().mean() for one in (weight_of(*rounded(module)), nearest)]
    assert errors[0] < errors[1] * 0.9


ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, ON_CUDA])])
def test_models_in_bfloat16(device: str) -> None:
    """With the kernels of this device, alone and in a cascade."""
    model = tiny_llama(factor=0.5).to(device, torch.bfloat16)
    inputs = {name: value.to(device) for name, value in BATCH.items()}
    for spec in (spec_of(), SelfSpec.quantized()):
        with unchanged(model):
            model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant=spec)
        assert spec.stats.accepted > 0


@in_float32
@pytest.mark.machine("graphs_are_taken")
@pytest.mark.slow
def test_graphs(llama: LlamaForCausalLM) -> None:
    check_lossless(llama, spec_of(), prompts=[ROW])
    keys = [key for pool in graphs_of(llama).pools.all for _, key in pool.graphs]
    assert any(getattr(part, "substitutes", None) is not None for key in keys for part in key)


def alive() -> list[PackedLinear]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is PackedLinear]


@in_float32
def test_packed_once_for_threads_and_specs(packs: list[Any]) -> None:
    model, before = tiny_llama(3, factor=0.5), len(alive())
    specs = [spec_of(), spec_of()]
    check_lossless(model, SelfSpec(), 4, [ROW])
    assert not packs  # nothing has drafted with it
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(check_lossless, model, new_tokens=8), specs))
    assert len(packs) == len(alive()) - before == 21
    packs.clear()
    del model
    assert len(alive()) == before


@in_float32
@peft_calls_old_name
def test_packed_again_where_weights_have_changed(packs: list[Any]) -> None:
    model = get_peft_model(tiny_llama(3, factor=0.5), LoraConfig(init_lora_weights=False, target_modules=["q_proj"]))
    inner, spec = model.get_base_model(), spec_of()
    check_lossless(inner, spec, 8)
    assert len(packs) == 21
    loss = inner(**ROW, labels=ROW["input_ids"]).loss
    loss.backward()
    torch.optim.SGD([one for one in inner.parameters() if one.requires_grad], 1.0).step()
    check_lossless(inner, spec, 8)
    assert len(packs) == 21  # the adapters alone have changed
    model.merge_adapter()
    check_lossless(inner, spec, 8)
    assert len(packs) == 24
    layer = inner.model.layers[0].mlp.up_proj
    layer.weight.grad = torch.zeros_like(layer.weight).index_fill_(0, torch.tensor([1]), 1.0)
    torch.optim.SGD([layer.weight], 1.0).step()  # in one row of many, which a few values do not show
    check_lossless(inner, spec, 8)
    assert packs[24:] == [layer]
    numbers, scales = rounded(layer)
    (made,) = [each for each in alive() if torch.equal(each.weight, one_a_byte(numbers))]
    assert torch.equal(made.scales, scales)


@pytest.mark.every_run("True")
@in_float32
@pytest.mark.parametrize("is_tied", [True, False])
def test_packed_again_where_the_vocabulary_has_grown(packs: list[Any], is_tied: bool) -> None:
    model, spec, before = tiny_llama(3, vocabulary=112, factor=0.5), spec_of(), len(alive())
    model.config.tie_word_embeddings = is_tied
    model.tie_weights()
    check_lossless(model, spec, 8)
    packs.clear()
    model.resize_token_embeddings(128, mean_resizing=False)
    assert all(found.accepted > 0 for found in check_lossless(model, spec, 8))
    assert packs == [model.lm_head]
    assert len(alive()) - before == 22


@torch.no_grad()
def test_memory_of_rounding_does_not_follow_the_layer() -> None:
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.dtype is torch.float32:
                largest = max(largest, found.nbytes)
            return found

    with Sizes():
        rounded(torch.nn.Linear(1024, 8192, dtype=torch.bfloat16))
    assert 0 < largest < 1024 * 8192


@pytest.mark.usefixtures("no_warnings_yet")
def test_what_is_refused_before_anything_is_packed(packs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cascade it is left out, which is said once."""
    quantised, gptq, offloaded, other = (tiny_llama().to(torch.bfloat16) for _ in range(4))
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is a test extra that not all platforms have"
    )
    quantization.quantize_(quantised, quantization.Int8WeightOnlyConfig())
    gptq.config.quantization_config = GPTQConfig(bits=4)
    offloaded.model.layers.to("meta")
    other.config.intermediate_size = 120
    narrow = LlamaForCausalLM(other.config).eval().to(torch.bfloat16)
    for model, words in (
        (tiny_llama(), "faster than its layers in torch.float32 on this cpu"),
        (quantised, "quantised already"),
        (offloaded, "spread over processes or offloaded"),
        (gptq, r"quantised already \(gptq\)\. Load it in bfloat16"),
        (narrow, "not of widths"),
        (build("mixtral").to(torch.bfloat16), r"experts\?"),
    ):
        with pytest.raises(UnsupportedModelError, match=words), unchanged(model):
            model.generate(**ROW, max_new_tokens=4, assistant=spec_of())
    with pytest.warns(UserWarning, match="is left out of .* faster than its layers in torch.float32"):
        tiny_llama().generate(**ROW, max_new_tokens=8, assistant=SelfSpec.quantized())
    tiny_llama().generate(**ROW, max_new_tokens=8, assistant=SelfSpec.quantized())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(
        UnsupportedModelError, match=r"in torch.bfloat16 on this cpu. .* on a CPU with AVX-512 or a GPU"
    ):
        tiny_llama().bfloat16().generate(**ROW, max_new_tokens=4, assistant=spec_of())
    assert not packs


@pytest.mark.parametrize(
    ("hip", "capability", "is_served"), [(None, (7, 5), False), (None, (8, 0), True), ("6.2", (9, 4), False)]
)
def test_gpus_whose_kernels_take_four_bits(
    hip: str | None, capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (packing.kernel_for(torch.device("cuda"), torch.bfloat16) is not None) is is_served
