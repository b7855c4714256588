"""Training with the stock Trainer: what LayerSkip's formulas say, and nothing else changes."""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import build
from distributed_training import (
    CHECKPOINTING,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Row,
    rows,
    rows_put_back,
    tiny,
    trainer,
    weights,
)
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_selfspec
from hf_selfspec import (
    EarlyExitLoss,
    Gradual,
    LayerDropout,
    Rotational,
    SettingError,
    SettingTypeError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_selfspec.train import constant, even, exponential, loss_scale, losses
from hf_selfspec.train.layer_dropout import layer_scale

SEED = 42  # The Trainer's default, from which LayerDropout draws.
Weights = dict[str, torch.Tensor]


def assert_close(found: Weights, expected: Weights, rtol: float = 1e-4, atol: float = 3e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def history(ran: Any, key: str = "loss") -> list[float]:
    """The logged values of ``key``, step by step."""
    return [entry[key] for entry in ran.state.log_history if key in entry]


# The paper's formulas ------------------------------------------------------------------------------------------------


def test_loss_scale() -> None:
    """``e(l)`` of 6 layers by hand: half of 0, 1, 3, 6, 10, and for the last one 5 + half of 0+1+2+3+4."""
    assert [loss_scale(layer, 6, 0.5) for layer in range(6)] == [0.0, 0.5, 1.5, 3.0, 5.0, 10.0]
    assert [loss_scale(layer, 6, 1.0) for layer in range(6)] == [0.0, 1.0, 3.0, 6.0, 10.0, 15.0]
    assert [loss_scale(layer, 4, 0.0) for layer in range(4)] == [0.0, 0.0, 0.0, 3.0]
    assert [loss_scale(layer, 2, 1.0) for layer in range(2)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("callback", "step", "steps", "scales"),
    [
        (EarlyExitLoss(0.5, None), 0, 8, {0: 0.0, 1: 0.5, 2: 1.5, 3: 3.0, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, None), 7, 8, {0: 0.0, 1: 0.5, 2: 1.5, 3: 3.0, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, Rotational(2)), 4, 8, {0: 0.0, 2: 1.5, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, Rotational(2)), 5, 8, {1: 0.5, 3: 3.0, 5: 10.0}),
        (EarlyExitLoss(1.0, Rotational(16)), 17, 99, {1: 1.0, 5: 15.0}),
        (EarlyExitLoss(1.0, Rotational(16)), 9, 99, {5: 15.0}),
        (EarlyExitLoss(1.0, Gradual()), 0, 24, {5: 15.0}),
        (EarlyExitLoss(1.0, Gradual()), 5, 24, {3: 6.0, 4: 10.0, 5: 15.0}),
        (EarlyExitLoss(1.0, None, layers=[2, 5]), 0, 8, {1: 1.0, 4: 10.0, 5: 15.0}),
        (EarlyExitLoss(1.0, Rotational(2), layers=[2, 5]), 0, 8, {4: 10.0, 5: 15.0}),
        (EarlyExitLoss(0.5, None, [2], even), 0, 8, {1: 0.5, 5: 1.0}),
        (EarlyExitLoss(0.0, None), 0, 8, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 5.0}),
    ],
)
def test_loss_weights(callback: EarlyExitLoss, step: int, steps: int, scales: dict[int, float]) -> None:
    """``ẽ(t, l)`` is each enabled layer's share of all enabled scales."""
    total = sum(scales.values())
    found = callback.weights(step, steps, 6)
    assert found == pytest.approx({layer: scale / total for layer, scale in scales.items()})
    assert sum(found.values()) == pytest.approx(1.0)


def test_defaults_are_the_papers() -> None:
    """Fine-tuning on code: ``e_scale=1``, rotational with 16, ``p_max=0.1`` in all steps."""
    callback = EarlyExitLoss()
    assert (callback.e_scale, callback.curriculum, callback.layers) == (1.0, Rotational(16), None)
    assert LayerDropout().rates(3, 10, 3) == pytest.approx([0.0, 0.1 * (math.sqrt(2) - 1), 0.1])


def test_a_model_of_one_layer() -> None:
    assert EarlyExitLoss(1.0, None).weights(0, 8, 1) == {0: 1.0}
    assert LayerDropout(0.5).rates(0, 8, 1) == [0.0]


def test_rotational() -> None:
    """Every third of 7 layers, one further each step, and round again."""
    enabled = [sorted(Rotational(3).enabled(step, 100, 7)) for step in range(4)]
    assert enabled == [[0, 3, 6], [1, 4], [2, 5], [0, 3, 6]]
    assert [sorted(Rotational(8).enabled(step, 100, 6)) for step in (5, 6, 7, 8)] == [[5], [], [], [0]]
    assert Rotational(1).enabled(5, 100, 4) == {0, 1, 2, 3}


def test_gradual() -> None:
    """4 layers in 16 steps: one more every 16 / (2 * 4) = 2 steps, all of them before half-way is over."""
    counts = [len(Gradual().enabled(step, 16, 4)) for step in range(16)]
    assert counts == [1, 1, 2, 2, 3, 3, *[4] * 10]
    assert Gradual().enabled(4, 16, 4) == {1, 2, 3}
    assert Gradual().enabled(0, 0, 4) == {3}


def test_dropout_rates() -> None:
    """``p = S(t) D(l) p_max`` with the powers of two that ``e^{x ln 2}`` are."""
    powers = [2**0.0 - 1, 2**0.25 - 1, 2**0.5 - 1, 2**0.75 - 1, 1.0]
    assert [layer_scale(layer, 5) for layer in range(5)] == pytest.approx(powers)
    assert [exponential(step, 5) for step in range(5)] == pytest.approx(powers)
    assert [constant(step, 5) for step in range(5)] == [1.0] * 5
    assert exponential(0, 1) == 0.0
    assert LayerDropout(0.2).rates(0, 5, 5) == pytest.approx([0.2 * power for power in powers])
    rates = LayerDropout(0.2, exponential).rates(2, 5, 5)
    assert rates == pytest.approx([0.2 * (math.sqrt(2) - 1) * power for power in powers])
    assert LayerDropout(0.2, lambda step, steps: step / steps).rates(1, 4, 2) == pytest.approx([0.0, 0.05])


# By hand -------------------------------------------------------------------------------------------------------------


def exit_loss(model: Any, batch: Row, exit_layer: int) -> torch.Tensor:
    """Summed cross entropy behind the first ``exit_layer`` layers, from the hidden states that the model gives out."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    output = inner.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True, use_cache=False
    )
    if exit_layer == inner.config.num_hidden_layers:
        logits = inner.lm_head(output.last_hidden_state)
    else:
        logits = inner.lm_head(inner.model.norm(output.hidden_states[exit_layer]))
    if inner.config.model_type == "cohere":
        logits = logits * 0.25
    elif inner.config.model_type == "granite":
        logits = logits / 2.0
    elif inner.config.model_type == "gemma2":
        logits = 2.0 * torch.tanh(logits / 2.0)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def stacked(samples: Sequence[Row]) -> Row:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def targets(batch: Row) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def stays(step: int, rows_in_step: int, p_max: float) -> np.ndarray:
    """``[b, L]`` which rows run through which of 4 layers: drawn from the seed and the step, row by row."""
    rates = p_max * np.array([0.0, 2 ** (1 / 3) - 1, 2 ** (2 / 3) - 1, 1.0])
    return np.random.default_rng([SEED, step]).random((rows_in_step, 4)) >= rates


class ByHand:
    """Gradient descent written out, on four rows in a step.

    Args:
        shares: weight of the exit after each number of layers, for each step.
        copies: processes among which the rows are divided, which drop the same of their rows.

    Attributes:
        losses: ``J`` of each step.
        exits: for each step the mean cross entropy of each exit that counts.
    """

    def __init__(
        self, model: Any, shares: Callable[[int], dict[int, float]], steps: int = 3, p_max: float = 0.0, copies: int = 1
    ) -> None:
        self.losses: list[float] = []
        self.exits: list[dict[int, float]] = []
        self.targets: list[int] = []
        model.train()
        data = rows(16)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for step in range(steps):
            samples = stacked([data[index % 16] for index in range(step * 4, step * 4 + 4)])
            kept = np.concatenate([stays(step, 4 // copies, p_max)] * copies)
            count = targets(samples)
            inner = model.get_base_model() if isinstance(model, PeftModel) else model
            with rows_put_back(inner.model.layers, kept):
                exits = {layer: exit_loss(model, samples, layer) / count for layer in shares(step)}
            loss = torch.stack([share * exits[layer] for layer, share in shares(step).items()]).sum()
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        parameter -= 0.05 * gradient
            self.losses.append(loss.item())
            self.exits.append({layer: value.item() for layer, value in exits.items()})
            self.targets.append(count)
        self.weights = weights(model)


# Exit layers E of 4 layers with e(l) = 0, 1, 3 and 3 + 3 (e_scale=1).
ALL = {2: 0.1, 3: 0.3, 4: 0.6}


def rotational_shares(step: int) -> dict[int, float]:
    """``Rotational(2)``: the layers 0, 2 and the last one, then 1 and 3; layer 0 weighs nothing."""
    return {3: 3 / 9, 4: 6 / 9} if step % 2 == 0 else {2: 1 / 7, 4: 6 / 7}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("curriculum", "shares"), [(None, lambda step: ALL), (Rotational(2), rotational_shares)], ids=["all", "rotational"]
)
def test_training(tmp_path: Path, tied: bool, curriculum: Any, shares: Callable[[int], dict[int, float]]) -> None:
    """Losses, logs and weights after three steps are those of gradient descent on the formula."""
    expected = ByHand(tiny(tied=tied), shares)
    run = trainer(tiny(tied=tied), [EarlyExitLoss(1.0, curriculum)], tmp_path)
    run.train()
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    assert_close(weights(run.model), expected.weights)
    assert len(set(expected.targets)) > 1
    plain = ByHand(tiny(tied=tied), lambda step: {4: 1.0})
    assert abs(plain.losses[0] - expected.losses[0]) > 1e-3
    assert (
        plain.weights["model.layers.0.mlp.up_proj.weight"] - expected.weights["model.layers.0.mlp.up_proj.weight"]
    ).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["cohere", "granite", "gemma2"])
def test_heads_with_scale_and_soft_cap(tmp_path: Path, name: str) -> None:
    """The exits' logits get what the model does to its own (the numbers are in ``architectures.py``)."""
    expected = ByHand(build(name), lambda step: ALL, steps=2)
    run = trainer(build(name), [EarlyExitLoss(1.0, None)], tmp_path, max_steps=2)
    run.train()
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    assert_close(weights(run.model), expected.weights, atol=1e-5)


class LlamaWithItsOwnLoss(LlamaForCausalLM):
    """Computes its loss without ``loss_function``, as a mean over the batch."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> CausalLMOutputWithPast:
        logits = super().forward(input_ids, attention_mask=attention_mask).logits
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_model_with_its_own_loss(tmp_path: Path) -> None:
    expected = ByHand(tiny(), lambda step: ALL)
    run = trainer(tiny(kind=LlamaWithItsOwnLoss), [EarlyExitLoss(1.0, None)], tmp_path)
    run.train()
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    assert_close(weights(run.model), expected.weights)


def test_gradients(tmp_path: Path) -> None:
    """Before the optimizer sees them."""
    found: Weights = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            found.update({name: value.grad.clone() for name, value in model.named_parameters()})

    trainer(tiny(), [EarlyExitLoss(0.5, None), Gradients()], tmp_path, max_steps=1).train()
    model = tiny()
    samples = stacked(rows(4))
    # e(l) = 0, 0.5, 1.5 and 3 + 1.5.
    shares = {2: 0.5 / 6.5, 3: 1.5 / 6.5, 4: 4.5 / 6.5}
    sum(share * exit_loss(model, samples, layer) / targets(samples) for layer, share in shares.items()).backward()
    assert_close(found, {name: value.grad for name, value in model.named_parameters()})


def test_chosen_layers_and_no_weight_at_all(tmp_path: Path) -> None:
    """``layers`` leaves the others out; ``e_scale=0`` is plain training, to the last bit."""
    one = trainer(tiny(), [EarlyExitLoss(1.0, None, layers=[2])], tmp_path)
    one.train()
    expected = ByHand(tiny(), lambda step: {2: 1 / 7, 4: 6 / 7})
    assert history(one) == pytest.approx(expected.losses, rel=1e-5)
    assert {key for entry in one.state.log_history for key in entry if "exit" in key} == {"loss/exit_2", "loss/exit_4"}
    without, plain = trainer(tiny(), [EarlyExitLoss(0.0)], tmp_path), trainer(tiny(), [], tmp_path)
    without.train()
    plain.train()
    assert history(without) == history(plain)
    assert_equal(weights(without.model), weights(plain.model))


# Gradient accumulation -----------------------------------------------------------------------------------------------

BOTH = {
    "exits": lambda: [EarlyExitLoss(1.0, Rotational(2))],
    "dropout": lambda: [LayerDropout(0.6)],
    "both": lambda: [EarlyExitLoss(1.0, Rotational(2)), LayerDropout(0.6)],
}


def with_an_empty_row() -> list[Row]:
    """Rows of which one has no target at all, alone in its batch when batches are of one row."""
    data = rows(16)
    data[5]["labels"][:] = -100
    return data


@pytest.mark.parametrize("kind", BOTH)
def test_gradient_accumulation(tmp_path: Path, kind: str) -> None:
    """Four rows at once, two and two, or one after the other: the same training."""
    together = trainer(tiny(), BOTH[kind](), tmp_path, with_an_empty_row())
    together.train()
    for batch in (2, 1):
        apart = trainer(
            tiny(),
            BOTH[kind](),
            tmp_path,
            with_an_empty_row(),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=4 // batch,
        )
        apart.train()
        assert_close(weights(apart.model), weights(together.model))
        for key in ("loss", "loss/exit_4") if kind != "dropout" else ("loss",):
            assert len(history(apart, key)) == 3
            assert history(apart, key) == pytest.approx(history(together, key), rel=1e-5)


# Precision, checkpointing, compilation -------------------------------------------------------------------------------


def train(folder: Path, callbacks: Sequence[TrainerCallback], model: Any = None, **options: Any) -> Any:
    run = trainer(tiny() if model is None else model, callbacks, folder, **options)
    run.train()
    return run


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing(tmp_path: Path, kind: str, reentrant: bool) -> None:
    plain = train(tmp_path, BOTH[kind]())
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
    saving = train(tmp_path, BOTH[kind](), **options)
    assert all(layer.gradient_checkpointing for layer in saving.model.model.layers)
    assert history(saving) == pytest.approx(history(plain), rel=1e-5)
    assert_close(weights(saving.model), weights(plain.model))


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Between all weights, seen as one vector."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return math.sqrt(sum((a.detach().float() - b.detach().float()).square().sum().item() for a, b in pairs))


@pytest.mark.parametrize("kind", BOTH)
def test_bf16(tmp_path: Path, kind: str) -> None:
    """Close to float32, with master weights in float32 and without ones."""
    plain = train(tmp_path, BOTH[kind]())
    mixed = train(tmp_path, BOTH[kind](), bf16=True)
    pure = train(tmp_path, BOTH[kind](), tiny().to(torch.bfloat16))
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
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_torch_compile(tmp_path: Path) -> None:
    """Traced and run without code generation: the hooks stay outside of the graphs."""
    plain = train(tmp_path, BOTH["both"]())
    with patch.dict(os.environ):  # in which TrainingArguments leave that other trainings are compiled, too
        compiled = train(tmp_path, BOTH["both"](), torch_compile=True, torch_compile_backend="eager")
    assert history(compiled) == pytest.approx(history(plain), rel=1e-5)
    assert_close(weights(compiled.model), weights(plain.model))


# LoRA ----------------------------------------------------------------------------------------------------------------


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


# Evaluation, checkpoints ---------------------------------------------------------------------------------------------


def test_evaluation(tmp_path: Path) -> None:
    """Its loss is the plain model's, and the training goes on as if there had been none."""
    snapshots: list[dict[str, torch.Tensor]] = []

    class Snapshot(TrainerCallback):
        def on_evaluate(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            snapshots.append(weights(model))

    evaluated = rows(6, seed=9)
    run = trainer(
        tiny(),
        [*BOTH["both"](), Snapshot()],
        tmp_path,
        settings={"eval_dataset": evaluated},
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        per_device_eval_batch_size=6,
    )
    run.train()
    unevaluated = train(tmp_path, BOTH["both"]())
    assert_equal(weights(run.model), weights(unevaluated.model))
    for key in ("loss", "loss/exit_2", "loss/exit_3", "loss/exit_4"):
        assert history(run, key) == history(unevaluated, key)
    batch = stacked(evaluated)
    found = history(run, "eval_loss")
    assert len(found) == len(snapshots) == 4
    for loss, snapshot in zip(found, snapshots, strict=True):
        model = tiny().eval()
        model.load_state_dict(snapshot)
        with torch.no_grad():
            assert loss == pytest.approx(exit_loss(model, batch, LAYERS).item() / targets(batch), rel=1e-5)
    assert not any("exit" in key for entry in run.state.log_history if "eval_loss" in entry for key in entry)


def test_resume(tmp_path: Path) -> None:
    """From a checkpoint in the middle, with shuffled data and Adam: the same weights and the same logs."""
    options = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "random",
        "save_strategy": "steps",
        "save_steps": 2,
    }

    def callbacks() -> list[TrainerCallback]:
        return [EarlyExitLoss(1.0, Gradual()), LayerDropout(0.6, exponential)]

    whole = train(tmp_path / "whole", callbacks(), **options)
    resumed = trainer(tiny(seed=5), callbacks(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_equal(weights(resumed.model), weights(whole.model))
    keys = {key for entry in whole.state.log_history for key in entry if "loss" in key and key != "train_loss"}
    assert keys == {"loss", "loss/exit_2", "loss/exit_3", "loss/exit_4"}
    for key in keys:
        assert history(resumed, key) == history(whole, key)


def test_saved_models_are_ordinary(tmp_path: Path) -> None:
    """A checkpoint of a training and what is saved after it: the keys of before, loadable without this package."""
    model = tiny(tied=True)
    keys = list(model.state_dict())
    train(tmp_path / "run", BOTH["both"](), model, save_strategy="steps", save_steps=3).save_model(tmp_path / "end")
    model.save_pretrained(tmp_path / "model")
    assert list(model.state_dict()) == keys
    model.eval()
    ids = stacked(rows(2))["input_ids"]
    for folder in (tmp_path / "model", tmp_path / "end", tmp_path / "run" / "checkpoint-3"):
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())
        assert type(loaded) is LlamaForCausalLM
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert "loss" not in (folder / "config.json").read_text()


# Everything as before ------------------------------------------------------------------------------------------------


def attributes_of(model: torch.nn.Module) -> dict[str, Any]:
    """Every attribute of every module but its mode and accelerate's mark, and how many hooks it has."""
    found: dict[str, Any] = {}
    ignored = ("training", "_is_accelerate_prepared")
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in module.__dict__.items() if key not in ignored}
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            found[f"{name}.{kind} (number)"] = len(getattr(module, kind))
    return found


@contextmanager
def left_as_it_was(run: Any) -> Iterator[None]:
    """Asserts that the model and the Trainer have afterwards what they had, object by object."""
    before, keys = attributes_of(run.model), set(run.__dict__)
    yield
    after = attributes_of(run.model)
    assert after.keys() == before.keys()
    assert [key for key, value in before.items() if after[key] is not value and after[key] != value] == []
    assert not ({"log", "compute_loss"} - keys) & run.__dict__.keys()
    assert all(getattr(callback, "_run", None) is None for callback in run.callback_handler.callbacks)


class BoomError(Exception):
    pass


class Bomb(TrainerCallback):
    """Raises when called for the ``fuse``-th time at its place: a module, an event of the Trainer or the data."""

    def __init__(self, place: str, fuse: int, error: type[BaseException] = BoomError) -> None:
        self.fuse, self.error = fuse, error
        if place.startswith("on_"):
            setattr(self, place, self.tick)

    def tick(self, *args: Any, **kwargs: Any) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise self.error


class Mined(torch.utils.data.Dataset):
    """Rows that tell a bomb when they are read."""

    def __init__(self, bomb: Bomb | None) -> None:
        self.bomb, self.rows = bomb, rows(16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if self.bomb is not None:
            self.bomb.tick()
        return self.rows[index]


def changed_while_it_runs(run: Any) -> bool:
    """What the tests find restored is really touched."""
    layers = run.model.model.layers
    return (
        all("forward" in layer.__dict__ and layer._forward_hooks for layer in layers)
        and {"log", "compute_loss"} <= run.__dict__.keys()
    )


@pytest.mark.parametrize("own", [(), ("log",), ("compute_loss",)], ids=str)
def test_after_a_training(tmp_path: Path, own: tuple[str, ...]) -> None:
    """Also where the Trainer's methods were replaced on the instance before."""
    seen: list[bool] = []

    class Look(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(changed_while_it_runs(run))

    callbacks = BOTH["both"]()
    run = trainer(tiny(), [*callbacks, Look()], tmp_path)
    mine = {name: getattr(run, name) for name in own}
    run.__dict__.update(mine)
    with left_as_it_was(run):
        run.train()
    assert seen == [True] * 3
    assert all(run.__dict__[name] is method for name, method in mine.items())
    again = trainer(tiny(), callbacks, tmp_path)
    again.train()
    assert_equal(weights(again.model), weights(run.model))
    assert history(again, "loss/exit_3") == history(run, "loss/exit_3")


@pytest.mark.parametrize(
    ("place", "fuse", "error"),
    [
        ("model", 2, BoomError),
        ("model.layers.2", 2, BoomError),
        ("model.layers.2", 3, KeyboardInterrupt),
        ("lm_head", 2, BoomError),
        ("lm_head", 3, BoomError),
        ("on_train_begin", 1, BoomError),
        ("on_step_begin", 2, BoomError),
        ("on_substep_end", 1, BoomError),
        ("on_pre_optimizer_step", 2, KeyboardInterrupt),
        ("on_step_end", 1, BoomError),
        ("on_log", 1, BoomError),
        ("on_evaluate", 1, BoomError),
        ("on_train_end", 1, BoomError),
        ("data", 7, BoomError),
    ],
)
def test_after_an_exception(tmp_path: Path, place: str, fuse: int, error: type[BaseException]) -> None:
    """Wherever it comes from; the same callbacks then train as if nothing had been."""
    callbacks = BOTH["both"]()
    bomb = Bomb(place, fuse, error)
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    model = tiny()
    if "." in place or place in ("model", "lm_head"):
        model.get_submodule(place).register_forward_pre_hook(bomb.tick)
    settings = {"eval_dataset": rows(2)}
    run = trainer(model, [*callbacks, bomb], tmp_path, Mined(bomb if place == "data" else None), settings, **options)
    with left_as_it_was(run), pytest.raises(error):
        run.train()
    assert bomb.fuse == 0
    bomb.fuse = -1
    model.load_state_dict(tiny().state_dict())
    again = trainer(model, callbacks, tmp_path, **options, settings=settings)
    again.train()
    fresh = trainer(tiny(), BOTH["both"](), tmp_path, **options, settings=settings)
    fresh.train()
    assert_equal(weights(again.model), weights(fresh.model))
    assert history(again, "loss/exit_3") == history(fresh, "loss/exit_3")


def test_forwards_that_others_put_there(tmp_path: Path) -> None:
    """As accelerate does it: they run underneath and stay the same objects."""
    model, calls = tiny(), []

    def watched(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_of_another(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return forward(*args, **kwargs)

        return forward_of_another

    names = ("model", "model.layers.1", "lm_head")
    for name in names:
        module = model.get_submodule(name)
        module.forward = watched(name, module.forward)
    run = trainer(model, BOTH["both"](), tmp_path)
    with left_as_it_was(run):
        run.train()
    assert set(calls) == set(names)
    assert_equal(weights(model), weights(train(tmp_path, BOTH["both"]()).model))


def test_a_loss_function_that_was_there(tmp_path: Path) -> None:
    """Set by the user to the one that is trained with anyway."""
    model = tiny()
    model.loss_function = model.loss_function
    run = trainer(model, BOTH["both"](), tmp_path)
    with left_as_it_was(run):
        run.train()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: [EarlyExitLoss(1.0, None)], lambda: [LayerDropout(0.9)]], ids=["exits", "dropout"]
)
def test_other_threads(tmp_path: Path, make: Callable[[], list[TrainerCallback]], checkpointed: bool) -> None:
    """Forwards of the same model in another thread, in the middle of one that trains, go their own way."""
    options = {CHECKPOINTING: True} if checkpointed else {}
    logits: list[torch.Tensor] = []
    ids = stacked(rows(2))["input_ids"]
    model, trains = tiny(), threading.current_thread()

    def serve(module: Any, args: Any) -> None:
        if threading.current_thread() is trains:
            thread = threading.Thread(target=lambda: logits.append(model(ids).logits.detach()))
            thread.start()
            thread.join()

    model.model.layers[3].register_forward_pre_hook(serve)
    train(tmp_path, make(), model, **options)
    assert_equal(weights(model), weights(train(tmp_path, make(), **options).model))
    assert len(logits) >= 3
    torch.testing.assert_close(logits[0], tiny()(ids).logits.detach())


# Logs ----------------------------------------------------------------------------------------------------------------


def test_logged_exits(tmp_path: Path) -> None:
    """Nats per token of each exit, mean over the tokens of the steps since the last log in which it was on."""
    seen: list[dict[str, float]] = []

    class Report(TrainerCallback):
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    run = trainer(tiny(), [EarlyExitLoss(1.0, Rotational(2)), Report()], tmp_path, max_steps=6, logging_steps=3)
    run.train()
    hand = ByHand(tiny(), rotational_shares, steps=6)
    expected = []
    for steps in (range(3), range(3, 6)):
        entry = {}
        for layer in (2, 3, 4):
            on = [step for step in steps if layer in hand.exits[step]]
            tokens = sum(hand.targets[step] for step in on)
            entry[f"loss/exit_{layer}"] = sum(hand.exits[step][layer] * hand.targets[step] for step in on) / tokens
        expected.append(entry)
    found = [{key: value for key, value in entry.items() if "exit" in key} for entry in run.state.log_history]
    assert found == [pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=1e-5), {}]
    assert [{key: value for key, value in entry.items() if "exit" in key} for entry in seen] == found


# The exits' logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_logits_exist_for_a_chunk_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """The head sees the exits' states in chunks, each target once for each exit, and no ignored label."""
    sizes: list[torch.Size] = []
    plain = train(tmp_path, [EarlyExitLoss(1.0, None)])
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", chunk * VOCABULARY + VOCABULARY // 2)
    model = tiny()
    model.lm_head.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape))
    run = train(tmp_path, [EarlyExitLoss(1.0, None)], model)
    assert_close(weights(run.model), weights(plain.model))
    assert history(run) == pytest.approx(history(plain), rel=1e-5)
    assert sizes.count(torch.Size([4, WIDTH, 16])) == 3
    chunks = [size for size in sizes if size != torch.Size([4, WIDTH, 16])]
    assert {(size[0], size[2]) for size in chunks} == {(1, 16)}
    count = targets(stacked(rows(12)))
    assert sum(size[1] for size in chunks) == 2 * count < 2 * 12 * (WIDTH - 1)
    assert max(size[1] for size in chunks) == min(
        chunk, max(targets(stacked(rows(12)[at : at + 4])) for at in (0, 4, 8))
    )


def test_models_that_give_out_hidden_states(tmp_path: Path) -> None:
    """Callers get those of their own rows."""
    shapes: list[list[torch.Size]] = []
    model = tiny()
    model.config.output_hidden_states = True
    model.register_forward_hook(lambda module, args, out: shapes.append([state.shape for state in out.hidden_states]))
    run = train(tmp_path, BOTH["both"](), model)
    assert_equal(weights(run.model), weights(train(tmp_path, BOTH["both"]()).model))
    assert shapes == [[torch.Size([4, WIDTH, 16])] * (LAYERS + 1)] * 3


# Layer dropout -------------------------------------------------------------------------------------------------------


class RowsSeen(TrainerCallback):
    """Counts the rows that the layers' MLPs run on.

    Attributes:
        steps: for each training step the rows of each layer.
        evaluations: for each evaluated batch the same.
    """

    def __init__(self, model: Any) -> None:
        self.steps: list[list[int]] = []
        self.evaluations: list[list[int]] = []
        for index, layer in enumerate(model.model.layers):
            layer.mlp.register_forward_pre_hook(self._counter(index))
        self.model = model
        model.register_forward_pre_hook(self._start)

    def _start(self, module: Any, args: Any) -> None:
        (self.steps if module.training else self.evaluations).append([0] * len(self.model.model.layers))

    def _counter(self, index: int) -> Callable[..., None]:
        def count(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            (self.steps if module.training else self.evaluations)[-1][index] += args[0].shape[0]

        return count


def test_dropped_rows_leave_the_batch(tmp_path: Path) -> None:
    """Layers run on as many rows as stay; in evaluation on all."""
    model = tiny()
    seen = RowsSeen(model)
    run = trainer(
        model,
        [LayerDropout(0.9)],
        tmp_path,
        max_steps=12,
        settings={"eval_dataset": rows(3)},
        eval_strategy="steps",
        eval_steps=6,
    )
    run.train()
    assert seen.steps == [stays(step, 4, 0.9).sum(0).tolist() for step in range(12)]
    assert {counts[0] for counts in seen.steps} == {4}
    assert {counts[3] for counts in seen.steps} >= {0, 1}
    assert seen.evaluations == [[3] * LAYERS] * 2


@pytest.mark.parametrize("p_max", [0.6, 0.9])
def test_training_with_dropout(tmp_path: Path, p_max: float) -> None:
    """``x + M f(x)`` by hand, where ``M`` is 0 or 1 and nothing is scaled; beside exits and alone."""
    for callbacks, shares in (
        ([LayerDropout(p_max)], lambda step: {4: 1.0}),
        ([EarlyExitLoss(1.0, Rotational(2)), LayerDropout(p_max)], rotational_shares),
        ([LayerDropout(p_max), EarlyExitLoss(1.0, Rotational(2))], rotational_shares),
    ):
        expected = ByHand(tiny(), shares, p_max=p_max)
        run = train(tmp_path, callbacks)
        assert history(run) == pytest.approx(expected.losses, rel=1e-5)
        assert_close(weights(run.model), expected.weights)
    assert abs(expected.losses[0] - ByHand(tiny(), shares, steps=1).losses[0]) > 1e-3


@pytest.mark.parametrize("schedule", [constant, exponential])
def test_rates_in_the_long_run(tmp_path: Path, schedule: Any) -> None:
    """The share of dropped rows, within four standard deviations of its expectation."""
    steps, batch, p_max = 80, 8, 0.8
    model = tiny()
    seen = RowsSeen(model)
    train(tmp_path, [LayerDropout(p_max, schedule)], model, max_steps=steps, per_device_train_batch_size=batch)
    over_time = 1.0 if schedule is constant else np.mean([2 ** (step / (steps - 1)) - 1 for step in range(steps)])
    for layer in range(LAYERS):
        rate = p_max * over_time * (2 ** (layer / (LAYERS - 1)) - 1)
        dropped = 1 - sum(counts[layer] for counts in seen.steps) / (steps * batch)
        assert dropped == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / (steps * batch)))
    early, late = (sum(counts[3] for counts in seen.steps[part]) for part in (slice(0, 20), slice(60, 80)))
    assert (early > late + 40) == (schedule is exponential)


def test_no_dropout_is_plain_training(tmp_path: Path) -> None:
    without, plain = train(tmp_path, [LayerDropout(0.0)]), train(tmp_path, [])
    assert history(without) == history(plain)
    assert_equal(weights(without.model), weights(plain.model))


def test_seed(tmp_path: Path) -> None:
    """Another seed draws other rows."""
    one, other = train(tmp_path, [LayerDropout(0.6)]), train(tmp_path, [LayerDropout(0.6)], seed=SEED + 1)
    assert history(one)[0] != history(other)[0]


def test_embeddings_and_positions_as_inputs(tmp_path: Path) -> None:
    """Rows are counted where the rows are, also where positions have one row for all."""

    def collate(samples: list[Row]) -> Row:
        batch = stacked(samples)
        with torch.no_grad():
            embeddings = tiny().model.embed_tokens(batch["input_ids"])
        positions = torch.arange(WIDTH)[None]
        return {"position_ids": positions, "inputs_embeds": embeddings, "labels": batch["labels"]}

    model = tiny()
    seen = RowsSeen(model)
    train(tmp_path, [LayerDropout(0.6)], model, settings={"data_collator": collate})
    assert seen.steps == [stays(step, 4, 0.6).sum(0).tolist() for step in range(3)]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "error", "words"),
    [
        (lambda: EarlyExitLoss(-0.1), SettingError, ["e_scale", "-0.1", "0 and 1"]),
        (lambda: EarlyExitLoss(1.5), SettingError, ["e_scale", "1.5"]),
        (lambda: EarlyExitLoss(math.nan), SettingError, ["e_scale", "nan"]),
        (lambda: EarlyExitLoss("1.0"), SettingTypeError, ["e_scale", "'1.0'"]),
        (lambda: EarlyExitLoss(True), SettingTypeError, ["e_scale", "True"]),
        (
            lambda: EarlyExitLoss(curriculum=8),
            SettingTypeError,
            ["curriculum", "Rotational(R), Gradual() or None", "8"],
        ),
        (lambda: EarlyExitLoss(curriculum=Gradual), SettingTypeError, ["curriculum", "Gradual'>"]),
        (lambda: EarlyExitLoss(scale=0.5), SettingTypeError, ["scale", "0.5"]),
        (lambda: EarlyExitLoss(layers=3), SettingTypeError, ["layers", "3"]),
        (lambda: EarlyExitLoss(layers=[]), SettingTypeError, ["layers", "[]"]),
        (lambda: EarlyExitLoss(layers="23"), SettingTypeError, ["layers", "'23'"]),
        (lambda: EarlyExitLoss(layers=[1, 2.5]), SettingTypeError, ["layers", "[1, 2.5]"]),
        (lambda: EarlyExitLoss(layers=[True]), SettingTypeError, ["layers", "[True]"]),
        (lambda: EarlyExitLoss(layers=[2, 0]), SettingError, ["layers=[2, 0]", "start at 1"]),
        (lambda: Rotational(0), SettingError, ["Rotational", "0", "at least 1"]),
        (lambda: Rotational(2.0), SettingTypeError, ["Rotational", "2.0"]),
        (lambda: LayerDropout(1.0), SettingError, ["p_max", "1.0", "1 excluded"]),
        (lambda: LayerDropout(-0.1), SettingError, ["p_max", "-0.1"]),
        (lambda: LayerDropout(None), SettingTypeError, ["p_max", "None"]),
        (lambda: LayerDropout(schedule="exponential"), SettingTypeError, ["schedule", "'exponential'"]),
        (lambda: LayerDropout(schedule=float), SettingTypeError, ["schedule", "float"]),
        (lambda: LayerDropout(0.1, lambda t, steps: 2.0).rates(0, 8, 4), SettingError, ["schedule", "2.0"]),
    ],
)
def test_refused_settings(create: Callable[[], Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        create()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


class LlamaWithoutLayers(LlamaForCausalLM):
    """Says what follows each token from that token alone."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, VOCABULARY, **kwargs), logits=logits)


class NoTransformersModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        return {"loss": F.cross_entropy(self.head(input_ids).flatten(0, 1), labels.flatten())}


def with_own_loss_function() -> LlamaForCausalLM:
    model = tiny()
    model.loss_function = boom
    return model


def with_router_logits() -> PreTrainedModel:
    model = build("mixtral")
    model.config.output_router_logits = True
    return model


class Other(LayerDropout):
    """One beside the usual one."""


def with_flex_attention() -> LlamaForCausalLM:
    model = tiny()
    model.config._attn_implementation = "flex_attention"
    return model


class AnExitTooFar:
    def enabled(self, step: int, steps: int, num_layers: int) -> frozenset[int]:
        return frozenset([num_layers])


def every_exit() -> EarlyExitLoss:
    return EarlyExitLoss(curriculum=None)


def boom(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("called")


def mock_data_parallel(run: Any) -> None:
    run.args._n_gpu = 2


def mock_dft(run: Any) -> None:
    """As TRL's ``SFTConfig`` has it."""
    run.args.loss_type = "dft"


def take_the_labels(run: Any) -> None:
    run.train_dataset = [{"input_ids": row["input_ids"]} for row in rows(16)]


def with_virtual_tokens() -> PeftModel:
    return get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def nothing(run: Any) -> None:
    """Leaves the Trainer as it is."""


@pytest.mark.parametrize(
    ("create", "callback", "options", "prepare", "error", "words"),
    [
        (
            tiny,
            EarlyExitLoss,
            {"label_smoothing_factor": 0.1},
            nothing,
            UnsupportedOptionError,
            ["label_smoothing_factor=0.1"],
        ),
        (tiny, EarlyExitLoss, {"use_liger_kernel": True}, nothing, UnsupportedOptionError, ["use_liger_kernel=True"]),
        (tiny, EarlyExitLoss, {"compute_loss_func": boom}, nothing, UnsupportedOptionError, ["compute_loss_func"]),
        (tiny, EarlyExitLoss, {}, mock_data_parallel, UnsupportedOptionError, ["2 GPUs", "DataParallel", "torchrun"]),
        (tiny, LayerDropout, {}, mock_data_parallel, UnsupportedOptionError, ["2 GPUs", "DataParallel", "torchrun"]),
        (
            tiny,
            lambda: EarlyExitLoss(layers=[2, 5]),
            {},
            nothing,
            SettingError,
            ["EarlyExitLoss(layers)", "exit layer 5", "1 to 4"],
        ),
        (
            lambda: tiny(kind=LlamaWithoutLayers),
            every_exit,
            {},
            nothing,
            UnsupportedModelError,
            ["LlamaWithoutLayers", "no effect"],
        ),
        (tiny, EarlyExitLoss, {}, mock_dft, UnsupportedOptionError, ["loss_type='dft'"]),
        (tiny, EarlyExitLoss, {}, take_the_labels, UnsupportedOptionError, ["labels", "['input_ids']"]),
        (with_virtual_tokens, every_exit, {}, nothing, UnsupportedModelError, ["[4, 12]", "[4, 10]", "virtual tokens"]),
        (
            with_own_loss_function,
            EarlyExitLoss,
            {},
            nothing,
            UnsupportedModelError,
            ["LlamaForCausalLM", "function boom"],
        ),
        (with_router_logits, LayerDropout, {}, nothing, UnsupportedOptionError, ["output_router_logits=True"]),
        (with_flex_attention, LayerDropout, {}, nothing, UnsupportedOptionError, ["flex_attention", "'sdpa'"]),
        (NoTransformersModel, EarlyExitLoss, {}, nothing, SettingTypeError, ["NoTransformersModel"]),
        (NoTransformersModel, LayerDropout, {}, nothing, SettingTypeError, ["NoTransformersModel"]),
        (lambda: build("gpt_bigcode"), EarlyExitLoss, {}, nothing, UnsupportedModelError, ["GPTBigCodeForCausalLM"]),
        (lambda: build("gemma3n_text"), LayerDropout, {}, nothing, UnsupportedModelError, ["Gemma3nForCausalLM"]),
        (tiny, lambda: Other(0.1, lambda t, steps: 1.5), {}, nothing, SettingError, ["schedule", "1.5"]),
        (tiny, lambda: LayerDropout(0.1), {}, nothing, SettingError, ["more than one LayerDropout"]),
        (tiny, lambda: EarlyExitLoss(layers=[1]), {}, nothing, SettingError, ["layers=[1]", "trains no exit", "even"]),
        (
            tiny,
            lambda: EarlyExitLoss(scale=lambda layer, layers, e: layer - 1.5),
            {},
            nothing,
            SettingError,
            ["at least 0", "-1.5"],
        ),
        (
            tiny,
            lambda: EarlyExitLoss(curriculum=AnExitTooFar()),
            {},
            nothing,
            SettingError,
            ["enabled layer 4"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
def test_refused_trainings(
    tmp_path: Path,
    create: Callable[[], Any],
    callback: Callable[[], TrainerCallback],
    options: dict[str, Any],
    prepare: Callable[[Any], None],
    error: type[Exception],
    words: list[str],
) -> None:
    """By name, before any weight changes; the other callback is taken away again as well."""
    settings = {"compute_loss_func": options.pop("compute_loss_func")} if "compute_loss_func" in options else {}
    model = create()
    # Rates too small to drop any row.
    run = trainer(
        model,
        [LayerDropout(1e-9), callback()] if create is tiny else [callback()],
        tmp_path,
        settings=settings,
        **options,
    )
    prepare(run)
    before = weights(model)
    with left_as_it_was(run), pytest.raises(error) as caught:
        run.train()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert_equal(weights(model), before)


def test_callbacks_that_come_too_late_are_refused(tmp_path: Path) -> None:
    """What cannot change the loss any more must not look as if it did."""

    class Late(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            run.add_callback(EarlyExitLoss())

    run = trainer(tiny(), [Late()], tmp_path)
    with (
        left_as_it_was(run),
        pytest.raises(UnsupportedOptionError, match="has to be among the callbacks"),
    ):
        run.train()
    run = trainer(tiny(), [EarlyExitLoss()], tmp_path)
    hf_selfspec.uninstall()
    try:
        with left_as_it_was(run), pytest.raises(UnsupportedOptionError, match="`import hf_selfspec` wraps"):
            run.train()
    finally:
        hf_selfspec.install()


def test_trainings_without_these_callbacks_are_not_touched(tmp_path: Path) -> None:
    """All that is refused above is fine without them."""
    run = trainer(tiny(), [], tmp_path, label_smoothing_factor=0.1)
    run.train()
    assert len(history(run)) == 3
