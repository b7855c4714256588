"""The ways in: ``generate``, PEFT, hooks, compiled, dispatched and quantised models, all against plain generate."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel, Trainer

import hf_selfspec
from helpers.calls import assert_serves, new_spec, unchanged
from helpers.calls import calls as served
from helpers.models import BATCH, ROW, tiny_llama
from helpers.processes import peft_calls_old_name
from hf_selfspec import FixedLength, SelfSpec, SkipLayers, TopKTree

pytestmark = peft_calls_old_name

SPECS = {
    "exit": new_spec(),
    "tree": SelfSpec(
        draft=SkipLayers(attention=[1, 2], mlp=[1]), stop=FixedLength(3), tree=TopKTree(((0.5, 3), (1.0, 1)))
    ),
}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> SelfSpec:
    return SPECS[request.param]


def test_calls_without_assistant_are_passed_on_untouched(llama: LlamaForCausalLM) -> None:
    """The wrapper hands on the very same arguments and shows the signature of what it wraps."""

    class Model(LlamaForCausalLM):
        def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
            assert kwargs.keys() == {"input_ids", "attention_mask", "max_new_tokens"}
            return super()._prepare_generation_config(*args, **kwargs)

    model = Model(llama.config).eval()
    for nothing in ({}, {"assistant": None}):
        model.generate(**ROW, max_new_tokens=4, **nothing)
    assert inspect.signature(GenerationMixin.generate) == inspect.signature(GenerationMixin.generate.__wrapped__)


@pytest.fixture
def reinstalled() -> Iterator[None]:
    yield
    hf_selfspec.install()


@pytest.mark.usefixtures("reinstalled")
def test_install_and_uninstall(llama: LlamaForCausalLM) -> None:
    """``Trainer`` is wrapped by the first training callback that is used."""
    assert hf_selfspec.LayerDropout
    spec, installed = new_spec(), GenerationMixin.generate
    original, original_train = installed.__wrapped__, Trainer.train.__wrapped__
    plain = llama.generate(**ROW, max_new_tokens=8)

    for _ in range(2):
        hf_selfspec.uninstall()
        assert GenerationMixin.generate is original
        assert Trainer.train is original_train
    with pytest.raises(ValueError, match="assistant"):
        llama.generate(**ROW, max_new_tokens=8, assistant=spec)
    with hf_selfspec.attach(llama, spec):
        assert torch.equal(llama.generate(**ROW, max_new_tokens=8), plain)
        assert spec.stats is None
    assert torch.equal(llama.generate(**ROW, max_new_tokens=8, custom_generate=spec), plain)

    for _ in range(2):
        hf_selfspec.install()
        assert GenerationMixin.generate.__wrapped__ is original
        assert Trainer.train.__wrapped__ is original_train
    assert torch.equal(llama.generate(**ROW, max_new_tokens=8, assistant=spec), plain)


def wrapped_by_others(with_trace: bool) -> list[str]:
    """Wraps ``generate`` as other libraries do, with or without a trace; returns the list of calls."""
    calls, below = list[str](), GenerationMixin.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return below(self, *args, **kwargs)

    GenerationMixin.generate = functools.wraps(below)(generate) if with_trace else generate
    return calls


def assert_served_once(model: PreTrainedModel, *wrappers: list[str]) -> None:
    """Each wrapper of others sees the call of plain ``generate`` and the one with a ``SelfSpec``."""
    spec = new_spec()
    for calls in wrappers:
        calls.clear()
    plain = model.generate(**ROW, max_new_tokens=8)
    assert torch.equal(model.generate(**ROW, max_new_tokens=8, assistant=spec), plain)
    assert spec.stats.drafted
    assert served(spec) == 1
    assert all(calls == ["theirs"] * 2 for calls in wrappers)


@pytest.mark.every_run("True")
@pytest.mark.usefixtures("reinstalled")
@pytest.mark.parametrize("with_trace", [False, True])
def test_wrappers_of_others_above_and_below(llama: LlamaForCausalLM, with_trace: bool) -> None:
    ours = GenerationMixin.generate
    calls = wrapped_by_others(with_trace)
    above = GenerationMixin.generate
    for _ in range(2):
        assert_served_once(llama, calls)
        hf_selfspec.uninstall()
        assert GenerationMixin.generate is above
        with pytest.raises(ValueError, match="assistant"):
            llama.generate(**ROW, max_new_tokens=4, assistant=new_spec())
        hf_selfspec.install()
    second = wrapped_by_others(with_trace)
    hf_selfspec.install()
    assert_served_once(llama, calls, second)
    GenerationMixin.generate = ours  # they remove theirs
    assert_served_once(llama)
    hf_selfspec.uninstall()
    plain = GenerationMixin.generate
    calls = wrapped_by_others(with_trace)
    below = GenerationMixin.generate
    hf_selfspec.install()
    assert_served_once(llama, calls)
    hf_selfspec.uninstall()
    assert GenerationMixin.generate is below
    GenerationMixin.generate = plain


@pytest.mark.every_run("exit")
def test_lora(spec: SelfSpec, llama: LlamaForCausalLM) -> None:
    """On attention and MLP, with weights that change the output."""
    model = tiny_llama(factor=0.5)
    torch.manual_seed(4)
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "init_lora_weights": False}
    config = peft.LoraConfig(**settings, target_modules=["q_proj", "v_proj", "down_proj"])
    lora = peft.get_peft_model(model, config).eval()
    assert_serves(lora, spec)
    with_adapter = lora.generate(**ROW, max_new_tokens=8, assistant=spec)
    without = llama.generate(**ROW, max_new_tokens=8)
    assert not torch.equal(with_adapter, without)
    with lora.disable_adapter():
        assert torch.equal(lora.generate(**ROW, max_new_tokens=8, assistant=spec), without)
    assert torch.equal(lora.generate(**ROW, max_new_tokens=8, assistant=spec), with_adapter)


def assert_serves_until_each_end(model: Any, *specs: SelfSpec, **options: Any) -> None:
    """As plain ``model`` where the rows of a batch end one after another."""
    options |= {"max_new_tokens": 20, "pad_token_id": 96}
    width = BATCH["input_ids"].shape[1]
    options["eos_token_id"] = int(model.generate(**BATCH, **options)[0, width + 8])
    plain = model.generate(**BATCH, **options)
    assert len({int((row != 96).sum()) for row in plain[:, width:]}) > 1
    for spec in specs:
        assert torch.equal(model.generate(**BATCH, **options, assistant=spec), plain)


def test_an_adapter_for_each_row() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny_llama(4), config, "first").eval()
    model.add_adapter("second", config)
    assert_serves_until_each_end(model, SPECS["tree"], SelfSpec(), adapter_names=["first", "second", "__base__"])


def scaled(module: torch.nn.Module, args: Any, states: torch.Tensor) -> torch.Tensor:
    """Scales the states of each row of a batch of three."""
    return states * torch.tensor([1.0, 0.8, 1.3])[:, None, None]


class Scaling(ModelHook):
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return scaled(module, (), output)


HOOKS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "input": lambda module: module.register_forward_pre_hook(lambda module, args: scaled(module, (), *args)),
    "accelerate": lambda module: add_hook_to_module(module, SequentialHook(AlignDevicesHook(), Scaling())),
    "global": lambda module: torch.nn.modules.module.register_module_forward_hook(
        lambda hooked, args, output: scaled(hooked, args, output) if hooked is module else None
    ),
}


@pytest.mark.every_run("global")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_with_a_value_for_each_row(hook: str, request: pytest.FixtureRequest) -> None:
    model = tiny_llama()
    handle = HOOKS[hook](model.model.layers[2].mlp)
    if hook == "global":
        request.addfinalizer(handle.remove)
    assert_serves_until_each_end(model, new_spec())


@pytest.mark.parametrize("has_hook_of_others", [False, True])
def test_rows_that_have_ended_leave_the_forwards(has_hook_of_others: bool) -> None:
    """Hooks of transformers and accelerate do not keep them there; those of others do."""
    model, sizes = tiny_llama(), set()
    model(**BATCH, output_hidden_states=True)
    add_hook_to_module(model.model.layers[2], AlignDevicesHook())

    def add_size(module: Any, args: Any) -> None:
        sizes.add(len(args[0]))

    add_size.__module__ = "torch"
    model.lm_head.register_forward_pre_hook(add_size)
    if has_hook_of_others:
        model.model.norm.register_forward_hook(lambda *_: None)
    assert_serves_until_each_end(model, new_spec())
    assert sizes == ({3} if has_hook_of_others else {3, 2, 1})


COMPILED: dict[str, Callable[[Any], Any]] = {
    "object": lambda model: torch.compile(model, backend="eager"),
    "in place": lambda model: model.compile(backend="eager") or model,
    "forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")) or model,
    "layers": lambda model: [layer.compile(backend="eager") for layer in model.model.layers[1:3]] and model,
}


@pytest.mark.every_run("exit-layers")
@pytest.mark.parametrize("compiled", COMPILED)
def test_compiled(spec: SelfSpec, compiled: str) -> None:
    plain, model = tiny_llama(4, factor=0.5), COMPILED[compiled](tiny_llama(4, factor=0.5))
    assert_serves(model, spec, plain)
    # Plain generate goes on with the compiled forward.
    assert torch.equal(model.generate(**ROW, max_new_tokens=2), plain.generate(**ROW, max_new_tokens=2))


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
def test_accelerate(llama: LlamaForCausalLM, spec: SelfSpec, tmp_path: Path) -> None:
    """Over the CPU and the disk, by forwards on instances, which run below ours and stay the same objects."""
    places = {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(6)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = dispatch_model(tiny_llama(factor=0.5), device_map=places, main_device="cpu", offload_dir=tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert sum("forward" in vars(module) for module in model.modules()) > 6
    with unchanged(model):
        assert_serves(model, spec, llama)
    assert torch.equal(model.generate(**ROW, max_new_tokens=8), llama.generate(**ROW, max_new_tokens=8))


def test_torchao_int8(llama: LlamaForCausalLM) -> None:
    model = tiny_llama(factor=0.5)
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is a test extra that not all platforms have"
    )
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    assert not torch.equal(model(**ROW).logits, llama(**ROW).logits)
    assert_serves(model, SPECS["tree"])
