"""Which sets are proposed, and of which sizes."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor

from helpers.search.searches import matchness_of, no_layers, predicted, random_sets, scores_of, skipping, space
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.on_the_fly import ClosestLayers, OnTheFlySearch
from hf_selfspec.search.proposers import Closest
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = pytest.mark.usefixtures("no_grad")


def run_search(settings: OnTheFlySearch, known: frozenset[int], ratio: float = 0.5) -> SkipSearch:
    half = frozenset(range(1, 5))
    search = SkipSearch(settings, space(), ratio, LayerPlan(10, half, half))
    while not search.is_over:
        plan = search.propose(no_layers)
        assert plan is not None
        search.register(plan, predicted(matchness_of(known, plan)))
    return search


def test_bayesian_proposals_find_a_known_set() -> None:
    """Better than as many random sets, and nearly the best there is."""
    known = frozenset(np.random.default_rng(3).choice(16, 8, replace=False).tolist())
    found = run_search(OnTheFlySearch(max_steps=60, bayes_interval=5, target_matchness=0.999), known)
    drawn = run_search(OnTheFlySearch(max_steps=60, bayes_interval=1000, target_matchness=0.999), known)
    assert found.choice.matchness > drawn.choice.matchness
    assert len(found.space.places(found.best) - known) <= 1


def test_history_of_the_gaussian_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = GaussianProcessRegressor.fit
    monkeypatch.setattr(
        GaussianProcessRegressor, "fit", lambda self, x, y: sizes.append(len(y)) or original(self, x, y)
    )
    large, rng = space(16), np.random.default_rng(7)
    settings = OnTheFlySearch(max_steps=251, bayes_interval=50, target_matchness=1.0)
    search = SkipSearch(settings, large, 0.5, large.random(rng, 0.5))
    while not search.is_over:
        plan = search.propose(no_layers)
        assert plan is not None
        search.register(plan, predicted(rng.random()))
    assert sizes[:2] == [49, 99]
    assert len(sizes) == 5
    assert max(sizes) <= 200


def test_random_sets_of_other_sizes() -> None:
    """Smaller ones where too little matches, larger ones where much does, and no size twice."""
    proposer, rng = random_sets(), np.random.default_rng(0)

    def best() -> LayerPlan:
        return proposer.space.random(rng, proposer.ratio)

    assert not proposer.go_on(best(), 0.8)
    assert [(proposer.go_on(best(), 0.6), proposer.ratio) for _ in range(4)] == [
        (True, 0.3),
        (True, 0.2),
        (True, 0.1),
        (False, 0.1),
    ]
    assert not proposer.go_on(best(), 0.99)  # that was tried
    proposer = random_sets(0.6)
    assert [(proposer.go_on(best(), 0.96), proposer.ratio) for _ in range(3)] == [
        (True, 0.7),
        (True, 0.8),
        (False, 0.8),
    ]
    sets = [proposer.propose(scores_of({}), 0, no_layers) for _ in range(10)]
    assert {len(proposer.space.places(plan)) for plan in sets if plan is not None} == {13}
    assert not random_sets(auto=False).go_on(best(), 0.5)


def test_bayesian_proposals_are_of_the_size_that_is_searched_for() -> None:
    proposer, rng = random_sets(0.4), np.random.default_rng(0)
    like = {space().random(rng, 0.4): 0.1 * count for count in range(5)}
    for known in (like, {}):
        plan = proposer.propose(scores_of(known | {skipping(*range(12)): 0.9}), 24, no_layers)
        assert plan is not None
        assert len(space().places(plan)) == 6
        assert plan not in like


@pytest.mark.parametrize("auto", [False, True])
def test_a_search_that_matches_too_little_goes_on_with_smaller_sets(auto: bool) -> None:
    search = SkipSearch(OnTheFlySearch(patience=3), space(), 0.5, skipping(*range(8)), auto)
    sizes = set()
    while not search.is_over:
        plan = search.propose(no_layers)
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
        if (plan := search.propose(no_layers)) is None:
            break
        sizes.append(len(search.space.places(plan)))
        search.register(plan, predicted(1.0 if sizes[-1] == 14 else 0.5))
    assert sizes.count(18) > 10


def layers_of(*count: int) -> list[LayerPlan]:
    """Plans of 22 layers that skip the first so many that may be skipped."""
    return [LayerPlan(22, frozenset(range(1, n + 1)), frozenset(range(1, n + 1))) for n in count]


class ClosestOfAll:
    """Proposes the closest layers, and keeps how many were wanted."""

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def __call__(self, most: int) -> list[LayerPlan]:
        self.wanted.append(most)
        return layers_of(*range(1, most + 1))


def proposed(proposer: Closest, propose_layers: ClosestOfAll) -> list[int]:
    """Sizes of all sets that are proposed for a window."""
    sizes = []
    while (plan := proposer.propose({}, 0, propose_layers)) is not None:
        sizes.append(len(plan.skipped_layers))
    return sizes


def test_sizes_of_closest_layers() -> None:
    """The first window is for sizes from all over the first sets; later ones are for new sets about the best size."""
    propose_layers, proposer = ClosestOfAll(), Closest(ClosestLayers(target_matchness=0.95), space(22), 0.4, auto=True)
    assert proposer.first(propose_layers) == layers_of(8)[0]
    assert proposed(proposer, propose_layers) == []
    proposer.begin_window(layers_of(8)[0], 0.8)
    assert proposed(proposer, propose_layers) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert propose_layers.wanted == [16]
    (ten,) = layers_of(10)
    for matchness, sizes in (
        (0.8, [10, 8]),  # in turn with the other side
        (0.8, [10, 12]),
        (0.69, [10, 8]),
        (0.69, [10, 8]),
        (0.96, [10, 12]),
        (0.96, [10, 12]),
    ):
        proposer.begin_window(ten, matchness)
        assert proposed(proposer, propose_layers) == sizes
        assert proposer.propose({}, 0, propose_layers) is None
    assert propose_layers.wanted[1:] == [10, 12, 10, 10, 12, 12]
    proposer.begin_window(layers_of(20)[0], 0.99)
    assert proposed(proposer, propose_layers) == [20]
    proposer.begin_window(LayerPlan(22, frozenset([3]), frozenset()), 0.6)  # of no whole layer
    assert proposed(proposer, propose_layers) == [20, 18]


def test_a_given_ratio_is_kept_by_closest_layers() -> None:
    propose_layers, proposer = ClosestOfAll(), Closest(ClosestLayers(), space(22), 0.4, auto=False)
    assert proposer.first(propose_layers) == layers_of(8)[0]
    for matchness in (0.8, 0.5, 0.99):
        proposer.begin_window(layers_of(8)[0], matchness)
        assert proposed(proposer, propose_layers) == [8]
    assert propose_layers.wanted == [8, 8, 8]
    assert not proposer.go_on(layers_of(8)[0], 0.5)


def test_the_smallest_set_that_matches_too_little_has_no_larger_one_tried() -> None:
    propose_layers, proposer = ClosestOfAll(), Closest(ClosestLayers(), space(22), 0.1, auto=True)
    proposer.begin_window(layers_of(2)[0], 0.5)
    proposed(proposer, propose_layers)
    for _ in range(2):
        proposer.begin_window(layers_of(2)[0], 0.5)
        assert proposed(proposer, propose_layers) == [2]
