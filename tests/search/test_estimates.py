"""What sets are worth: estimates from trials on windows of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from helpers.search.searches import BOLD, CAREFUL, predicted, timed_search
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.estimates import Scores, effects
from hf_selfspec.search.on_the_fly import OnTheFlySearch

pytestmark = pytest.mark.usefixtures("no_grad")


def worth(
    trials: Sequence[tuple[float, float, int, int]], sizes: Sequence[int], near: int = 1, doubt: float = 0.0
) -> list[float]:
    """What sets score on the usual text; of each trial its score, weight, set and window."""
    values, weights, of_set, windows = (np.array(column) for column in zip(*trials, strict=True))
    plans = tuple(LayerPlan(8, frozenset({index}), frozenset()) for index in range(len(sizes)))
    return effects(Scores(plans, values, weights, of_set, windows), np.array(sizes), near, doubt).tolist()


def test_sets_are_compared_on_the_same_text() -> None:
    """Window 0 is hard, 1 is easy: a set tried on easy text alone does not win by that, nor lose one on hard text."""
    trials = [(0.5, 1, 0, 0), (0.9, 1, 0, 1), (0.8, 1, 1, 1), (0.6, 1, 2, 0)]
    usual, easy_only, hard_only = worth(trials, [4, 4, 4])
    assert usual - easy_only == pytest.approx(0.1, abs=0.01)
    assert hard_only - usual == pytest.approx(0.1, abs=0.01)
    usual, easy_only, hard_only = worth(trials, [4, 4, 4], doubt=0.5)
    assert hard_only > usual > easy_only


def test_little_text_is_doubted() -> None:
    """By hand, on one window: the mean score of all weighs ``doubt`` beside a set's own trials."""
    assert worth([(0.9, 1, 0, 0), (0.5, 1, 1, 0)], [4, 4], doubt=1.0) == pytest.approx([0.8, 0.6])
    # Their mean is 0.8; three windows against one of doubt, and one against one.
    assert worth([(0.9, 3, 0, 0), (0.5, 1, 1, 0)], [4, 4], doubt=1.0) == pytest.approx([0.875, 0.65])
    assert worth([(0.9, 1, 0, 0), (0.9, 2, 0, 0), (0.5, 1, 1, 0)], [4, 4], doubt=1.0) == pytest.approx([0.875, 0.65])


def test_sets_are_drawn_towards_those_of_their_size() -> None:
    trials = [(0.9, 1, 0, 0), (0.9, 1, 1, 0), (0.5, 1, 2, 0), (0.1, 1, 3, 0)]
    assert worth(trials, [4, 4, 8, 8], doubt=1.0) == pytest.approx([0.9, 0.9, 0.4, 0.2])
    assert worth(trials, [4, 5, 8, 9], doubt=1.0) == pytest.approx([0.9, 0.9, 0.4, 0.2])
    assert worth(trials, [4, 6, 8, 9], doubt=1.0) == pytest.approx([0.9, 0.9, 0.4, 0.2])
    assert worth(trials, [4, 4, 8, 8], near=4, doubt=1.0) == pytest.approx([0.75, 0.75, 0.55, 0.35])


def test_estimates_do_not_depend_on_the_number_of_windows() -> None:
    """What windows are called makes no difference, and takes no time."""
    found = []
    for first in (0, 10**7):
        search = timed_search(OnTheFlySearch(), BOLD)
        search._schedule.window += first
        for share in (0.9, 0.7):
            search.begin_window()
            for plan in (BOLD, CAREFUL):
                search.register(plan, predicted(share - 0.1 * (plan == BOLD)))
        found.append(search._records.worth())
    assert found[0] == pytest.approx(found[1])
