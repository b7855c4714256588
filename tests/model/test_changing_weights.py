"""Models whose weights change between calls, as in a training with rollouts: what is known of them only drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

from helpers.machine import Machine
from helpers.models import BATCH, ROW, tiny_llama
from helpers.processes import peft_calls_old_name
from helpers.sampling import SAMPLES, SIGNIFICANCE, exact_joint, p_value, sample
from helpers.sampling import llama as few_tokens
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers

pytestmark = peft_calls_old_name

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def optimizer_step(model: Any) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(input_ids=ROW["input_ids"], labels=ROW["input_ids"]).loss.backward()
    torch.optim.AdamW(parameters, lr=0.02).step()
    model.zero_grad()


def other_parameters(model: Any) -> None:
    model.load_state_dict({name: value * 1.2 for name, value in model.state_dict().items()}, assign=True)


def merging(model: Any) -> None:
    """An adapter, or what it was merged into; what it has learned meanwhile counts."""
    if any(layer.merged_adapters for layer in model.modules() if hasattr(layer, "merged_adapters")):
        model.unmerge_adapter()
        optimizer_step(model)
    model.merge_adapter()


def other_activation(model: Any) -> None:
    """Neither has a value that tells them apart."""
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU() if isinstance(layer.mlp.act_fn, torch.nn.ReLU) else torch.nn.ReLU()


def specs() -> dict[str, SelfSpec]:
    return {
        "default": SelfSpec(),
        "exit": SelfSpec(EarlyExit(3), FixedLength(3)),
        "skip": SelfSpec(SkipLayers(attention=[4], mlp=[3]), FixedLength(3)),
        "captured": SelfSpec(EarlyExit(3), FixedLength(3)),
    }


@pytest.mark.every_run("optimizer_step-default|other_parameters-skip")
@pytest.mark.parametrize("kind", specs())
@pytest.mark.parametrize("change", [optimizer_step, other_parameters, other_activation, merging])
def test_the_ids_are_those_of_the_weights_of_the_moment(
    kind: str, change: Callable[[Any], None], machine: Machine
) -> None:
    model, spec = tiny_llama(factor=0.5), specs()[kind]
    if change is merging:
        lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, lora).eval()
    if kind == "captured":
        machine.graphs_are_taken()
    seen = []
    for _ in range(4):
        for inputs in (ROW,) if kind == "captured" else (BATCH, ROW):  # graphs are made for each shape
            expected = model.generate(**inputs, **OPTIONS)
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=spec), expected)
        seen.append(expected)
        change(model)
    assert not torch.equal(seen[0], seen[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "exit"])
def test_the_distribution_is_that_of_the_weights_of_the_moment(kind: str) -> None:
    """Rollouts: what other weights have sampled is in the store, and drafts come from it."""
    model, spec = copy.deepcopy(few_tokens()), specs()[kind]
    sample(spec, model, rows=8, calls=20)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    sequences, acceptance_rate = sample(spec, model, rows=8, calls=SAMPLES // 16)
    assert p_value(sequences, exact_joint(model, [])) > SIGNIFICANCE
    assert acceptance_rate > 0
    assert p_value(sequences, exact_joint(few_tokens(), [])) < SIGNIFICANCE
