"""What sets and blocks are worth: estimates from trials on windows of text."""

from __future__ import annotations

import numpy as np
import pytest

from hf_selfspec.search.estimates import Scores, estimate, estimate_by_size

pytestmark = pytest.mark.usefixtures("no_grad")

WORTH = np.array([-0.05, 0.0, -0.01, -0.04, 0.0, -0.02, 0.0, -0.03])


def tried_sets(count: int, noise: float, windows: int = 1) -> Scores:
    """Random sets of half of the blocks; they score what these are worth, the number of their window and noise."""
    rng = np.random.default_rng(0)
    blocks = (rng.random((count, len(WORTH))).argsort(1) < len(WORTH) // 2).astype(float)
    on = np.arange(count) % windows
    values = 1 + blocks @ WORTH + on + noise * rng.standard_normal(count)
    return Scores(blocks, values, np.ones(count), np.arange(count), on)


@pytest.mark.parametrize("windows", [1, 4])
def test_what_blocks_are_worth(windows: int) -> None:
    """Sets are of one size, so effects are known up to a constant; how easy windows are does not matter."""
    scores = tried_sets(300, 0.005, windows)
    found = estimate(scores)
    assert found.effects - found.effects.mean() == pytest.approx(WORTH - WORTH.mean(), abs=0.004)
    assert found.sets == pytest.approx(1 + scores.blocks @ WORTH + np.arange(windows).mean(), abs=0.02)


def test_a_set_is_estimated_by_its_blocks_and_little_by_one_trial_of_its_own() -> None:
    """The best set has a bad window of its own: the four windows of doubt weigh four fifths."""
    scores = tried_sets(200, 0.0)
    best = int(np.argmax(scores.blocks @ WORTH))
    scores.values[best] -= 0.06
    assert estimate(scores).sets[best] - scores.values[best] == pytest.approx(0.8 * 0.06, abs=0.01)


def test_sets_are_compared_on_the_same_text() -> None:
    """Window 0 is hard, 1 is easy: a set tried on easy text alone does not win by that, nor lose one on hard text."""
    values, sets, windows = np.array([0.5, 0.9, 0.8, 0.6]), np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0])
    usual, easy_only, hard_only = estimate(Scores(np.eye(3), values, np.ones(4), sets, windows)).sets
    assert hard_only > usual > easy_only


def test_drawn_effects_spread_as_much_as_is_not_known() -> None:
    spread = []
    for trials in (30, 300):
        found, rng = estimate(tried_sets(trials, 0.05)), np.random.default_rng(1)
        drawn = np.stack([found.drawn(rng) for _ in range(200)])
        assert drawn.mean(0) == pytest.approx(found.effects, abs=4 * drawn.std(0).max() / 200**0.5)
        # Of sets of one size it is never known what all blocks have in common.
        spread.append((drawn - drawn.mean(1, keepdims=True)).std(0).mean())
    assert spread[0] > 2 * spread[1] > 0


def test_sets_are_drawn_towards_those_of_their_size() -> None:
    """By hand, on one window: a set's own trial has the weight 1, the mean of those of its size 4."""
    scores = Scores(np.eye(4), np.array([0.9, 0.9, 0.5, 0.1]), np.ones(4), np.arange(4), np.zeros(4, int))
    for sizes, near, expected in (
        ([4, 4, 8, 8], 1, [0.9, 0.9, 0.34, 0.26]),
        ([4, 5, 8, 9], 1, [0.9, 0.9, 0.34, 0.26]),
        ([4, 4, 8, 8], 4, [0.66, 0.66, 0.58, 0.5]),
    ):
        assert estimate_by_size(scores, np.array(sizes), near) == pytest.approx(expected)
