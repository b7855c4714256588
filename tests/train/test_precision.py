"""Checkpointing, low precision, compilation and LoRA change nothing of the loss."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from helpers.architectures import build
from helpers.distributed_training import CHECKPOINTING, LAYERS, tiny, trainer, weights
from helpers.train.by_hand import BOTH, ByHand, assert_close, history, rotational_shares, train
from hf_selfspec import EarlyExitLoss


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    plain = train(tmp_path, BOTH["both"]())
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
    saving = train(tmp_path, BOTH["both"](), **options)
    assert all(layer.gradient_checkpointing for layer in saving.model.model.layers)
    assert history(saving) == pytest.approx(history(plain), rel=1e-5)
    assert_close(weights(saving.model), weights(plain.model))


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Between all weights, seen as one vector."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return math.sqrt(sum((a.detach().float() - b.detach().float()).square().sum().item() for a, b in pairs))


def test_bf16(tmp_path: Path) -> None:
    """Close to float32, with master weights in float32 and without ones."""
    plain = train(tmp_path, BOTH["both"]())
    mixed = train(tmp_path, BOTH["both"](), bf16=True)
    pure = train(tmp_path, BOTH["both"](), tiny().to(torch.bfloat16))
    for run in (mixed, pure):
        assert history(run) == pytest.approx(history(plain), rel=0.02)
        assert history(run) != history(plain)
    assert {value.dtype for value in mixed.model.parameters()} == {torch.float32}
    assert {value.dtype for value in pure.model.parameters()} == {torch.bfloat16}
    assert distance(mixed.model, plain.model) < 0.2 * distance(tiny(), plain.model)


def test_exits_go_through_the_head_as_the_last_layer_does(tmp_path: Path) -> None:
    """In mixed precision the head runs in bfloat16 for all of them."""
    kinds: list[tuple[bool, torch.dtype]] = []
    model = tiny()
    model.lm_head.register_forward_hook(
        lambda module, args, output: kinds.append((torch.is_autocast_enabled("cpu"), output.dtype))
    )
    train(tmp_path, [EarlyExitLoss(1.0, None)], model, bf16=True)
    assert set(kinds) == {(True, torch.bfloat16)}
    assert len(kinds) == 3 * (1 + 2)  # steps; the last layer and those of the others that weigh something


def test_mixed_precision_of_a_projected_output(tmp_path: Path) -> None:
    """OPT-350m has a projection before its head, which autocast leaves in bfloat16."""
    model = build("opt")
    config = copy.deepcopy(model.config)
    config.word_embed_proj_dim = config.hidden_size // 2
    run = trainer(type(model)(config), [EarlyExitLoss(1.0, None)], tmp_path, bf16=True)
    run.train()
    assert history(run, "loss/exit_2")


# Where a graph breaks, dynamo looks at the gradients of tensors that were computed before.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_torch_compile(tmp_path: Path) -> None:
    """Traced and run without code generation: the hooks stay outside of the graphs."""
    plain = train(tmp_path, BOTH["both"]())
    with patch.dict(os.environ):  # in which TrainingArguments leave that other trainings are compiled, too
        compiled = train(tmp_path, BOTH["both"](), torch_compile=True, torch_compile_backend="eager")
    assert history(compiled) == pytest.approx(history(plain), rel=1e-5)
    assert_close(weights(compiled.model), weights(plain.model))


def with_lora(head: bool = False) -> PeftModel:
    """A tiny Llama with random adapters, or with adapters and a head that is trained in full."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"] if head else None,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(tiny(), config)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
@pytest.mark.parametrize("head", [False, True], ids=["adapters", "adapters and head"])
def test_lora(tmp_path: Path, head: bool) -> None:
    """Adapters (and a head that is trained) move as by hand; all other weights stay as they are, to the last bit."""
    before = weights(with_lora(head))
    expected = ByHand(with_lora(head), rotational_shares, p_max=0.6)
    run = train(tmp_path, BOTH["both"](), with_lora(head))
    found = weights(run.model)
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    assert_close(found, expected.weights)
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    # The adapters of the last layer's projections may get no gradient from a step, but each gets some in three.
    trained = {name for name in found if "lora_" in name or (head and "lm_head.modules_to_save" in name)}
    assert changed == trained
    assert len(trained) == LAYERS * 4 + head


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_lora_with_gradient_checkpointing(tmp_path: Path) -> None:
    plain = train(tmp_path, BOTH["both"](), with_lora(head=True))
    for reentrant in (False, True):
        options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
        saving = train(tmp_path, BOTH["both"](), with_lora(head=True), **options)
        assert_close(weights(saving.model), weights(plain.model))
