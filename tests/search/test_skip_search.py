"""The search from one trial to the next, without a model."""

import pytest

from helpers.searches import (
    BOLD,
    CAREFUL,
    SHARES,
    draft_much,
    predicted,
    skipping,
    space,
    speedup,
    timed_search,
    use_times,
)
from hf_selfspec import FixedLength
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.proposers import ClosestLayers, OnTheFlySearch, Search
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = pytest.mark.usefixtures("no_grad")


def test_search_begins_with_the_set_that_drafts() -> None:
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, start := LayerPlan(10, frozenset([3]), frozenset()))
    assert search.choice.matchness == 0
    assert search.propose() == search.best == start
    search.register(start, predicted(0.4))
    assert search.choice.matchness == pytest.approx(0.4)
    drawn = [search.propose() for _ in range(20)]
    assert None not in drawn
    assert {len(search.space.places(plan)) for plan in drawn} == {8}
    assert len(set(drawn)) > 10
    search.register(drawn[0], predicted(0.3))
    assert search.best == start
    search.register(drawn[1], predicted(0.5))
    assert search.best == drawn[1]
    assert search.history == pytest.approx([0.4, 0.3, 0.5])
    assert list(search.best_sets) == [(0, start), (3, drawn[1])]


def test_a_lucky_set_is_found_out() -> None:
    """What scored best is tried again on later text, and it is believed only in part."""
    steady, lucky, other = (LayerPlan(10, frozenset([layer]), frozenset()) for layer in (1, 2, 3))
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, steady)
    search.propose()
    for plan, score in ((steady, 0.6), (lucky, 0.9), (other, 0.0)):
        search.register(plan, predicted(score))
    assert search.best == lucky
    assert 0.6 < search.choice.matchness < 0.89
    search.begin_window()
    assert [search.propose() for _ in range(3)] == [lucky, steady, other]
    assert search.propose() not in (steady, lucky, other)
    for plan, score in ((lucky, 0.1), (steady, 0.6)):
        search.register(plan, predicted(score))
    assert search.best == steady


@pytest.mark.parametrize(
    ("settings", "scores", "steps"),
    [
        (OnTheFlySearch(max_steps=5), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 5),
        (OnTheFlySearch(patience=2), [0.1, 0.9, 0.1, 0.1, 0.9], 4),
        (OnTheFlySearch(target_matchness=0.85), [0.1, 0.2, 1.0, 1.0, 1.0, 1.0], 5),
    ],
    ids=["max_steps", "patience", "target"],
)
def test_search_ends(settings: Search, scores: list[float], steps: int) -> None:
    """A third set that gets better and better, or is good again and again."""
    search = SkipSearch(settings, space(), 0.5, LayerPlan(10))
    plans = [skipping(0), skipping(1), skipping(2)]
    search.begin_window()
    for count, score in enumerate(scores):
        assert search.is_over == (count >= steps)
        assert search.phase == ("acceleration" if count >= steps else "optimization")
        if not search.is_over:
            search.register(plans[min(count, 2)], predicted(score))
    assert len(search.history) == steps


@pytest.mark.parametrize("times_first", [True, False])
def test_the_faster_size_wins_over_the_one_that_matches_more(times_first: bool) -> None:
    rules = [FixedLength(1), FixedLength(2), FixedLength(4)]
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, CAREFUL, auto=True, rules=rules)
    if times_first:
        use_times(search)
    for plan, share in SHARES:
        search.register(plan, predicted(share))
    if not times_first:
        assert (search.best, search.choice.stop, search.choice.expected_speedup) == (CAREFUL, None, None)
        use_times(search)
    speeds = {(plan, rule): speedup(predicted(share), plan, rule) for plan, share in SHARES for rule in rules}
    choice = search.choice
    assert (choice.plan, choice.stop) == (BOLD, FixedLength(2)) == max(speeds, key=lambda key: speeds[key])
    # A single trial is drawn a little towards the other size's.
    assert choice.expected_speedup == pytest.approx(speeds[BOLD, FixedLength(2)], rel=0.02)
    assert choice.drafts
    assert choice.matchness == pytest.approx(0.8, abs=0.02)
    assert choice.acceptance_rate == pytest.approx((0.8 + 0.8**2) / 2)


def test_no_set_drafts_where_none_pays() -> None:
    for share, pays in ((0.86, False), (0.88, True)):  # a little more than 1 is within what estimates are wrong by
        search = timed_search(OnTheFlySearch(), CAREFUL, [FixedLength(1)])
        search.register(CAREFUL, predicted(share))
        assert search.choice.expected_speedup == pytest.approx(speedup(predicted(share), CAREFUL, FixedLength(1)))
        assert search.choice.expected_speedup > 1
        assert search.choice.drafts == pays


@pytest.mark.parametrize("pays", [False, True])
def test_a_search_that_is_over_tries_nothing(pays: bool) -> None:
    """Where no set pays there is nothing to do, once forwards were timed in the process that goes by it."""
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    search.register(BOLD, predicted(0.9 if pays else 0.1))
    again = SkipSearch(OnTheFlySearch(max_steps=1), space(), 0.5, CAREFUL, auto=True, rules=[FixedLength(2)])
    again.restore(search.state())
    assert (again.wants_timings, again.is_idle) == (True, False)
    use_times(again)
    for found in (search, again):
        assert (found.is_over, found.choice.drafts, found.is_idle) == (True, pays, not pays)
        found.begin_window()
        assert found.propose() is None


@pytest.mark.parametrize("auto", [True, False])
def test_a_search_begins_again_where_much_less_is_accepted(auto: bool) -> None:
    """Its set drafts on, and is the first to be tried; what is usual is what was accepted when the search had ended."""
    settings = OnTheFlySearch(max_steps=1)
    search = timed_search(settings, BOLD) if auto else SkipSearch(settings, space(), 0.5, BOLD)
    search.register(BOLD, predicted(0.9))
    for share in (0.5, 0.62, 0.44):
        draft_much(search, share)
        assert search.is_over, share
    draft_much(search, 0.19)
    assert not search.is_over
    assert (search.phase, search.steps, search.best) == ("optimization", 0, BOLD)
    assert search.history == pytest.approx([0.9])
    assert search.propose() == BOLD
    assert search.propose() not in (None, BOLD)
    search.register(BOLD, predicted(0.9))
    assert search.is_over  # once more after one step
    draft_much(search, 0.19)
    assert search.is_over  # which is the usual by now


def test_closest_sets_of_another_threads_text_are_not_taken() -> None:
    """A window of one thread begins between two steps of another, which then looks at its own text first."""
    search = SkipSearch(ClosestLayers(), space(), 0.5, LayerPlan(10), auto=True)
    search.begin_window()
    most = search.wants_closest
    search.closest = [LayerPlan(10)] * (most - 1)  # of a window in which fewer were needed
    proposed = [search.propose() for _ in range(most)]
    assert proposed[-1] is None
    assert search.wants_closest == most
    search.closest = [LayerPlan(10)] * most
    assert search.propose() is not None
