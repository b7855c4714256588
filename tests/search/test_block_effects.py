"""What blocks are worth: regression over trials of sets."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.search.searches import matchness_of, no_layers, random_sets, scores_of, space
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.block_effects import BlockEffects, block_effects
from hf_selfspec.search.estimates import Scores

pytestmark = pytest.mark.usefixtures("no_grad")


def tried_sets(
    count: int, worth: np.ndarray, noise: float, windows: int = 1, seed: int = 0
) -> tuple[Scores, np.ndarray]:
    """Random sets and what they score: what their blocks are worth, the window's number and noise."""
    rng = np.random.default_rng(seed)
    blocks = (rng.random((count, len(worth))).argsort(1) < len(worth) // 2).astype(float)
    on = np.arange(count) % windows
    values = 1 + blocks @ worth + on + noise * rng.standard_normal(count)
    plans = tuple(LayerPlan(count + 2, frozenset({index}), frozenset()) for index in range(count))
    return Scores(plans, values, np.ones(count), np.arange(count), on), blocks


def drawn_effects(found: BlockEffects, draws: int = 200) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.stack([found.drawn(rng) for _ in range(draws)])


WORTH = np.array([-0.05, 0.0, -0.01, -0.04, 0.0, -0.02, 0.0, -0.03])


@pytest.mark.parametrize("windows", [1, 4])
def test_what_blocks_are_worth(windows: int) -> None:
    """Sets are of one size, so effects are known up to a constant; how easy windows are does not matter."""
    scores, blocks = tried_sets(300, WORTH, 0.005, windows)
    found = block_effects(scores, blocks, doubt=0.5)
    assert found.mean - found.mean.mean() == pytest.approx(WORTH - WORTH.mean(), abs=0.004)
    assert found.sets == pytest.approx(1 + blocks @ WORTH + np.arange(windows).mean(), abs=0.02)


def test_sets_of_which_little_is_known_are_estimated_by_their_blocks() -> None:
    """The best set has a bad window of its own, and is estimated nearer to what its blocks are worth."""
    scores, blocks = tried_sets(200, WORTH, 0.0)
    best = int(np.argmax(blocks @ WORTH))
    scores.values[best] -= 0.06
    little, much = (block_effects(scores, blocks, doubt).sets[best] - scores.values[best] for doubt in (5.0, 0.1))
    assert 0.045 < little < 0.065
    assert 0 < much < 0.01


def test_drawn_effects_spread_as_much_as_is_not_known() -> None:
    spread = []
    for trials in (30, 300):
        scores, blocks = tried_sets(trials, WORTH, 0.05)
        found = block_effects(scores, blocks, doubt=0.5)
        drawn = drawn_effects(found)
        assert drawn.mean(0) == pytest.approx(found.mean, abs=4 * drawn.std(0).max() / 200**0.5)
        assert np.cov(drawn.T) == pytest.approx(found.doubt @ found.doubt.T, abs=0.5 * drawn.var(0).max())
        # Of sets of one size it is never known what all blocks have in common.
        spread.append((drawn - drawn.mean(1, keepdims=True)).std(0).mean())
    assert spread[0] > 2 * spread[1] > 0


def test_blocks_that_hardly_matter_are_proposed_once_that_is_known() -> None:
    """Uniform sets at first; after these, sets of what has been worth most."""
    known = frozenset(range(8))
    proposer, rng = random_sets(0.5), np.random.default_rng(0)
    sets = {space().random(rng, 0.5) for _ in range(100)}
    scores = scores_of({plan: matchness_of(known, plan) for plan in sets})

    def proposed(steps: int) -> list[int]:
        plans = [proposer.propose(scores, steps, no_layers) for _ in range(20)]
        return [len(space().places(plan) & known) for plan in plans if plan is not None]

    assert np.mean(proposed(5)) < 5
    assert min(proposed(30)) >= 7
