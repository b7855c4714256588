"""How drafts fare beside what trials promised."""

from __future__ import annotations

import pytest

from helpers.search.searches import (
    BOLD,
    CAREFUL,
    draft,
    draft_much,
    predicted,
    space,
    speedup,
    timed_search,
)
from hf_selfspec import FixedLength
from hf_selfspec.search import estimates, skip_search
from hf_selfspec.search.estimates import Feedback
from hf_selfspec.search.on_the_fly import OnTheFlySearch
from hf_selfspec.search.skip_search import SkipSearch

pytestmark = pytest.mark.usefixtures("no_grad")


def rounds(*shares: float, drafted: int = 64) -> Feedback:
    """Rounds in each of which this share of what was expected is accepted."""
    found = Feedback()
    for share in shares:
        found.add(drafted, expected=drafted / 2, accepted=share * drafted / 2)
    return found


def test_ease_by_hand() -> None:
    assert rounds().ease == pytest.approx(1.0)
    # 32 are expected, 16 accepted, and 32 more count as they were expected.
    assert rounds(0.5).ease == pytest.approx(0.75)
    # Of the first round 7 in 8 are remembered: 60 expected, 16 * 7 / 8 + 32 = 46 accepted; in steps of 0.05.
    assert rounds(0.5, 1.0).ease == pytest.approx(0.85)
    assert rounds(1.0, 0.5).ease == pytest.approx(0.85)
    assert rounds(*[0.5] * 50).ease == pytest.approx(0.55)
    assert rounds(*[0.0] * 50).ease == pytest.approx(0.2)
    assert rounds(*[9.0] * 50).ease == pytest.approx(1.1)
    assert rounds(*[0.0] * 50, drafted=1000).ease == pytest.approx(0.2)


@pytest.mark.parametrize("auto", [True, False])
def test_a_search_begins_again_where_much_less_is_accepted(auto: bool) -> None:
    """Its set drafts on, and is the first to be tried; what is usual is what was accepted when the search had ended."""
    settings = OnTheFlySearch(max_steps=1)
    search = timed_search(settings, BOLD) if auto else SkipSearch(settings, space(), 0.5, BOLD)
    search.register(BOLD, predicted(0.9))
    for share in (0.5, 0.5, 0.62, 0.5, 0.44):  # it is 0.5 by far that counts, not the 0.855 of the trials
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
    rounds = estimates._WATCHED // 16
    assert search.generated == rounds * sum(1 + accepted for accepted in (8, 8, 10, 8, 7, 3, 3))


@pytest.mark.parametrize("what", ["too few", "of another set", "still searching"])
def test_a_search_does_not_begin_again(what: str) -> None:
    search = timed_search(OnTheFlySearch(max_steps=3 if what == "still searching" else 1), BOLD)
    search.register(BOLD, predicted(0.9))
    draft_much(search, 0.8)
    search.steps += 100  # a mark
    for _ in range(2 if what == "too few" else estimates._WATCHED // 16):
        draft(search, 0.0, plan=CAREFUL if what == "of another set" else BOLD)
    search.begin_window()
    assert search.steps > 100


def test_a_search_that_begins_again_tries_what_was_best_before() -> None:
    search = timed_search(OnTheFlySearch(max_steps=2), BOLD)
    search.register(CAREFUL, predicted(0.9))
    search.register(BOLD, predicted(0.9))
    draft_much(search, 0.8)
    draft_much(search, 0.1)
    assert [search.propose() for _ in range(2)] == [BOLD, CAREFUL]


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_drafts_that_fare_worse_than_trials_lower_the_expected_speed(share: float) -> None:
    """By hand: of 160 drafted tokens 0.855 each were promised, and 32 more are taken to be accepted as promised."""
    search = timed_search(OnTheFlySearch(), BOLD)
    search.register(BOLD, predicted(0.9))
    rate = (0.9 + 0.9**2) / 2
    assert search.choice.expected_speedup == pytest.approx(speedup(predicted(0.9), BOLD, FixedLength(2)))
    draft(search, share, 160)
    search.begin_window()
    ease = (share * 160 + 32) / (rate * 160 + 32)
    expected = speedup(predicted(0.9), BOLD, FixedLength(2), round(ease / 0.05) * 0.05)  # as steps of it go
    assert search.choice.expected_speedup == pytest.approx(expected)
    assert search.choice.acceptance_rate < rate
    assert search.choice.drafts == (expected >= 1.02)
    assert search.choice.drafts == (share > 0.5)


def test_a_set_whose_drafts_fared_badly_is_given_another_chance() -> None:
    """While it does not draft nothing more is learned of how its drafts would fare, so what was is forgotten."""
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    search.register(BOLD, predicted(0.9))
    draft(search, 0.2, 160)
    search.begin_window()
    windows = 0
    while not search.choice.drafts:
        windows += 1
        for _ in range(32):
            search.watch(BOLD, 1, 0, 1)
        search.begin_window()
        if search.propose() is not None:
            search.register(BOLD, predicted(0.9))
        assert windows < 6 * skip_search._IDLE
    assert windows >= skip_search._IDLE - 2
