"""Models as trainers leave them: training mode, gradient checkpointing, the cache switched off in the config."""

import warnings
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.machine import Machine
from helpers.models import BATCH, ragged_batch, tiny_llama
from hf_selfspec import EarlyExit, FixedLength, OnTheFlySearch, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.tools.audits import differences_of, new_tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing:FutureWarning",  # older versions of transformers and PEFT go by these names
    "ignore:.*in training mode with gradient checkpointing",  # told once
    "ignore:.*(cannot take|are padded on the right)",
    "ignore:None of the inputs have requires_grad=True",
)

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
SPECS = {
    "exit": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
    "skip": SelfSpec(draft=SkipLayers(attention=[1], mlp=[2]), stop=FixedLength(3)),
    "tree": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=TopKTree(((0.9999, 3), (1.0, 1)))),
    "search": SelfSpec(draft=SkipLayers(search=OnTheFlySearch(8, budget=1.0))),
}


def in_training(model: PreTrainedModel, reentrant: bool = False, dropout: float = 0.0) -> PreTrainedModel:
    """The model as a trainer leaves it."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
        for name in ("attention_dropout", "dropout", "activation_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, dropout)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.config.use_cache = False
    return model


def flags(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """What a call must leave as it was."""
    names = ("training", "gradient_checkpointing", "_gradient_checkpointing_func", "forward")
    return {path: tuple(module.__dict__.get(name) for name in names) for path, module in model.named_modules()}


def check_as_without_a_cache(model: Any, batch: dict[str, torch.Tensor] = BATCH, draft: str = "exit") -> None:
    """The tokens are those of generate without a cache, which is how checkpointing leaves plain generate right."""
    before = flags(model)
    expected = model.generate(**batch, **OPTIONS, use_cache=False)
    assert torch.equal(model.generate(**batch, **OPTIONS, assistant=SPECS[draft]), expected)
    assert flags(model) == before


@pytest.mark.every_run("(llama|lora)-(exit|search)|bloom-exit")
@pytest.mark.parametrize("draft", SPECS)
@pytest.mark.parametrize("name", ["llama", "lora", "gpt2", "opt", "bloom", "gpt_neo", "mixtral"])
def test_checkpointing_is_suspended(name: str, draft: str) -> None:
    """Also in calls that are left to transformers, such as those with prompts that are padded on the right; the model
    can be trained on."""
    model: Any = in_training(build("llama" if name == "lora" else name), reentrant=draft == "skip")
    if name == "lora":
        config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config).train()
        model.enable_input_require_grads()
    check_as_without_a_cache(model, draft=draft)
    if draft == "exit" and name in ("llama", "lora"):
        check_as_without_a_cache(model, {name: value.flip(1) for name, value in BATCH.items()})
        model(**BATCH, labels=BATCH["input_ids"]).loss.backward()
        learning = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        assert sum(gradient is not None for gradient in learning) == len(learning)


def test_checkpointing_of_some_layers_comes_back_after_an_error() -> None:
    model = in_training(tiny_llama())
    model.model.layers[1].gradient_checkpointing = False
    before = flags(model)
    model.model.layers[4].register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        model.generate(**BATCH, **OPTIONS, assistant=SPECS["exit"])
    assert flags(model) == before


@pytest.mark.usefixtures("no_warnings_yet")
def test_dropout_stays_on_and_the_user_is_told_once() -> None:
    """Plain generate does not leave training mode, so dropout is part of the model that is sampled from."""
    model = in_training(build("gpt2"), dropout=0.3)
    modes: set[tuple[bool, bool]] = set()
    for layer in model.transformer.h:
        layer.register_forward_pre_hook(lambda module, _: modes.add((module.training, module.gradient_checkpointing)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ids = model.generate(**BATCH, **OPTIONS, assistant=SPECS["exit"])
    assert modes == {(True, False)}
    assert ids.shape == (3, 9 + 16)
    (told,) = [str(warning.message) for warning in caught if "gradient checkpointing" in str(warning.message)]
    assert "generate(use_cache=False)" in told
    assert "model.eval()" in told


def test_cache_switched_off_by_the_model() -> None:
    """As in MPT's default configuration; the tokens are the same with a cache."""
    model = build("mpt", use_cache=False)
    assert model.generation_config.use_cache is False
    call: dict[str, Any] = {**ragged_batch(), **OPTIONS, "eos_token_id": None, "return_dict_in_generate": True}
    expected = model.generate(**call)
    for argument in ("assistant", "custom_generate"):
        output = model.generate(**call, **{argument: SPECS["exit"]})
        assert torch.equal(output.sequences, expected.sequences)
        assert output.past_key_values is expected.past_key_values is None
    assert model.generation_config.use_cache is False


@pytest.mark.every_run("(exit|search)-ragged batch|tree-one row")
@pytest.mark.parametrize("inputs", [ragged_batch((12,)), BATCH], ids=["one row", "ragged batch"])
@pytest.mark.parametrize("draft", [*SPECS, "captured"])
def test_parts_run_in_the_mixed_precision_of_the_whole(
    draft: str, inputs: dict[str, torch.Tensor], machine: Machine
) -> None:
    """As accelerate leaves it for ``bf16=True``: autocast is around the forward of the instance."""
    model = tiny_llama(factor=0.5)
    model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)
    if draft == "captured":
        machine.graphs_are_taken()
    ids = model.generate(**inputs, **OPTIONS, assistant=SPECS.get(draft, SelfSpec(EarlyExit(2), FixedLength(3))))
    ours = new_tokens(model, ids, inputs["input_ids"].shape[1])
    for difference in differences_of(model, inputs, OPTIONS, ours):
        assert difference.margin < 8 * torch.finfo(torch.bfloat16).eps
