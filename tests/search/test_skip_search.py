"""The search from one trial to the next, without a model, and which blocks may be skipped."""

import numpy as np
import pytest

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.searches import skipping, space
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search import bayes, skip_search
from hf_selfspec.search.skip_search import OnTheFlySearch, SkipSearch, SkipSpace, usual_ratio

BEST = skipping(*range(1, 11))
# Where a layer is skipped as a whole or not at all, as in Mamba.
LAYERS_ALONE = SkipSpace(18, tuple((layer, "layer") for layer in range(1, 17)))


def test_search_begins_with_the_set_that_drafts() -> None:
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, start := LayerPlan(10, frozenset([3]), frozenset()))
    assert search.choice.matchness == 0
    assert search.propose() == search.best == start
    search.register(start, 0.4)
    assert search.choice.matchness == 0.4
    drawn = [search.propose() for _ in range(20)]
    assert None not in drawn
    assert {len(search.space.places(plan)) for plan in drawn} == {8}
    assert len(set(drawn)) > 10
    search.register(drawn[0], 0.3)
    assert search.best == start
    search.register(drawn[1], 0.5)
    assert search.best == drawn[1]
    assert search.history == [0.4, 0.3, 0.5]
    assert list(search.best_sets) == [(0, start), (3, drawn[1])]


@pytest.mark.parametrize(
    ("settings", "scores", "steps"),
    [
        (OnTheFlySearch(max_steps=5), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 5),
        (OnTheFlySearch(patience=2), [0.1, 0.9, 0.1, 0.1, 0.9], 4),
        (OnTheFlySearch(target_matchness=0.85), [0.1, 0.2, 0.86, 1.0], 3),
    ],
    ids=["max_steps", "patience", "target"],
)
def test_search_ends(settings: OnTheFlySearch, scores: list[float], steps: int) -> None:
    search = SkipSearch(settings, space(), 0.5, LayerPlan(10))
    for count, score in enumerate(scores):
        assert search.is_over == (count >= steps)
        assert search.phase == ("acceleration" if count >= steps else "optimization")
        if not search.is_over:
            search.register(skipping(count), score)
    assert len(search.history) == steps
    assert search.propose() is None


def searched(search: SkipSearch, known: frozenset[int]) -> int:
    """How many blocks of the best set should have run, where each of these costs as much; texts differ a little."""
    rng = np.random.default_rng(0)
    while (plan := search.propose()) is not None:
        share = 1 - len(search.space.places(plan) - known) / len(search.space.blocks) + 0.01 * rng.standard_normal()
        search.register(plan, float(np.clip(share, 0.0, 1.0)))
    return len(search.space.places(search.best) - known)


@pytest.mark.parametrize("blocks", [space(), LAYERS_ALONE], ids=["blocks", "layers"])
def test_bayesian_steps_find_a_known_set(blocks: SkipSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each interval, by the scores of sets of its size. The best of 60 sets drawn uniformly has 1.8 blocks that
    should have run."""
    asked, wrong, suggest = list[int](), list[int](), bayes.suggest

    def suggested(space: SkipSpace, scores: dict[LayerPlan, float], rng: np.random.Generator) -> LayerPlan:
        asked.append(search.steps + 1)
        assert {len(space.places(plan)) for plan in scores} == {8}
        return suggest(space, scores, rng)

    monkeypatch.setattr(bayes, "suggest", suggested)
    for seed in range(3):
        known = frozenset(np.random.default_rng(seed + 100).choice(16, 8, replace=False).tolist())
        settings = OnTheFlySearch(max_steps=60, bayes_interval=2, target_matchness=1.0, seed=seed)
        search = SkipSearch(settings, blocks, 0.5, blocks.plan(range(10)))
        wrong.append(searched(search, known))
    assert np.mean(wrong) <= 1.0
    assert asked == [*range(4, 61, 2)] * 3  # at the second step no set of this size was tried


def draft_much(search: SkipSearch, share: float) -> None:
    """Rounds with the share of drafted tokens that is accepted."""
    for _ in range(skip_search._WATCHED // 16):
        search.watch(BEST, 16, round(share * 16))


def test_a_search_begins_again_where_much_less_is_accepted() -> None:
    """Its set drafts on, and is the first to be tried; what is usual is what was accepted when the search had ended."""
    search = SkipSearch(OnTheFlySearch(max_steps=1), space(), 0.5, BEST)
    draft_much(search, 1.0)
    search.register(BEST, 0.9)
    for share in (0.5, 0.62, 0.44):
        draft_much(search, share)
        assert search.is_over, share
    draft_much(search, 0.19)
    assert (search.phase, search.steps, search.best) == ("optimization", 0, BEST)
    assert search.history == [0.9]
    assert search.propose() == BEST
    search.register(BEST, 0.9)
    assert search.is_over  # once more after one step
    draft_much(search, 0.19)
    draft_much(search, 0.19)
    assert search.is_over  # which is the usual by now


def test_skip_space() -> None:
    space = SkipSpace.of(Anatomy.of(tiny_llama(6)))
    assert len(space.blocks) == 8
    assert space.count(0.5) == 4
    assert space.count(0.01) == 1
    rng = np.random.default_rng(0)
    drawn = [space.random(rng, 0.25) for _ in range(200)]
    assert all(space.plan(space.places(plan)) == plan for plan in drawn)
    assert {len(space.places(plan)) for plan in drawn} == {2}
    assert set().union(*map(space.places, drawn)) == set(range(8))
    papers = {7: 0.4, 13: 0.45, 34: 0.5, 70: 0.5}
    assert {billions: usual_ratio(int(billions * 1e9)) for billions in papers} == papers


def test_skip_space_of_shared_keys() -> None:
    """Gemma 3n: attention whose keys later layers read always runs, so such a layer is never left out as a whole."""
    anatomy = Anatomy.of(build("gemma3n_text"))
    assert anatomy.kv_sources == {1, 2}
    assert SkipSpace.of(anatomy).blocks == ((1, "mlp"), (2, "mlp"), (3, "attention"), (3, "mlp"))
