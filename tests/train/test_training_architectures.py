"""Early-exit loss and layer dropout on every architecture, against the model's own forwards."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import ARCHITECTURES, EVERY_RUN, NO_EXITS, SHARING, build
from helpers.distributed import rows_put_back
from helpers.models import ragged_batch
from helpers.train.by_hand import stays
from hf_selfspec import EarlyExitLoss, LayerDropout
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.forward_pass import ForwardPass, obeying, partial_forwards
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.train import loss_scale, training

# As many rows as heads, so that nothing can tell a dimension of heads from the batch by its length.
ROWS = 4
Outcome = tuple[float, dict[str, torch.Tensor]]


@lru_cache(maxsize=1)
def _model(name: str) -> PreTrainedModel:
    """The model in training mode, without dropout of its own."""
    model = build(name).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for option, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in option or "jitter" in option):
                setattr(module, option, 0.0)
    return model


def batch() -> dict[str, Any]:
    """Rows of which the first tokens, different numbers of them, are no targets, and the last ones are padding."""
    inputs = {name: value.flip(1) for name, value in ragged_batch((7, 6, 5, 4), vocabulary=90, seed=3).items()}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, 0] = labels[1::2, 1] = -100
    return {**inputs, "labels": labels, "use_cache": False}


def of_backward(model: PreTrainedModel, loss: torch.Tensor | None = None) -> Outcome:
    """A loss, by default the model's on :func:`batch`, a mean over the batch, and its gradients by parameter name."""
    if loss is None:
        model.zero_grad()
        loss = model(**batch()).loss
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: value.grad.clone() for name, value in named if value.grad is not None}


def assert_same(trained: Outcome, expected: Outcome) -> None:
    """Equal in float32; what has no gradient in one of the two has one of zeros in the other."""
    assert trained[0] == pytest.approx(expected[0], rel=1e-5)
    largest = max(gradient.abs().max().item() for gradient in expected[1].values())
    assert largest > 1e-3
    for name in trained[1].keys() | expected[1].keys():
        pair = torch.broadcast_tensors(*(each[1].get(name, torch.zeros(())) for each in (trained, expected)))
        torch.testing.assert_close(*pair, rtol=1e-4, atol=2e-6 * largest, msg=name)


@pytest.mark.every_run(EVERY_RUN)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NO_EXITS])
def test_early_exit_loss(name: str) -> None:
    """Losses of models that run their first layers alone, added up by hand."""
    model = _model(name)
    anatomy = Anatomy.of(model)
    last = anatomy.num_layers
    callback = EarlyExitLoss(1.0, layers=[2, 3], scale=loss_scale)
    # e(l) is the sum of the numbers up to l, and one more L-1 for the last layer.
    scales = {2: 1.0, 3: 3.0, last: (last - 1) + sum(range(last - 1))}
    weights = {exit_layer: scale / sum(scales.values()) for exit_layer, scale in scales.items()}

    model.zero_grad()
    total = torch.zeros(())
    with partial_forwards(model, anatomy):
        for exit_layer, weight in weights.items():
            with obeying(ForwardPass(LayerPlan.early_exit(last, exit_layer))):
                total = total + weight * model(**batch()).loss
    expected = of_backward(model, total)

    with training(model, [callback], steps=1) as loop, loop.step():
        trained = of_backward(model)
    assert_same(trained, expected)
    plain = of_backward(model)[1]
    assert any(not torch.allclose(trained[1][name], gradient, atol=1e-4) for name, gradient in plain.items())


@pytest.mark.every_run(EVERY_RUN)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in SHARING])
def test_layer_dropout(name: str) -> None:
    """A step in which rows leave layers one by one, and one in which all leave a layer between others."""
    model = _model(name)
    anatomy = Anatomy.of(model)
    drawn = [(seed, stays(0, ROWS, 0.7, anatomy.num_layers, seed)) for seed in range(100)]
    parted = next(seed for seed, kept in drawn if (kept.any(0) & ~kept.all(0))[1:].all())
    emptied = next(seed for seed, kept in drawn if not kept[:, -2].any() and kept[:, -1].any())
    plain = of_backward(model)[0]
    for seed in (parted, emptied):
        with rows_put_back(anatomy.layers, drawn[seed][1]):
            expected = of_backward(model)
        with training(model, [LayerDropout(0.7)], steps=1, seed=seed) as loop, loop.step():
            trained = of_backward(model)
        assert_same(trained, expected)
        assert abs(trained[0] - plain) > 1e-5
