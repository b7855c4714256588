"""Training with early-exit loss is gradient descent on LayerSkip's formula."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers.architectures import build
from helpers.distributed_training import LAYERS, VOCABULARY, WIDTH, rows, tiny, weights
from helpers.train.by_hand import (
    ALL,
    BOTH,
    ByHand,
    assert_close,
    assert_equal,
    exit_loss,
    history,
    rotational_shares,
    stacked,
    targets,
    train,
)
from hf_selfspec import EarlyExitLoss, Rotational
from hf_selfspec.train import exit_training, loss_scale


class LlamaWithItsOwnLoss(LlamaForCausalLM):
    """Computes its loss without ``loss_function``, as a mean over the batch."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> CausalLMOutputWithPast:
        logits = super().forward(input_ids, attention_mask=attention_mask).logits
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)


DISTILS = {"self_distillation": True}


@pytest.mark.parametrize(
    ("start", "settings", "shares"),
    [
        (tiny, {}, lambda step: ALL),
        (tiny, {"curriculum": Rotational(2)}, rotational_shares),
        (tiny, {"layers": [2]}, lambda step: {2: 1 / 7, 4: 6 / 7}),
        (lambda: tiny(tied=True), {}, lambda step: ALL),
        (lambda: tiny(kind=LlamaWithItsOwnLoss), {}, lambda step: ALL),
        (lambda: tiny(tied=True), DISTILS, lambda step: ALL),
        (lambda: build("gemma2"), DISTILS, lambda step: ALL),
    ],
    ids=["all exits", "rotational", "a layer", "tied", "own loss", "distilled", "distilled gemma2"],
)
def test_training(
    start: Callable[[], Any],
    settings: dict[str, Any],
    shares: Callable[[int], dict[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses, logs and weights after three steps are those of gradient descent on the formula.

    With self-distillation exits learn what the last layer predicts, which learns the labels; logits exist for few
    tokens at a time.
    """
    monkeypatch.setattr(exit_training, "LOGIT_ELEMENTS", 5 * VOCABULARY)
    expected = ByHand(start(), shares, distils="self_distillation" in settings)
    run = train(
        tmp_path, [EarlyExitLoss(1.0, **{"curriculum": Rotational(1), "scale": loss_scale} | settings)], start()
    )
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    for layer in (2, 3, 4):
        losses = [exits[layer] for exits in expected.exits if layer in exits]
        assert history(run, f"loss/exit_{layer}") == pytest.approx(losses, rel=1e-4)
    assert_close(weights(run.model), expected.weights)
    plain = ByHand(start(), lambda step: {4: 1.0})
    assert abs(plain.losses[0] - expected.losses[0]) > 1e-3


def test_no_weight_at_all_is_plain_training(tmp_path: Path) -> None:
    """To the last bit."""
    without, plain = train(tmp_path, [EarlyExitLoss(0.0)]), train(tmp_path, [])
    assert history(without) == history(plain)
    assert_equal(weights(without.model), weights(plain.model))


def routers_loss(router_logits: tuple[torch.Tensor, ...], chosen: int) -> torch.Tensor:
    """Of all layers together: for each expert, its share of the choices times its mean probability (Switch, eq. 4)."""
    logits = torch.cat(router_logits)
    choices = F.one_hot(logits.topk(chosen).indices, logits.shape[-1]).float().sum(1)
    return logits.shape[-1] * (choices.mean(0) * logits.softmax(-1).mean(0)).sum()


def test_a_routers_loss_is_added_once(tmp_path: Path) -> None:
    """As in plain training: with its own coefficient, whatever the last exit weighs, and not as a cross entropy."""
    model = build("mixtral")
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.3
    model.train()
    samples = stacked(rows(4))
    exits = {layer: exit_loss(model, samples, layer) / targets(samples) for layer in ALL}
    router = model.model(**{k: samples[k] for k in ("input_ids", "attention_mask")}, output_router_logits=True)
    expected = sum(weight * exits[layer] for layer, weight in ALL.items())
    expected = expected + 0.3 * routers_loss(router.router_logits, model.num_experts_per_tok)
    expected.backward()
    gradients = {name: 0.05 * value.grad for name, value in model.named_parameters() if value.grad is not None}
    before = weights(model)
    model.zero_grad()
    run = train(tmp_path, [EarlyExitLoss(1.0, Rotational(1), scale=loss_scale)], model, max_steps=1)
    assert history(run) == pytest.approx([expected.item()], rel=1e-5)
    assert history(run, "loss/exit_4") == pytest.approx([exits[4].item()], rel=1e-5)
    assert_close(weights(run.model), {name: value - gradients.get(name, 0.0) for name, value in before.items()})


def test_models_that_give_out_hidden_states(tmp_path: Path) -> None:
    """Callers get those of their own rows, whatever exits read and layers drop."""
    shapes: list[list[torch.Size]] = []
    model = tiny()
    model.config.output_hidden_states = True
    model.register_forward_hook(lambda module, args, out: shapes.append([state.shape for state in out.hidden_states]))
    run = train(tmp_path, BOTH["both"](), model)
    assert_equal(weights(run.model), weights(train(tmp_path, BOTH["both"]()).model))
    assert shapes == [[torch.Size([4, WIDTH, 16])] * (LAYERS + 1)] * 3


def test_gradient_accumulation(tmp_path: Path) -> None:
    """Four rows at once, two and two, or one after the other, one of them without any target: the same training."""
    data = rows(16)
    data[5]["labels"][:] = -100
    together = train(tmp_path, BOTH["both"](), data=data)
    for batch in (2, 1):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
        apart = train(tmp_path, BOTH["both"](), data=data, **sizes)
        assert_close(weights(apart.model), weights(together.model))
        for key in ("loss", "loss/exit_4"):
            assert len(history(apart, key)) == 3
            assert history(apart, key) == pytest.approx(history(together, key), rel=1e-5)


def test_logged_exits(tmp_path: Path) -> None:
    """Nats per token of each exit, mean over the tokens of the steps since the last log in which it was on."""
    events: list[dict[str, float]] = []

    class Report(TrainerCallback):
        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            events.append(dict(logs))

    run = train(
        tmp_path, [EarlyExitLoss(1.0, Rotational(2), scale=loss_scale), Report()], tiny(), max_steps=6, logging_steps=3
    )
    hand = ByHand(tiny(), rotational_shares, steps=6)
    expected = []
    for steps in (range(3), range(3, 6)):
        entry = {}
        for layer in (2, 3, 4):
            on = [step for step in steps if layer in hand.exits[step]]
            tokens = sum(hand.targets[step] for step in on)
            entry[f"loss/exit_{layer}"] = sum(hand.exits[step][layer] * hand.targets[step] for step in on) / tokens
        expected.append(entry)
    logged = [{key: value for key, value in entry.items() if "exit" in key} for entry in run.state.log_history]
    assert logged == [pytest.approx(expected[0], rel=1e-5), pytest.approx(expected[1], rel=1e-5), {}]
    assert [{key: value for key, value in entry.items() if "exit" in key} for entry in events] == logged


def test_logits_exist_for_a_chunk_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head sees the exits' states in chunks, each target once for each exit, and no ignored label."""
    sizes: list[torch.Size] = []
    monkeypatch.setattr(exit_training, "LOGIT_ELEMENTS", 5 * VOCABULARY + VOCABULARY // 2)
    model = tiny()
    model.lm_head.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape))
    train(tmp_path, [EarlyExitLoss(1.0, Rotational(1), scale=loss_scale)], model)
    assert sizes.count(torch.Size([4, WIDTH, 16])) == 3
    chunks = [size for size in sizes if size != torch.Size([4, WIDTH, 16])]
    assert {(size[0], size[2]) for size in chunks} == {(1, 16)}
    count = targets(stacked(rows(12)))
    assert sum(size[1] for size in chunks) == 2 * count < 2 * 12 * (WIDTH - 1)
    assert max(size[1] for size in chunks) == 5


def test_gradients_are_added_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model in bfloat16 whose head sees one token at a time, by hand: in bfloat16 the sum is too far off."""
    monkeypatch.setattr(exit_training, "LOGIT_ELEMENTS", VOCABULARY)
    model, samples, shares = tiny().bfloat16().train(), stacked(rows(32)), {2: 0.45, 3: 0.45, 4: 0.1}
    head, is_target, tokens = model.lm_head, samples["labels"][:, 1:] != -100, samples["labels"][:, 1:]
    states = model.model(samples["input_ids"], output_hidden_states=True).hidden_states
    last = shares[4] * exit_loss(model, samples, 4)
    (exact,) = torch.autograd.grad(last, head.weight, retain_graph=True)
    exact, rounded = exact.double(), exact.clone()
    for layer in (2, 3):
        exits = model.model.norm(states[layer])[:, :-1][is_target].detach()
        for state, token in zip(exits.split(1), tokens[is_target].split(1), strict=True):
            loss = F.cross_entropy(head(state).float(), token)
            (gradient,) = torch.autograd.grad(shares[layer] * loss, head.weight)
            exact += gradient.double()
            rounded += gradient
    gradients: list[torch.Tensor] = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            gradients.append(model.lm_head.weight.grad * targets(samples))

    callback = EarlyExitLoss(1.0, layers=[2, 3], scale=lambda layer, *_: shares[layer + 1] if layer else 0.0)
    options = {"per_device_train_batch_size": 32, "max_steps": 1}
    train(tmp_path, [callback, Keep()], tiny().bfloat16(), data=rows(32), **options)
    off = [((value.double() - exact).norm() / exact.norm()).item() for value in (*gradients, rounded)]
    assert off[0] < 0.005
    assert off[1] > 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["mixed", "pure"])
def test_gradients_are_not_too_small_for_float16(dtype: torch.dtype) -> None:
    """Of an exit that weighs little, scaled as in mixed precision: by a factor that float16 does not have."""
    torch.manual_seed(0)
    share, scale, tokens = 1e-6, 2.0**20, torch.randint(VOCABULARY, (40,))
    tensors = [
        torch.randn(1, 40, 16).to(dtype).requires_grad_(),
        torch.randn(VOCABULARY, 16).to(dtype).requires_grad_(),
    ]
    exact = [value.detach().double().requires_grad_() for value in tensors]
    (scale * share * F.cross_entropy(exact[0][0] @ exact[1].T, tokens, reduction="sum")).backward()

    def head(states: torch.Tensor) -> torch.Tensor:
        return states.to(torch.float16) @ tensors[1].to(torch.float16).T

    total, _ = exit_training._ExitLosses.apply(head, tokens, None, [share], 7, *tensors)
    (scale * total).backward()
    for value, right in zip(tensors, exact, strict=True):
        assert (value.grad.double() - right.grad).norm() < 0.002 * right.grad.norm()
