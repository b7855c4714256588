"""Which sets are proposed, and of which sizes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor

from helpers.search.searches import matchness_of, predicted, skipping, space
from hf_selfspec import ClosestLayers, OnTheFlySearch
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.proposers import bayesian, first_sizes, next_sizes
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = pytest.mark.usefixtures("no_grad")


def run_search(settings: OnTheFlySearch, known: frozenset[int], ratio: float = 0.5) -> SkipSearch:
    half = frozenset(range(1, 5))
    search = SkipSearch(settings, space(), ratio, LayerPlan(10, half, half))
    while not search.is_over:
        plan = search.propose()
        assert plan is not None
        search.register(plan, predicted(matchness_of(known, plan)))
    return search


@pytest.mark.parametrize("interval", [5, 1000], ids=["every fifth Bayesian", "Thompson sampling"])
def test_a_known_set_is_found(interval: int) -> None:
    """Nearly the best there is, where the uniform sets of the beginning find half of the blocks."""
    known = frozenset(np.random.default_rng(3).choice(16, 8, replace=False).tolist())
    search = run_search(OnTheFlySearch(max_steps=60, bayes_interval=interval, target_matchness=0.999), known)
    assert len(search.space.places(search.best) - known) <= 1
    uniform = [len(search.space.places(trial.plan) & known) for trial in list(search.trials)[1:30:1]]
    assert interval == 5 or np.mean(uniform) < 5


def test_history_of_the_gaussian_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = GaussianProcessRegressor.fit
    monkeypatch.setattr(
        GaussianProcessRegressor, "fit", lambda self, x, y: sizes.append(len(y)) or original(self, x, y)
    )
    large, rng = space(16), np.random.default_rng(7)
    sets = {large.random(rng, 0.5): rng.random() for _ in range(250)}
    assert bayesian(large, sets, 0.5, rng) not in sets
    assert len(sizes) == 1
    assert 100 < sizes[0] <= 200


def test_bayesian_proposals_are_of_the_size_that_is_searched_for() -> None:
    rng = np.random.default_rng(0)
    other = {skipping(*range(12)): 0.9}
    like = {space().random(rng, 0.4): 0.1 * count for count in range(5)}
    plan = bayesian(space(), like | other, 0.4, rng)
    assert plan is not None
    assert (len(space().places(plan)), plan in like) == (6, False)
    assert bayesian(space(), other, 0.4, rng) is None


@pytest.mark.parametrize("auto", [False, True])
def test_a_search_that_matches_too_little_goes_on_with_smaller_sets(auto: bool) -> None:
    search = SkipSearch(OnTheFlySearch(patience=3), space(), 0.5, skipping(*range(8)), auto)
    sizes = set()
    while not search.is_over:
        plan = search.propose()
        assert plan is not None
        sizes.add(len(space().places(plan)))
        search.register(plan, predicted(0.5))
    assert sizes == ({8, 6, 5, 3, 2} if auto else {8})


def test_a_search_that_matches_much_tries_larger_sets_before_still_larger_ones() -> None:
    search = SkipSearch(OnTheFlySearch(), space(20), 0.4, space(20).plan(range(14)), auto=True)
    sizes = []
    for step in range(200):
        if step % 4 == 0:
            search.begin_window()
        if (plan := search.propose()) is None:
            break
        sizes.append(len(search.space.places(plan)))
        search.register(plan, predicted(1.0 if sizes[-1] == 14 else 0.5))
    assert sizes.count(18) > 10


def test_sizes_of_closest_layers() -> None:
    """Sizes from all over on the first text, then the best one and another."""
    assert first_sizes(20) == [2, 4, 6, 8, 10, 12, 14, 16]
    found = [next_sizes(20, 10, matchness, 0.95, window) for matchness in (0.8, 0.69, 0.96) for window in (2, 3)]
    assert found == [[10, 8], [10, 12], [10, 8], [10, 8], [10, 12], [10, 12]]
    assert next_sizes(20, 20, 0.99, 0.95, 2) == [20]
    assert next_sizes(20, 2, 0.5, 0.95, 3) == [2]


@pytest.mark.parametrize("auto", [True, False])
def test_closest_layers_of_a_text(auto: bool) -> None:
    """One forward finds the sets of the first texts, another those of each later one; a given ratio is kept."""
    asked: list[int] = []

    def proposed() -> LayerPlan | None:
        if most := search.wants_closest:
            asked.append(most)
            layers = [frozenset(range(1, count + 1)) for count in range(1, most + 1)]
            search.see_closest([LayerPlan(22, skipped, skipped) for skipped in layers])
        return search.propose()

    search = SkipSearch(ClosestLayers(patience=100), space(22), 0.4, LayerPlan(22), auto)
    first = proposed()
    assert first is not None
    search.register(first, predicted(0.9))
    search.begin_window()
    sizes: list[list[int]] = []
    for _ in range(2):
        sizes.append([])
        while (plan := proposed()) is not None:
            sizes[-1].append(len(plan.skipped_layers))
            search.register(plan, predicted(0.9 if len(plan.skipped_layers) == 8 else 0.5))
        search.begin_window()
    assert sizes == ([[8, 2, 4, 6, 8, 10, 12, 14, 16], [8, 8, 6]] if auto else [[8, 8], [8, 8]])
    assert asked == ([16, 8] if auto else [8, 8])
