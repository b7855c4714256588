"""The paper's formulas: weights of exits, curricula, rates of dropout."""

import math

import pytest

from hf_selfspec import (
    EarlyExitLoss,
    Gradual,
    LayerDropout,
    Rotational,
)
from hf_selfspec.train import constant, exponential, loss_scale
from hf_selfspec.train.layer_dropout import layer_scale


def test_loss_scale() -> None:
    """``e(l)`` of 6 layers by hand: half of 0, 1, 3, 6, 10, and for the last one 5 + half of 0+1+2+3+4."""
    assert [loss_scale(layer, 6, 0.5) for layer in range(6)] == [0.0, 0.5, 1.5, 3.0, 5.0, 10.0]
    assert [loss_scale(layer, 6, 1.0) for layer in range(6)] == [0.0, 1.0, 3.0, 6.0, 10.0, 15.0]
    assert [loss_scale(layer, 4, 0.0) for layer in range(4)] == [0.0, 0.0, 0.0, 3.0]
    assert [loss_scale(layer, 2, 1.0) for layer in range(2)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("callback", "step", "steps", "scales"),
    [
        (EarlyExitLoss(0.5, Rotational(1), scale=loss_scale), 0, 8, {0: 0.0, 1: 0.5, 2: 1.5, 3: 3.0, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, Rotational(2), scale=loss_scale), 4, 8, {0: 0.0, 2: 1.5, 4: 5.0, 5: 10.0}),
        (EarlyExitLoss(0.5, Rotational(2), scale=loss_scale), 5, 8, {1: 0.5, 3: 3.0, 5: 10.0}),
        (EarlyExitLoss(1.0, Rotational(16), scale=loss_scale), 9, 99, {5: 15.0}),
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
    weights = callback.weights(step, steps, 6)
    assert weights == pytest.approx({layer: scale / total for layer, scale in scales.items()})
    assert sum(weights.values()) == pytest.approx(1.0)


def test_a_model_of_one_layer() -> None:
    assert EarlyExitLoss(1.0, None).weights(0, 8, 1) == {0: 1.0}
    assert LayerDropout(0.5).rates(0, 8, 1) == [0.0]


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
