"""Training with early-exit loss is gradient descent on LayerSkip's formula."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers.architectures import build
from helpers.distributed import LAYERS, VOCABULARY, WIDTH, exits, rows, tiny, weights
from helpers.train.by_hand import (
    ALL,
    ByHand,
    assert_close,
    assert_equal,
    both,
    exit_loss,
    history,
    rotational_shares,
    stacked,
    targets,
    train,
)
from hf_selfspec import EarlyExitLoss, Gradual, Rotational
from hf_selfspec.train import exit_training, loss_scale


@pytest.mark.parametrize(
    ("callback", "step", "steps", "scales"),
    [
        # ``e(l)`` of 6 layers by hand: half of 0, 1, 3, 6, 10, and for the last one 5 + half of 0+1+2+3+4.
        (EarlyExitLoss(0.5, Rotational(1), scale=loss_scale), 0, 8, {0: 0.0, 1: 0.5, 2: 1.5, 3: 3.0, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, Rotational(2), scale=loss_scale), 4, 8, {0: 0.0, 2: 1.5, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, Rotational(2), scale=loss_scale), 5, 8, {1: 0.5, 3: 3.0, 5: 10.0}),
        (exits(16), 9, 99, {5: 15.0}),
        (exits(16), 0, 99, {0: 1.0}),  # a model of one layer
        (EarlyExitLoss(1.0, Gradual(), scale=loss_scale), 0, 24, {5: 15.0}),
        (EarlyExitLoss(1.0, Gradual(), scale=loss_scale), 5, 24, {3: 6.0, 4: 10.0, 5: 15.0}),
        (EarlyExitLoss(1.0, Gradual(), scale=loss_scale), 12, 24, {0: 0.0, 1: 1.0, 2: 3.0, 3: 6.0, 4: 10.0, 5: 15.0}),
        (EarlyExitLoss(1.0, None, [2, 5], loss_scale), 0, 8, {1: 1.0, 4: 10.0, 5: 15.0}),
        (EarlyExitLoss(), 0, 8, {0: 0.1, 2: 0.1, 5: 1.0}),  # after an eighth (at least 1), a quarter and half
        (EarlyExitLoss(0.5, None, [2]), 0, 8, {1: 0.5, 5: 1.0}),
        (EarlyExitLoss(0.5, Rotational(2)), 0, 8, {0: 0.5, 2: 0.5, 4: 0.5, 5: 1.0}),
        (EarlyExitLoss(0.0, Rotational(1), scale=loss_scale), 0, 8, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 5.0}),
    ],
)
def test_loss_weights(callback: EarlyExitLoss, step: int, steps: int, scales: dict[int, float]) -> None:
    """``ẽ(t, l)`` is each enabled layer's share of all enabled scales."""
    total = sum(scales.values())
    assert callback.weights(step, steps, max(scales) + 1) == pytest.approx(
        {layer: scale / total for layer, scale in scales.items()}
    )


class LlamaWithItsOwnLoss(LlamaForCausalLM):
    """Computes its loss without ``loss_function``, as a mean over the batch."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> CausalLMOutputWithPast:
        logits = super().forward(input_ids, attention_mask=attention_mask).logits
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("start", "settings", "shares"),
    [
        (tiny, {}, lambda step: ALL),
        (tiny, {"curriculum": Rotational(2)}, rotational_shares),
        (tiny, {"layers": [2]}, lambda step: {2: 1 / 7, 4: 6 / 7}),
        (lambda: tiny(tied=True), {}, lambda step: ALL),
        (lambda: tiny(kind=LlamaWithItsOwnLoss), {}, lambda step: ALL),
        (lambda: build("gemma2"), {}, lambda step: ALL),
    ],
    ids=["all exits", "rotational", "a layer", "tied", "own loss", "gemma2"],
)
def test_training(start: Any, settings: Any, shares: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, logs and weights after three steps are those of gradient descent on the formula.

    The head sees the exits' states for five tokens at a time, each target once for each exit, and no ignored label.
    """
    sizes, model = list[int](), start()
    monkeypatch.setattr(exit_training, "LOGIT_ELEMENTS", 5 * model.config.vocab_size + VOCABULARY // 2)
    expected = ByHand(start(), shares)
    callback = EarlyExitLoss(1.0, **{"curriculum": Rotational(1), "scale": loss_scale} | settings)
    model.lm_head.register_forward_pre_hook(lambda _, args: sizes.extend([args[0].shape[1]] * (len(args[0]) == 1)))
    run = train(tmp_path, [callback], model)
    assert max(sizes) == 5
    in_steps = zip(expected.targets, expected.exits, strict=True)
    assert sum(sizes) == sum(count * (len(losses) - 1) for count, losses in in_steps)
    assert history(run) == pytest.approx(expected.losses, rel=1e-5)
    for layer in (2, 3, 4):
        losses = [means[layer] for means in expected.exits if layer in means]
        assert history(run, f"loss/exit_{layer}") == pytest.approx(losses, rel=1e-4)
    assert_close(weights(run.model), expected.weights)
    plain = ByHand(start(), lambda step: {4: 1.0})
    assert abs(plain.losses[0] - expected.losses[0]) > 1e-3


def routers_loss(router_logits: tuple[torch.Tensor, ...], chosen: int) -> torch.Tensor:
    """Of all layers together: for each expert, its share of the choices times its mean probability (Switch, eq. 4)."""
    logits = torch.cat(router_logits)
    choices = F.one_hot(logits.topk(chosen).indices, logits.shape[-1]).float().sum(1)
    return logits.shape[-1] * (choices.mean(0) * logits.softmax(-1).mean(0)).sum()


def test_a_routers_loss_is_added_once(tmp_path: Path) -> None:
    """As in plain training: with its own coefficient, whatever the last exit weighs, and not as a cross entropy."""
    model = build("mixtral").train()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.3
    samples = stacked(rows(4))
    losses = {layer: exit_loss(model, samples, layer) / targets(samples) for layer in ALL}
    router = model.model(**{k: samples[k] for k in ("input_ids", "attention_mask")}, output_router_logits=True)
    expected = sum(weight * losses[layer] for layer, weight in ALL.items())
    expected = expected + 0.3 * routers_loss(router.router_logits, model.num_experts_per_tok)
    expected.backward()
    gradients = {name: 0.05 * value.grad for name, value in model.named_parameters() if value.grad is not None}
    before = weights(model)
    model.zero_grad()
    run = train(tmp_path, [exits(1)], model, max_steps=1)
    assert history(run) == pytest.approx([expected.item()], rel=1e-5)
    assert history(run, "loss/exit_4") == pytest.approx([losses[4].item()], rel=1e-5)
    assert_close(weights(run.model), {name: value - gradients.get(name, 0.0) for name, value in before.items()})


def test_models_that_give_out_hidden_states(tmp_path: Path) -> None:
    """Callers get those of their own rows, whatever exits read and layers drop."""
    shapes: list[list[torch.Size]] = []
    model = tiny()
    model.config.output_hidden_states = True
    model.register_forward_hook(lambda module, args, out: shapes.append([state.shape for state in out.hidden_states]))
    run = train(tmp_path, both(), model)
    assert_equal(weights(run.model), weights(train(tmp_path, both()).model))
    assert shapes == [[torch.Size([4, WIDTH, 16])] * (LAYERS + 1)] * 3


def test_gradient_accumulation(tmp_path: Path) -> None:
    """Four rows at once, two and two, or one after the other, one of them without any target: the same training."""
    data = rows(16)
    data[5]["labels"][:] = -100
    together = train(tmp_path, both(), data=data)
    for batch in (2, 1):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
        apart = train(tmp_path, both(), data=data, **sizes)
        assert_close(weights(apart.model), weights(together.model))
        for key in ("loss", "loss/exit_4"):
            assert len(history(apart, key)) == 3
            assert history(apart, key) == pytest.approx(history(together, key), rel=1e-5)


def test_logged_exits(tmp_path: Path) -> None:
    """Nats per token of each exit, mean over the tokens of the steps since the last log in which it was on."""
    events, report = list[dict[str, float]](), TrainerCallback()
    report.on_log = lambda *args, logs, **kwargs: events.append(dict(logs))
    run = train(tmp_path, [exits(), report], max_steps=6, logging_steps=3)
    hand = ByHand(tiny(), rotational_shares, steps=6)
    expected: list[dict[str, Any]] = [{}, {}, {}]  # the last one has times
    for entry, steps in zip(expected, (range(3), range(3, 6)), strict=False):
        for layer in (2, 3, 4):
            on = [step for step in steps if layer in hand.exits[step]]
            total = sum(hand.exits[step][layer] * hand.targets[step] for step in on)
            entry[f"loss/exit_{layer}"] = pytest.approx(total / sum(hand.targets[step] for step in on), rel=1e-5)
    for logged in (run.state.log_history, events):
        assert [{key: value for key, value in entry.items() if "exit" in key} for entry in logged] == expected


@pytest.mark.parametrize(
    ("dtype", "head_dtype", "share", "tokens", "chunk"),
    [
        (torch.float32, torch.float16, 1e-6, 40, 7),
        (torch.float16, torch.float16, 1e-6, 40, 7),
        (torch.bfloat16, torch.bfloat16, 0.5, 2000, 1),
    ],
)
def test_gradients_in_16_bits(
    dtype: torch.dtype, head_dtype: torch.dtype, share: float, tokens: int, chunk: int
) -> None:
    """Of an exit that weighs little, in mixed precision and without, scaled by a factor that float16 does not have; and
    of so many chunks that a sum in bfloat16 would be too far off."""
    torch.manual_seed(0)
    wanted, scale = torch.randint(VOCABULARY, (tokens,)), 2.0**20
    tensors = [torch.randn(*shape).to(dtype).requires_grad_() for shape in ((1, tokens, 16), (VOCABULARY, 16))]
    exact = [value.detach().double().requires_grad_() for value in tensors]
    (scale * share * F.cross_entropy(exact[0][0] @ exact[1].T, wanted, reduction="sum")).backward()

    def head(states: torch.Tensor) -> torch.Tensor:
        return states.to(head_dtype) @ tensors[1].to(head_dtype).T

    total, _ = exit_training.ExitLosses.apply(head, wanted, [share], chunk, *tensors)
    (scale * total).backward()
    for value, right in zip(tensors, exact, strict=True):
        assert (value.grad.double() - right.grad).norm() < 0.005 * right.grad.norm()
