"""Which blocks to skip: passes beside the text, and what chooses from them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from architectures import build
from conftest import ragged_batch, tiny_llama
from sklearn.gaussian_process import GaussianProcessRegressor
from transformers import DynamicCache, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel

from hf_selfspec import (
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    SelfSpec,
    SettingError,
    SettingTypeError,
    SkipLayers,
    call,
)
from hf_selfspec.bench.synthetic import LlamaShape, acceptance, known_skips_llama
from hf_selfspec.draft import searching
from hf_selfspec.draft.partial import Limits, PartialDraft
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.partial import LayerPlan
from hf_selfspec.model.target import Target
from hf_selfspec.search import feedback, schedule, skip_search
from hf_selfspec.search.block_effects import BlockEffects, block_effects
from hf_selfspec.search.clasp import closest_layers
from hf_selfspec.search.costs import MANY, ForwardCosts, Stopwatch
from hf_selfspec.search.estimates import Scores, effects
from hf_selfspec.search.feedback import Feedback
from hf_selfspec.search.on_the_fly import ClosestLayers, OnTheFlySearch, Search, usual_ratio
from hf_selfspec.search.proposers import Closest, RandomAndBayes
from hf_selfspec.search.replay import Rule, Trace, replays
from hf_selfspec.search.skip_search import SkipSearch
from hf_selfspec.search.skip_space import SkipSpace
from hf_selfspec.types import Draft, Text
from hf_selfspec.verify.scoring import Scorer

WINDOW = 7


pytestmark = pytest.mark.usefixtures("no_grad")


def search_of(spec: SelfSpec, model: PreTrainedModel) -> SkipSearch:
    """What ``spec`` has found for the last kind of call of ``model``."""
    search = spec._knowledge.latest(model)
    assert isinstance(search, SkipSearch)
    return search


def after_prefill(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    """Rows of these lengths, all tokens of which but the last are in the cache; prepare the target to use it."""
    width = max(lengths)
    ids = torch.randint(3, 90, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    return prefilled(model, ids, lengths)


def prefilled(model: PreTrainedModel, ids: torch.Tensor, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    anatomy, width = Anatomy.of(model), max(lengths)
    text = Text.of(ids, [0] * len(lengths), 20)
    text.lengths = list(lengths)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, len(lengths), width + 20))
    with target.prepared():
        target.prefill(ids[:, :-1], [0] * len(lengths), [length - 1 for length in lengths])
    target.roots = text.last_slots()
    return target, text


def keys_and_values(target: Target, text: Text) -> list[torch.Tensor]:
    """Copies of what the cache holds of the text."""
    return [
        buffer[row, :, :root].clone()
        for layer in target.cache.layers
        for buffer in (layer.keys, layer.values)
        for row, root in enumerate(text.last_slots())
    ]


@pytest.mark.parametrize("lengths", [(20,), (20, 13, 16)], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "mixtral"])
def test_window_beside_the_text(name: str, lengths: tuple[int, ...]) -> None:
    """A plan predicts after tokens of the text what it would predict in their place, and nothing there changes."""
    target, text = after_prefill(build(name), lengths)
    layers = target.anatomy.num_layers
    plan = LayerPlan(layers, frozenset([1]), frozenset([1]))
    columns = torch.tensor(lengths)[:, None] - 1 - WINDOW + torch.arange(WINDOW)
    tokens = text.ids.gather(1, columns)
    with target.prepared():
        before = keys_and_values(target, text)
        beside = target.step(tokens, text.last_slots(), plan, nodes=TreeLayout.replay(WINDOW)).logits
        assert all(map(torch.equal, keys_and_values(target, text), before))
        in_place = target.step(tokens, [root - WINDOW for root in text.last_slots()], plan).logits
    assert beside is not None
    assert in_place is not None
    torch.testing.assert_close(beside, in_place, rtol=1e-5, atol=1e-5)


def by_hand(model: LlamaForCausalLM, ids: torch.Tensor, layers: Sequence[int], most: int) -> list[list[int]]:
    """The dynamic programme with the layers called one by one, for the last of ``ids`` ``[1, s]``."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache)
    position = torch.tensor([[ids.shape[1] - 1]])
    start = model.model.embed_tokens(ids[:, -1:])
    rotary = model.model.rotary_emb(start, position)

    def run(layer: int, state: torch.Tensor) -> torch.Tensor:
        return model.model.layers[layer](
            state, position_embeddings=rotary, position_ids=position, past_key_values=copy.deepcopy(cache)
        )

    states: dict[int, tuple[torch.Tensor, list[int]]] = {0: (start, [])}
    for layer in range(model.config.num_hidden_layers):
        found = {count: (run(layer, state), skipped) for count, (state, skipped) in states.items()}
        if layer in layers:
            whole = found[0][0]
            for count, (state, skipped) in states.items():
                ways = [(state, [*skipped, layer]), *([found[count + 1]] if count + 1 in states else [])]
                if count < most:
                    near = max(ways, key=lambda way: torch.cosine_similarity(way[0], whole, dim=-1).item())
                    found[count + 1] = near
        states = found
    return [states[count][1] for count in range(1, most + 1)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("layers", "most"), [(range(1, 7), 5), (range(1, 7), 2), ((1, 2, 4, 6), 4)], ids=["nearly all", "few", "some"]
)
def test_closest_layers(layers: Sequence[int], most: int, seed: int) -> None:
    """For each size those of the dynamic programme; the text's keys and values stay as they are."""
    model = tiny_llama(8, seed, factor=1.0)
    target, text = after_prefill(model, (20,))
    before = keys_and_values(target, text)
    with target.prepared():
        plans = closest_layers(target, text, layers, most)
    assert [sorted(plan.skipped_layers) for plan in plans] == by_hand(model, text.ids[:, :20], layers, most)
    assert [len(plan.skipped_layers) for plan in plans] == list(range(1, most + 1))
    assert all(plan.skipped_attention == plan.skipped_mlp for plan in plans)
    assert all(map(torch.equal, keys_and_values(target, text), before))


def test_closest_layers_of_a_batch() -> None:
    """One plan for all rows: that of one row where all are alike, and not that of the first where they differ."""
    model = tiny_llama(8, factor=1.0)
    found = []
    for text_of in (lambda ids: ids[:1].repeat(3, 1), lambda ids: ids):
        target, text = after_prefill(model, (20, 20, 20))
        target, text = prefilled(model, text_of(text.ids[:, :20]), (20, 20, 20))
        with target.prepared():
            found.append(closest_layers(target, text, range(1, 7), 3))
    alike, different = ([sorted(plan.skipped_layers) for plan in plans] for plans in found)
    assert alike == by_hand(model, text.ids[:1, :20], range(1, 7), 3)
    assert different != alike


# What may be skipped, and what it costs -------------------------------------------------------------------------------


def space(layers: int = 10) -> SkipSpace:
    return SkipSpace(layers, tuple((layer, name) for layer in range(1, layers - 1) for name in ("attention", "mlp")))


def test_skip_space() -> None:
    space = SkipSpace.of(Anatomy.of(tiny_llama(6)))
    assert len(space.blocks) == 8
    assert space.count(0.5) == 4
    assert space.count(0.01) == 1
    plan = space.highest(np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6]), 0.5)
    assert plan == LayerPlan(6, frozenset(), frozenset([1, 2, 3, 4]))
    assert space.plan(space.places(plan)) == plan
    rng = np.random.default_rng(0)
    drawn = [space.places(space.random(rng, 0.25)) for _ in range(200)]
    assert {len(places) for places in drawn} == {2}
    assert set().union(*drawn) == set(range(8))
    assert space.whole_layers == (1, 2, 3, 4)
    assert [plan.picture() for plan in space.timed_plans()] == ["#.#.##", "#aaaa#"]


def test_skip_space_of_shared_keys() -> None:
    """Gemma 3n: attention whose keys later layers read always runs, so such a layer is never left out as a whole."""
    anatomy = Anatomy.of(build("gemma3n_text"))
    space = SkipSpace.of(anatomy)
    assert anatomy.kv_sources == {1, 2}
    assert space.blocks == ((1, "mlp"), (2, "mlp"), (3, "attention"), (3, "mlp"))
    assert space.whole_layers == (3,)
    assert [plan.picture() for plan in space.timed_plans()] == ["###.#", "#aaa#"]


def test_too_few_layers() -> None:
    with pytest.raises(SettingError, match=r"at least 4 layers, LlamaForCausalLM has 3"):
        SkipSpace.of(Anatomy.of(tiny_llama(3)))


COSTS = ForwardCosts(fixed=0.1, attention=1.0, mlp=1.0, several=0.5, token=0.01, step=0.0, num_layers=10)
DEAR = replace(COSTS, step=30.0)


def timings(space: SkipSpace, costs: ForwardCosts) -> Stopwatch:
    """What a stopwatch shows where forwards cost that."""
    early, attention = space.timed_plans()
    seconds = {
        "early": costs.draft(early) - costs.step,
        "attention": costs.draft(attention) - costs.step,
        "full": costs.plain(),
        "few": costs.plain() + costs.several + costs.num_layers * costs.token,
        "many": costs.plain() + costs.several + costs.num_layers * costs.token * (MANY - 1),
        "draft": costs.draft(early),
    }
    return Stopwatch(early, attention, {name: [time] for name, time in seconds.items()})


@pytest.mark.parametrize(
    "space", [space(), SkipSpace.of(Anatomy.of(build("gemma3n_text")))], ids=["plain", "shared keys"]
)
def test_costs_of_blocks_follow_from_the_timed_plans(space: SkipSpace) -> None:
    costs = ForwardCosts(2.0, attention=0.5, mlp=1.5, several=3.0, token=0.25, step=0.125, num_layers=space.num_layers)
    found = timings(space, costs).costs()
    for name in ("fixed", "attention", "mlp", "several", "token", "step"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name)), name


@pytest.mark.parametrize(
    ("lengths", "before"),
    [((20,), 0), ((20, 13, 9), 0), ((20, 3, 2), 0), ((20, 15, 14), 12)],
    ids=["one row", "ragged", "short", "behind embeddings"],
)
def test_timings_change_nothing_of_the_text(lengths: tuple[int, ...], before: int) -> None:
    """They are taken at its end, where a row may be shorter than what is timed; slots before it have no ids."""
    target, text = after_prefill(tiny_llama(8), lengths)
    text = Text(text.ids[:, before:], [length - before for length in lengths], [before] * len(lengths), 0)
    stopwatch = Stopwatch(*SkipSpace.of(target.anatomy).timed_plans())
    limits = Limits(FixedLength(2), 25)
    draft = PartialDraft(target, stopwatch.early, limits, Scorer(LogitsProcessorList(), len(lengths), False))
    usual = keys_and_values(target, text)
    with target.prepared():
        draft.measure(text, stopwatch, 2)
    for now, then in zip(keys_and_values(target, text), usual, strict=True):
        torch.testing.assert_close(now, then)
    names = {"early", "attention", "full", "few", "many", "draft"}
    assert {name: len(times) for name, times in stopwatch.seconds.items()} == dict.fromkeys(names, 2)
    assert all(time > 0 for times in stopwatch.seconds.values() for time in times)
    assert (draft.steps, draft.limits) == (0, limits)


# What sets are worth --------------------------------------------------------------------------------------------------


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


# The search -----------------------------------------------------------------------------------------------------------


# What blocks are worth ------------------------------------------------------------------------------------------------


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


def scores_of(worth: dict[LayerPlan, float]) -> Scores:
    """One trial of each set on one window."""
    count = len(worth)
    return Scores(tuple(worth), np.array(list(worth.values())), np.ones(count), np.arange(count), np.zeros(count, int))


# A search -------------------------------------------------------------------------------------------------------------


def predicted(share: float, tokens: int = 32) -> list[Trace]:
    """Of a text of 32 tokens by default a set predicts this share, equally likely everywhere."""
    return [Trace(np.full((1, tokens), share), np.full((1, tokens), 0.9))]


def no_layers(most: int) -> list[LayerPlan]:
    raise AssertionError("nothing should search for the closest layers")


def skipping(*places: int) -> LayerPlan:
    return space().plan(places)


def matchness_of(known: frozenset[int], plan: LayerPlan) -> float:
    """Each block that should have run costs as much."""
    return 1 - len(space().places(plan) - known) / len(space().blocks)


def run_search(settings: OnTheFlySearch, known: frozenset[int], ratio: float = 0.5) -> SkipSearch:
    half = frozenset(range(1, 5))
    search = SkipSearch(settings, space(), ratio, LayerPlan(10, half, half))
    while not search.is_over:
        plan = search.propose(no_layers)
        assert plan is not None
        search.register(plan, predicted(matchness_of(known, plan)))
    return search


def test_search_begins_with_the_set_that_drafts() -> None:
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, start := LayerPlan(10, frozenset([3]), frozenset()))
    search.begin(no_layers)
    assert search.choice.matchness == 0
    assert search.propose(no_layers) == search.best == start
    search.register(start, predicted(0.4))
    assert search.choice.matchness == pytest.approx(0.4)
    drawn = [search.propose(no_layers) for _ in range(20)]
    assert None not in drawn
    assert {len(search.space.places(plan)) for plan in drawn} == {8}
    assert len(set(drawn)) > 10
    search.register(drawn[0], predicted(0.3))
    assert search.best == start
    search.register(drawn[1], predicted(0.5))
    assert search.best == drawn[1]
    assert search.history == pytest.approx([0.4, 0.3, 0.5])
    assert list(search.found) == [(0, start), (3, drawn[1])]


def test_a_lucky_set_is_found_out() -> None:
    """What scored best is tried again on later text, and it is believed only in part."""
    steady, lucky, other = (LayerPlan(10, frozenset([layer]), frozenset()) for layer in (1, 2, 3))
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, steady)
    search.propose(no_layers)
    for plan, score in ((steady, 0.6), (lucky, 0.9), (other, 0.0)):
        search.register(plan, predicted(score))
    assert search.best == lucky
    assert 0.6 < search.choice.matchness < 0.89
    search.begin_window()
    assert [search.propose(no_layers) for _ in range(3)] == [lucky, steady, other]
    assert search.propose(no_layers) not in (steady, lucky, other)
    for plan, score in ((lucky, 0.1), (steady, 0.6)):
        search.register(plan, predicted(score))
    assert search.best == steady


def test_easy_text_makes_no_set_the_best() -> None:
    steady, spoilt, plucky = (LayerPlan(10, frozenset([layer]), frozenset()) for layer in (1, 2, 3))
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, steady)
    for easiness, trials in ((0.1, ((steady, 0.4),)), (0.5, ((steady, 0.4), (spoilt, 0.35)))):
        search.begin_window()
        for plan, score in trials:
            search.register(plan, predicted(easiness + score))
    assert search.best == steady
    search.begin_window()
    for plan, score in ((steady, 0.4), (plucky, 0.45)):
        search.register(plan, predicted(score))
    assert search.best == plucky


@pytest.mark.parametrize(
    ("settings", "scores", "steps"),
    [
        (OnTheFlySearch(max_steps=5), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 5),
        (OnTheFlySearch(patience=2), [0.1, 0.9, 0.1, 0.1, 0.9], 4),
        (OnTheFlySearch(target_matchness=0.85), [0.1, 0.2, 1.0, 1.0, 1.0, 1.0], 5),
        (ClosestLayers(max_steps=5), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 5),
        (ClosestLayers(patience=2), [0.1, 0.2, 0.2, 0.1, 0.9], 4),
    ],
    ids=["max_steps", "patience", "target", "clasp: max_steps", "clasp: patience"],
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


def test_a_search_that_is_over_tries_nothing_more() -> None:
    search = SkipSearch(OnTheFlySearch(max_steps=4), space(), 0.5, skipping(0))
    for place in range(3):
        search.register(skipping(place), predicted(0.5))
    search.begin_window()
    plan = search.propose(no_layers)
    assert plan is not None
    search.register(plan, predicted(0.5))
    assert search.is_over
    assert search.propose(no_layers) is None


def test_a_search_that_is_over_keeps_its_set() -> None:
    search = SkipSearch(OnTheFlySearch(max_steps=2), space(), 0.5, skipping(0))
    for plan, score in ((skipping(0), 0.5), (skipping(1), 0.6)):
        search.register(plan, predicted(score))
    assert search.is_over
    search.register(skipping(2), predicted(1.0))  # from another thread
    assert search.best == skipping(1)
    for _ in range(2 * schedule._IDLE):
        search.begin_window()
        assert search.propose(no_layers) is None


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
    large, rng = space(40), np.random.default_rng(7)
    settings = OnTheFlySearch(max_steps=251, bayes_interval=50, target_matchness=1.0)
    search = SkipSearch(settings, large, 0.5, large.random(rng, 0.5))
    while not search.is_over:
        plan = search.propose(no_layers)
        assert plan is not None
        search.register(plan, predicted(rng.random()))
    assert sizes[:2] == [49, 99]
    assert len(sizes) == 5
    assert max(sizes) <= 200


# Sizes ----------------------------------------------------------------------------------------------------------------


def random_sets(ratio: float = 0.4, auto: bool = True) -> RandomAndBayes:
    return RandomAndBayes(OnTheFlySearch(target_matchness=0.95), space(), ratio, auto)


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


# By expected speed ----------------------------------------------------------------------------------------------------


def speedup(traces: list[Trace], plan: LayerPlan, rule: Rule, ease: float = 1.0) -> float:
    (run,) = replays([trace.eased(ease) for trace in traces], [rule], plan, COSTS, 25)
    return COSTS.plain() * run.tokens / run.seconds


def timed_search(
    settings: Search, start: LayerPlan, rules: Sequence[Rule] = (FixedLength(2),), costs: ForwardCosts = COSTS
) -> SkipSearch:
    """A search for a ratio, too, where forwards have been timed."""
    search = SkipSearch(settings, space(), 0.5, start, auto=True, rules=rules)
    search.time(timings(space(), costs))
    search.begin_window()
    return search


CAREFUL, BOLD = skipping(0, 3, 8, 11), skipping(*range(1, 11))
SHARES = ((CAREFUL, 0.9), (BOLD, 0.8))


@pytest.mark.parametrize("times_first", [True, False])
def test_the_faster_size_wins_over_the_one_that_matches_more(times_first: bool) -> None:
    rules = [FixedLength(1), FixedLength(2), FixedLength(4)]
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, CAREFUL, auto=True, rules=rules)
    if times_first:
        search.time(timings(space(), COSTS))
    search.register(CAREFUL, predicted(0.9))
    search.register(BOLD, predicted(0.8))
    if not times_first:
        assert (search.best, search.choice.stop, search.choice.expected_speedup) == (CAREFUL, None, None)
        search.time(timings(space(), COSTS))
    speeds = {(plan, rule): speedup(predicted(share), plan, rule) for plan, share in SHARES for rule in rules}
    choice = search.choice
    assert (choice.plan, choice.stop) == (BOLD, FixedLength(2)) == max(speeds, key=lambda key: speeds[key])
    # A single trial is drawn a little towards the other size's.
    assert choice.expected_speedup == pytest.approx(speeds[BOLD, FixedLength(2)], rel=0.02)
    assert choice.drafts
    assert choice.matchness == pytest.approx(0.8, abs=0.02)
    assert choice.acceptance_rate == pytest.approx((0.8 + 0.8**2) / 2)


def test_matchness_decides_where_the_ratio_is_given() -> None:
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, CAREFUL)
    search.time(timings(space(), COSTS))
    for plan, share in SHARES:
        search.register(plan, predicted(share))
    assert (search.best, search.choice.stop, search.choice.expected_speedup) == (CAREFUL, None, None)


def test_the_stop_rule_with_the_most_tokens_per_second_is_chosen() -> None:
    """Where the draft knows when it is wrong, its confidence shows when to stop."""
    rules = [FixedLength(1), FixedLength(4), ConfidenceThreshold(0.5)]
    rights = np.array([[1.0, 0, 1, 1, 1, 1, 1, 0] * 5])
    for sure, stop in ((0.2 + 0.6 * rights, ConfidenceThreshold(0.5)), (np.full((1, 40), 0.8), FixedLength(1))):
        search = timed_search(OnTheFlySearch(), BOLD, rules)
        search.register(BOLD, [Trace(rights, sure)])
        assert search.choice.stop == stop


def test_closest_layers_of_all_sizes_are_tried_whatever_matches() -> None:
    """Where the size is searched for, a set that matches enough is no reason to stop."""
    for auto in (True, False):
        search = SkipSearch(ClosestLayers(), space(), 0.5, CAREFUL, auto, [FixedLength(2)])
        for _ in range(4):
            search.begin_window()
            search.register(CAREFUL, predicted(1.0))
        assert search.is_over != auto


def test_no_set_drafts_where_none_pays() -> None:
    search = timed_search(OnTheFlySearch(), BOLD, costs=DEAR)
    search.register(BOLD, predicted(1.0))
    assert not search.choice.drafts
    assert search.choice.expected_speedup is not None
    assert search.choice.expected_speedup < 1
    for share, pays in ((0.86, False), (0.88, True)):  # a little more than 1 is within what estimates are wrong by
        search = timed_search(OnTheFlySearch(), CAREFUL, [FixedLength(1)])
        search.register(CAREFUL, predicted(share))
        assert search.choice.expected_speedup == pytest.approx(speedup(predicted(share), CAREFUL, FixedLength(1)))
        assert search.choice.expected_speedup > 1
        assert search.choice.drafts == pays


@pytest.mark.parametrize("pays", [False, True])
def test_a_set_that_does_not_pay_is_tried_again(pays: bool) -> None:
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    search.register(BOLD, predicted(0.9 if pays else 0.1))
    assert (search.is_over, search.choice.drafts) == (True, pays)
    tried = []
    for _ in range(2 * schedule._IDLE):
        search.begin_window()
        tried.append(search.propose(no_layers))
        assert search.propose(no_layers) is None
    assert tried.count(BOLD) == (0 if pays else 2)
    assert tried.count(None) == len(tried) - tried.count(BOLD)
    search.register(BOLD, predicted(1.0, 320))
    assert search.choice.drafts


# How drafts fare ------------------------------------------------------------------------------------------------------


def rounds(*shares: float, drafted: int = 64, pace: float = 1.0) -> Feedback:
    """Rounds in each of which this share of what was expected is accepted."""
    found = Feedback()
    for share in shares:
        found.add(drafted, expected=drafted / 2, accepted=share * drafted / 2, foretold=pace, taken=1.0)
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


def test_pace_by_hand() -> None:
    """Over that of one-token steps, which take longer than foretold, too, where a machine is busy."""
    assert rounds(1.0, pace=0.5).pace(1.0) == pytest.approx(1.05 / 2)
    assert rounds(1.0, pace=0.98).pace(1.0) == 1.0
    assert rounds(1.0, pace=3.0).pace(1.0) == 1.0
    assert rounds(1.0, pace=0.5, drafted=16).pace(1.0) == 1.0  # too little to say
    assert rounds(1.0, pace=0.0).pace(1.0) == 1.0  # not known
    assert rounds(1.0, pace=0.5).pace(1.2) == pytest.approx(1.2 * 1.05 / 2)
    busy = rounds(1.0, pace=0.5, drafted=512)
    busy.add_plain(foretold=1.0, taken=1.4)
    assert busy.pace(1.2) == pytest.approx(1.4 * 1.05 / 2)


def test_windows_without_a_draft_let_doubt_fade() -> None:
    """What an earlier set's drafts have shown shows little of the next, and nothing corrects it while none is made."""
    search = timed_search(OnTheFlySearch(), BOLD)
    search.register(BOLD, predicted(0.9))
    promised = search.choice.expected_speedup
    draft(search, 0.3, 160)
    search.begin_window()
    assert not search.choice.drafts
    search.register(BOLD, predicted(0.9))
    assert not search.choice.drafts
    search.begin_window()  # nothing was drafted in the window before
    search.register(BOLD, predicted(0.9))
    assert search.choice.drafts
    assert search.choice.expected_speedup == pytest.approx(promised)


def test_another_set_is_not_blamed_for_the_drafts_of_the_one_before() -> None:
    search = timed_search(OnTheFlySearch(), BOLD)
    search.register(BOLD, predicted(0.7))
    draft(search, 0.1, 160)
    for _ in range(3):
        search.register(CAREFUL, predicted(0.99))
    assert search.best == CAREFUL
    fresh = timed_search(OnTheFlySearch(), BOLD)
    fresh.register(BOLD, predicted(0.7))
    for _ in range(3):
        fresh.register(CAREFUL, predicted(0.99))
    assert search.choice == fresh.choice


def draft(search: SkipSearch, share: float, drafted: int = 16, slowness: float = 1.0, plan: LayerPlan = BOLD) -> None:
    """One round, with the share of drafted tokens that is accepted and the time it takes over what was foretold."""
    foretold = drafted * COSTS.draft(plan) + COSTS.verify(plan.first_altered, drafted)
    search.watch(plan, 1, drafted, 1 + round(share * drafted), drafted, drafted, slowness * foretold)


def draft_much(search: SkipSearch, share: float) -> None:
    for _ in range(feedback._WATCHED // 16):
        draft(search, share)
    search.begin_window()


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
    assert search.propose(no_layers) == BOLD
    assert search.propose(no_layers) not in (None, BOLD)
    search.register(BOLD, predicted(0.9))
    assert search.is_over  # once more after one step
    draft_much(search, 0.19)
    assert search.is_over  # which is the usual by now
    rounds = feedback._WATCHED // 16
    assert search.generated == rounds * sum(1 + accepted for accepted in (8, 8, 10, 8, 7, 3, 3))


@pytest.mark.parametrize("what", ["too few", "of another set", "still searching"])
def test_a_search_does_not_begin_again(what: str) -> None:
    search = timed_search(OnTheFlySearch(max_steps=3 if what == "still searching" else 1), BOLD)
    search.register(BOLD, predicted(0.9))
    draft_much(search, 0.8)
    search._schedule.steps += 100  # a mark
    for _ in range(2 if what == "too few" else feedback._WATCHED // 16):
        draft(search, 0.0, plan=CAREFUL if what == "of another set" else BOLD)
    search.begin_window()
    assert search.steps > 100


def test_a_search_that_begins_again_tries_what_was_best_before() -> None:
    search = timed_search(OnTheFlySearch(max_steps=2), BOLD)
    search.register(CAREFUL, predicted(0.9))
    search.register(BOLD, predicted(0.9))
    draft_much(search, 0.8)
    draft_much(search, 0.1)
    assert [search.propose(no_layers) for _ in range(2)] == [BOLD, CAREFUL]


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
            search.watch(BOLD, 1, 0, 1, 0, 0, COSTS.plain())
        search.begin_window()
        if search.propose(no_layers) is not None:
            search.register(BOLD, predicted(0.9))
        assert windows < 6 * schedule._IDLE
    assert windows >= schedule._IDLE - 2


def test_rounds_that_take_longer_than_foretold_lower_the_expected_speed() -> None:
    for slowness, factor in ((0.5, 1.0), (1.04, 1.0), (2.0, 1.05 / 2)):
        search = timed_search(OnTheFlySearch(), BOLD)
        search.register(BOLD, predicted(0.5))
        draft(search, (0.5 + 0.5**2) / 2, 160, slowness)
        search.begin_window()
        expected = speedup(predicted(0.5), BOLD, FixedLength(2))
        assert search.choice.expected_speedup == pytest.approx(factor * expected)


def test_a_new_trial_does_not_make_up_for_drafts_that_fare_badly() -> None:
    search = timed_search(OnTheFlySearch(), BOLD)
    search.register(BOLD, predicted(0.9))
    draft(search, 0.3, 160)
    search.begin_window()
    before = search.choice.expected_speedup
    search.register(BOLD, predicted(0.9))
    assert search.choice.expected_speedup == pytest.approx(before)


# While generating -----------------------------------------------------------------------------------------------------


def generated(model: PreTrainedModel, prompts: torch.Tensor | dict[str, Any], tokens: int, **options: Any) -> Any:
    """Greedily by default."""
    if isinstance(prompts, torch.Tensor):
        prompts = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    model.generation_config.eos_token_id = None
    return model.generate(**prompts, max_new_tokens=tokens, pad_token_id=0, **{"do_sample": False} | options)


def prompt(rows: int = 1, length: int = 6) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(5))


def an_end(texts: torch.Tensor) -> tuple[int, list[int]]:
    """The token at which the texts would end at the most different lengths, and these."""
    ends = {
        token: [row.index(token) if token in row else len(row) for row in texts.tolist()]
        for token in texts.unique().tolist()
    }
    token = max(ends, key=lambda token: max(ends[token]) - min(ends[token]))
    return token, ends[token]


def use_costs(monkeypatch: pytest.MonkeyPatch, **costs: float) -> None:
    """Forwards of a model of 8 layers are taken to cost that."""
    usual = {"fixed": 0.1, "attention": 1.0, "mlp": 1.0, "several": 0.0, "token": 0.01, "step": 0.0}
    found = ForwardCosts(num_layers=8, **usual | costs)
    monkeypatch.setattr(Stopwatch, "costs", lambda self, of=min: found)


@pytest.mark.parametrize(("several", "is_over"), [(20.0, True), (0.0, False)])
def test_a_search_without_hope_ends_early(monkeypatch: pytest.MonkeyPatch, several: float, is_over: bool) -> None:
    """Where a verification costs as much as two one-token forwards, no closest set can pay."""
    use_costs(monkeypatch, several=several)
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=ClosestLayers(context_window=8, budget=1.0)))
    plain = generated(model, prompt(), 40)
    assert torch.equal(generated(model, prompt(), 40, assistant=spec), plain)
    found = search_of(spec, model)
    assert found.is_over == is_over
    sizes = {len(trial.plan.skipped_layers) for trial in found.trials}
    assert len(sizes) >= 5
    assert {trial.window for trial in found.trials} == ({1, 2} if is_over else {1, 2, 3, 4})


SEARCHES = [
    OnTheFlySearch(context_window=8, bayes_interval=4, budget=1.0),
    ClosestLayers(context_window=8, target_matchness=1.0, budget=1.0),
]


def fixed_drafts(search: Search, ratio: Any = "auto") -> SelfSpec:
    """Drafts of three tokens, some of which are rejected."""
    return SelfSpec(SkipLayers(search=search, ratio=ratio), FixedLength(3))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "make",
    [lambda: tiny_llama(8), lambda: build("gemma3_text"), lambda: build("gpt_oss"), lambda: build("gemma3n_text")],
)
@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_searching_changes_no_token(make: Callable[[], PreTrainedModel], rows: int, search: Search) -> None:
    model, ids = make(), prompt(rows, 10)
    plain = generated(model, ids, 40)
    for spec in (SelfSpec.swift(search=search), fixed_drafts(search, 0.4)):
        seconds = 0.0
        for _ in range(2):
            assert torch.equal(generated(model, ids, 40, assistant=spec), plain)
            assert spec.stats is not None
            seconds += spec.stats.search_seconds
        found = search_of(spec, model)
        assert len(found.history) >= 4
        assert seconds > 0
        assert spec.stats.plan == found.best.picture()
    assert 0 < spec.stats.accepted < spec.stats.drafted
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_ragged_batches_that_end_early_keep_their_tokens(search: Search) -> None:
    """Rows of other lengths, before the text and behind it."""
    model, prompts, spec = tiny_llama(8), ragged_batch((4, 9, 6)), fixed_drafts(search, 0.4)
    end, ends = an_end(generated(model, prompts, 60)[:, 9:])
    assert min(ends) < 20 < 40 < max(ends)
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    plain = model.generate(**prompts, **options)
    for _ in range(2):
        assert torch.equal(model.generate(**prompts, assistant=spec, **options), plain)
    found = search_of(spec, model)
    assert len(found.history) >= 5
    assert {len(done.traces) for done in found.trials} == {3}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_searching_changes_no_drawn_token(search: Search, rows: int) -> None:
    """Of one choice each token is drawn, so that it is the greedy one; then of several."""
    model, ids, spec = tiny_llama(8), prompt(rows), fixed_drafts(search, 0.4)
    plain = generated(model, ids, 70)
    for _ in range(2):
        assert torch.equal(generated(model, ids, 70, assistant=spec, do_sample=True, top_k=1), plain)
    assert len(search_of(spec, model).history) >= 5
    assert generated(model, ids, 70, assistant=spec, do_sample=True, temperature=0.7).shape == plain.shape


def test_drawn_text_of_any_length_is_searched() -> None:
    """At the end of a text less than a window is left to look at."""
    model = tiny_llama(8)
    for search, lengths in ((OnTheFlySearch(context_window=64), (70,)), (ClosestLayers(), (30, 50, 70))):
        spec = fixed_drafts(search, 0.4)
        for tokens in lengths:
            assert generated(model, prompt(), tokens, assistant=spec, do_sample=True).shape == (1, 6 + tokens)


def test_a_search_ends_between_trials_while_tokens_are_drawn() -> None:
    """Trials that were due for the window are not made any more."""
    model = tiny_llama(8)
    for max_steps in (7, 8, 9):
        search = OnTheFlySearch(context_window=8, max_steps=max_steps, budget=1.0)
        spec = fixed_drafts(search, 0.4)
        for _ in range(2):
            assert generated(model, prompt(), 70, assistant=spec, do_sample=True, top_k=1).shape == (1, 76)
        assert len(search_of(spec, model).history) == max_steps


def test_a_search_begins_again_while_tokens_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full model's scores of the text were not kept while the search was over."""
    asked = []
    monkeypatch.setattr(Feedback, "has_become_hard", lambda self: asked.append(1) or len(asked) == 8)
    model, spec = tiny_llama(8), fixed_drafts(OnTheFlySearch(context_window=8, max_steps=3, budget=1.0), 0.4)
    for _ in range(2):
        assert generated(model, prompt(), 70, assistant=spec, do_sample=True).shape == (1, 76)
    assert len(search_of(spec, model).history) == 6


@pytest.mark.parametrize("ratio", ["auto", 0.4])
def test_rows_shorter_than_a_window_behind_embedded_prompts(ratio: Any) -> None:
    model, spec = tiny_llama(8), fixed_drafts(ClosestLayers(), ratio)
    embedded = model.get_input_embeddings()(prompt(3, 12))
    options = {"inputs_embeds": embedded, "max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    end, ends = an_end(model.generate(**options))
    assert min(ends) < 8 < 40 < max(ends)
    plain = model.generate(eos_token_id=end, **options)
    assert torch.equal(model.generate(eos_token_id=end, assistant=spec, **options), plain)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_matchness_is_what_the_set_predicts_of_the_text(
    monkeypatch: pytest.MonkeyPatch, do_sample: bool, rows: int
) -> None:
    """In the text's place: whether it predicts the tokens, or how likely its own are accepted where they were drawn."""
    model = tiny_llama(8, factor=1.0)
    tried: list[tuple[LayerPlan, int, list[Trace], list[torch.Tensor]]] = []
    original = SearchingDraft._traces

    def watched(self: SearchingDraft, text: Text, plan: LayerPlan, window: int) -> list[Trace]:
        found = original(self, text, plan, window)
        rows = [text.ids[row : row + 1, :length] for row, length in enumerate(text.lengths)]
        tried.append((plan, window, found, rows))
        return found

    monkeypatch.setattr(SearchingDraft, "_traces", watched)
    search = OnTheFlySearch(context_window=12, budget=1.0, target_matchness=1.0)
    spec = SelfSpec(SkipLayers(search=search, ratio=0.2), FixedLength(1))
    torch.manual_seed(0)
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 0} if do_sample else {}
    generated(model, prompt(rows), 50, assistant=spec, **drawn)
    assert len({plan for plan, *_ in tried}) > 5
    assert rows == 1 or any(len({row.shape[1] for row in texts}) > 1 for *_, texts in tried)
    matched = []
    for plan, window, traces, texts in tried:
        assert len(traces) == rows
        rights = 0.0
        for found, ids in zip(traces, texts, strict=True):
            n, s = found.tokens, ids.shape[1]
            assert 8 <= n <= window <= 12
            target, _ = prefilled(model, ids, (s,))
            with target.prepared():
                logits = target.step(ids[:, s - 1 - window : -1], [s - 1 - window], plan).logits
            assert logits is not None
            logits = logits[:, -n:]
            accept = (logits.argmax(-1) == ids[:, s - n :]).float()
            if do_sample:
                scores = model(ids[:, :-1]).logits[:, -n:]
                accept = torch.minimum((logits / 0.7).softmax(-1), (scores / 0.7).softmax(-1)).sum(-1)
            np.testing.assert_allclose(found.accept, accept, atol=1e-4)
            np.testing.assert_allclose(found.confidence, logits.softmax(-1).amax(-1), atol=1e-4)
            rights += accept.sum().item()
        matched.append(rights / sum(found.tokens for found in traces))
    assert search_of(spec, model).history == pytest.approx(matched, abs=1e-4)
    assert len(set(matched)) > 1


def test_the_best_set_drafts_from_the_next_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafts = tiny_llama(8), []
    good = LayerPlan(8, frozenset([5]), frozenset([5]))
    monkeypatch.setattr(SkipSearch, "propose", lambda self, layers: good if len(self.history) == 3 else self.best)
    monkeypatch.setattr(
        SearchingDraft, "_traces", lambda self, text, plan, window: predicted(0.5 if plan == good else 0.1, window)
    )
    propose = SearchingDraft.propose
    monkeypatch.setattr(
        SearchingDraft, "propose", lambda self, text, room: drafts.append(self.plan) or propose(self, text, room)
    )
    spec = SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(context_window=4, budget=1.0))
    generated(model, prompt(), 40, assistant=spec)
    change = drafts.index(good)
    assert change > 3
    assert set(drafts[:change]) == {SkipLayers().plan(Anatomy.of(model))}
    assert set(drafts[change:]) == {good}
    generated(model, prompt(), 5, assistant=spec)
    assert spec.stats is not None
    assert spec.stats.plan == good.picture()


def test_closest_layers_draft_from_the_second_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no window; each window of text after the first brings one proposal more."""
    model, proposals, drafts = tiny_llama(8, factor=1.0), [], []
    original, propose = searching.closest_layers, SearchingDraft.propose

    def watched(target: Target, text: Text, layers: Sequence[int], most: int) -> list[LayerPlan]:
        proposals.append(text.lengths[0])
        found = original(target, text, layers, most)
        expected = by_hand(model, text.ids[:, : text.lengths[0]], range(1, 7), most)
        assert [sorted(plan.skipped_layers) for plan in found] == expected
        return found

    monkeypatch.setattr(searching, "closest_layers", watched)
    monkeypatch.setattr(
        SearchingDraft, "propose", lambda self, text, room: drafts.append(self.plan) or propose(self, text, room)
    )
    spec = SelfSpec.swift(ratio=0.5, search=ClosestLayers(context_window=8, target_matchness=1.0, budget=1.0))
    generated(model, prompt(), 60, assistant=spec)
    search = search_of(spec, model)
    assert drafts[0] == SkipLayers().plan(Anatomy.of(model))
    assert len(drafts[1].skipped_layers) == 3
    assert proposals[0] <= 6 + 4
    assert 3 < len(proposals) <= 2 + 60 // 8
    assert len(search.history) > len(proposals)
    assert {len(done.plan.skipped_layers) for done in search.trials} == {3}


def test_each_token_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closest layers are tried on windows that do not overlap, the last of them at the text's end."""
    windows: list[tuple[int, int]] = []
    original = SearchingDraft._begin_window

    def watched(self: SearchingDraft, text: Text, unseen: int) -> None:
        original(self, text, unseen)
        windows.append((text.lengths[0] - 1 - self._behind, text.lengths[0] - 1))

    monkeypatch.setattr(SearchingDraft, "_begin_window", watched)
    model, spec = (
        tiny_llama(8),
        SelfSpec.swift(ratio=0.4, search=ClosestLayers(context_window=16, max_steps=100, budget=1.0)),
    )
    for tokens, ends in ((8, False), (12, True), (60, True)):
        windows.clear()
        generated(model, prompt(), tokens, assistant=spec)
        assert bool(windows) == ends
        assert not windows or windows[-1][1] == 6 + tokens - 1
        assert all(before[1] <= after[0] for before, after in pairwise(windows))
        assert all(6 <= start < end for start, end in windows)
    assert len(windows) >= 4
    assert sum(end - start for start, end in windows) > 60 * 0.8


@pytest.mark.parametrize("rows", [1, 3])
def test_where_no_set_pays_drafts_are_empty(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    use_costs(monkeypatch, step=50.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=OnTheFlySearch(context_window=8, budget=1.0))
    plain = generated(model, prompt(rows), 40)
    assert torch.equal(generated(model, prompt(rows), 40, assistant=spec), plain)
    assert spec.stats is not None
    assert spec.stats.drafted == 0  # before it is known to pay as well
    tried = len(spec.stats.matchness)
    assert torch.equal(generated(model, prompt(rows), 40, assistant=spec), plain)
    assert (spec.stats.drafted, spec.stats.draft_steps, spec.stats.drafts) == (0, 0, False)
    assert "no set pays" in str(spec.stats)
    assert len(spec.stats.matchness) > tried  # the search goes on
    use_costs(monkeypatch, step=0.0)
    generated(model, prompt(rows), 40, assistant=spec)  # the second and last text at which forwards are timed was seen
    assert not search_of(spec, model).choice.drafts


def plain_calls(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> list[int]:
    """Rows of the calls that transformers' own loop decodes from now on."""
    calls: list[int] = []
    original = type(model)._sample
    monkeypatch.setattr(
        type(model),
        "_sample",
        lambda self, input_ids, **options: calls.append(len(input_ids)) or original(self, input_ids, **options),
    )
    return calls


@pytest.mark.parametrize("rows", [1, 3])
def test_calls_without_anything_to_do_are_plain(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Where no draft pays, transformers' loop decodes until it is time to ask again."""
    use_costs(monkeypatch, step=50.0)
    search = OnTheFlySearch(context_window=8, max_steps=4, budget=1.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=search)
    plain = generated(model, prompt(rows), 40, return_dict_in_generate=True, output_scores=True)
    generated(model, prompt(rows), 40, assistant=spec)
    assert search_of(spec, model).is_over
    calls, ours = plain_calls(monkeypatch, model), []
    for _ in range(8):
        options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "assistant": spec}
        found = generated(model, prompt(rows), 40, **options)
        assert torch.equal(found.sequences, plain.sequences)
        for score, same in zip(found.scores, plain.scores, strict=True):
            torch.testing.assert_close(score, same, atol=1e-5, rtol=1e-4)
        assert spec.stats is not None
        assert (spec.stats.tokens, spec.stats.drafted, spec.stats.drafts) == (40 * rows, 0, False)
        assert (spec.stats.mean_generated_length, spec.stats.phase) == (1.0, "acceleration")
        assert len(spec.stats.from_draft) == rows
        ours.append(not calls)
        assert spec.stats.left_to_generate == ("no draft pays" if calls else "")
        told = str(spec.stats)
        if calls:
            assert re.fullmatch(
                rf"left to plain generate, since no draft pays: {40 * rows} tokens in \d+\.\d\d seconds", told
            )
        else:
            assert "left to" not in told
        calls.clear()
    assert not ours[0]
    assert 2 <= ours.count(True) <= 4


def test_calls_stay_where_linear_layers_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    use_costs(monkeypatch, step=50.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=OnTheFlySearch(context_window=8, max_steps=4, budget=1.0))
    plain = generated(model, prompt(), 40)
    calls, asked = plain_calls(monkeypatch, model), []
    monkeypatch.setattr(call, "are_faster", lambda modules, count: asked.append(count) or True)
    for _ in range(6):
        assert torch.equal(generated(model, prompt(), 40, assistant=spec), plain)
    assert asked == [1] * len(asked)
    assert len(asked) >= 2
    assert not calls
    assert spec.stats is not None
    assert not spec.stats.drafted


def test_a_search_that_is_over_is_idle_until_it_tries_again() -> None:
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    search.register(BOLD, predicted(0.1))
    assert search.is_over
    assert search.is_idle
    search.add_idle_call(32 * (schedule._IDLE - 2), 1.0)
    assert search.is_idle
    search.add_idle_call(32, 1.0)
    assert not search.is_idle
    search.begin_window()
    assert search.propose(no_layers) == BOLD
    search.register(BOLD, predicted(0.1))
    assert search.is_idle


def test_short_calls_add_up_while_a_search_is_idle() -> None:
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    search.register(BOLD, predicted(0.1))
    calls = 0
    while search.is_idle:
        search.add_idle_call(5, 1.0)
        calls += 1
        assert calls < 1000
    assert calls == -(-32 * (schedule._IDLE - 1) // 5)


def test_calls_of_one_token_show_nothing() -> None:
    """Nothing is tried or timed on them: there is no text of the model's own to look at."""
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=ClosestLayers()))
    for seed in range(4):
        model.generate(**ragged_batch((20,), seed=seed), max_new_tokens=1, do_sample=False, assistant=spec)
    search = search_of(spec, model)
    assert (search.steps, search.timings.count, search.search_seconds) == (0, 0, 0.0)


def test_forwards_are_timed_again_when_a_set_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy at first is not held against the drafts for ever."""
    use_costs(monkeypatch, step=50.0)
    search = OnTheFlySearch(context_window=8, max_steps=2, budget=1.0)
    model, spec = tiny_llama(8), SelfSpec.swift(search=search)
    generated(model, prompt(), 40, assistant=spec)
    found = search_of(spec, model)
    assert (found.is_over, found.choice.drafts) == (True, False)
    timings = found.timings.count
    for _ in range(8):
        generated(model, prompt(), 40, assistant=spec)
    assert found.timings.count > timings


def test_a_set_that_stops_to_pay_is_replaced() -> None:
    """Text on which the drafts of a search that is over no longer pay lets it begin again, once in a while."""
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    search.register(BOLD, predicted(0.9))
    assert (search.is_over, search.choice.drafts) == (True, True)
    draft(search, 0.3, 160)
    search.begin_window()
    assert (search.is_over, search.choice.drafts) == (True, False)  # too soon
    later = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    later.register(BOLD, predicted(0.9))
    for _ in range(schedule._IDLE):
        later.begin_window()
    draft(later, 0.3, 160)
    later.begin_window()
    assert not later.is_over
    assert later.propose(no_layers) == BOLD


def test_trials_of_a_set_that_is_over_do_not_pile_up() -> None:
    search = timed_search(OnTheFlySearch(max_steps=1), BOLD)
    for _ in range(50):
        search.register(BOLD, predicted(0.1))
    assert len(search._records.sets[BOLD].trials) == skip_search._KEPT
    assert len(search.history) == 50


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


def test_trials_that_overflow_never_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose logits are no numbers is never right, and the search goes on."""
    original = Target.step

    def overflowing(target: Target, tokens: Any, cursors: Any, plan: Any = None, **options: Any) -> Any:
        step = original(target, tokens, cursors, plan, **options)
        nodes = options.get("nodes")
        if nodes is not None and nodes.hidden and step.logits is not None:
            step.logits = step.logits * float("nan")
        return step

    monkeypatch.setattr(Target, "step", overflowing)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
        model, spec = tiny_llama(8), SelfSpec.swift(search=OnTheFlySearch(context_window=8, max_steps=5, budget=1.0))
        model.generate(**ragged_batch((9,)), max_new_tokens=40, assistant=spec, **options)
        search = search_of(spec, model)
        assert search.is_over
        assert all(value <= 0.2 for value in search.history)
        assert all(np.isfinite(trace.confidence).all() for done in search.trials for trace in done.traces)


STOPS: dict[str, Any] = {
    "chosen": None,
    "a rule": ConfidenceThreshold(0.35),
    "a function": lambda ids, logits, states: torch.ones(len(ids), dtype=torch.bool),
}


@pytest.mark.parametrize("name", STOPS)
@pytest.mark.parametrize("search", SEARCHES, ids=["swift", "clasp"])
def test_the_stop_rule_of_drafts(monkeypatch: pytest.MonkeyPatch, search: Search, name: str) -> None:
    """That of the search from when it has one, and the user's own where one is given."""
    own, used = STOPS[name], []
    propose = SearchingDraft.propose

    def watched(self: SearchingDraft, text: Text, room: list[int]) -> Draft:
        used.append((self.search.choice.stop, self.limits.stop))
        return propose(self, text, room)

    monkeypatch.setattr(SearchingDraft, "propose", watched)
    use_costs(monkeypatch, several=1.0)
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=search), stop=own)
    plain = generated(model, prompt(), 40)
    for _ in range(2):
        assert torch.equal(generated(model, prompt(), 40, assistant=spec), plain)
    chosen = [stop for stop, _ in used if stop is not None]
    assert len(used) > len(chosen) > 10
    if own is None:
        first = used[0][1]
        assert all(stop == (choice or first) for choice, stop in used)
        assert set(chosen) != {first}
    else:
        assert all(stop is own for _, stop in used)
        assert name == "a function" or set(chosen) == {own}


@pytest.mark.parametrize(("budget", "tries"), [(1e-9, False), (1.0, True)])
def test_trials_while_generating_keep_to_the_budget(budget: float, tries: bool) -> None:
    model, spec = tiny_llama(8), fixed_drafts(OnTheFlySearch(context_window=8, budget=budget), 0.4)
    generated(model, prompt(), 60, assistant=spec)
    assert spec.stats is not None
    rounds = len(spec.stats.timeline) - 3  # before the first window
    assert rounds > 10
    assert (len(search_of(spec, model).history) >= rounds - 3) if tries else not search_of(spec, model).history


def test_kinds_of_calls_search_for_themselves() -> None:
    """With what another kind has found as their first set."""
    model, spec = (
        tiny_llama(8),
        SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(context_window=8, max_steps=20, budget=1.0)),
    )
    generated(model, prompt(), 40, assistant=spec)
    single = search_of(spec, model)
    assert single.best != SkipLayers().plan(Anatomy.of(model))
    best, tried = single.best, len(single.history)
    for rows, options in ((3, {}), (1, {"do_sample": True, "top_k": 1})):
        generated(model, prompt(rows), 40, assistant=spec, **options)
        found = search_of(spec, model)
        assert found is not single
        assert found.found[0][1] == best
    assert len(single.history) == tried
    generated(model, prompt(), 40, assistant=spec)
    assert search_of(spec, model) is single


def lines_of(spec: SelfSpec) -> dict[str, str]:
    """The lines of the statistics, by what comes first in them."""
    assert spec.stats is not None
    return {line[:24].rstrip(): line[25:] for line in str(spec.stats).splitlines()}


def test_statistics_of_a_search() -> None:
    model = tiny_llama(8)
    spec = SelfSpec.swift(ratio=0.4, search=OnTheFlySearch(context_window=8, max_steps=12, budget=1.0))
    phases = []
    for tokens in (9, 16, 40):
        generated(model, prompt(), tokens, assistant=spec)
        stats, search = spec.stats, search_of(spec, model)
        assert stats is not None
        phases.append((stats.phase, stats.phase == search.phase))
        assert stats.matchness == search.history
        assert stats.drafts
        last = f", last of {len(search.history)} trials {search.history[-1]:.2f}" if search.history else ""
        assert lines_of(spec)["search"] == f"{search.phase}{last}"
        tokens_so_far, seconds = zip(*stats.timeline, strict=True)
        assert len(stats.timeline) == stats.verify_passes
        assert list(tokens_so_far) == sorted(set(tokens_so_far))
        assert tokens_so_far[-1] == stats.tokens == tokens
        assert seconds[0] > 0
        assert list(seconds) == sorted(seconds)
        assert seconds[-1] < stats.total_seconds
    assert phases == [("optimization", True)] * 2 + [("acceleration", True)]
    assert len(search.history) == 12
    blocks = {"attention blocks": search.best.skipped_attention, "MLP blocks": search.best.skipped_mlp}
    for name, skipped in blocks.items():
        assert lines_of(spec)[name] == "".join("□" if layer in skipped else "■" for layer in range(8))


def test_timeline_of_a_batch() -> None:
    """Tokens of all rows, with those that came from their prompts' own forward."""
    spec = SelfSpec(SkipLayers(), FixedLength(3))
    generated(tiny_llama(8), prompt(3), 20, assistant=spec)
    assert spec.stats is not None
    assert spec.stats.timeline[-1][0] == spec.stats.tokens == 60
    assert 3 < spec.stats.timeline[0][0] <= 3 * 5


@pytest.mark.parametrize(
    ("draft", "attention", "mlp"),
    [
        (SkipLayers(attention=(1, 4), mlp=(2, 4)), "■□■■□■", "■■□■□■"),
        (EarlyExit(2), "■■□□□□", "■■□□□□"),
    ],
)
def test_pictures_of_blocks(draft: Any, attention: str, mlp: str) -> None:
    spec = SelfSpec(draft)
    generated(tiny_llama(6), prompt(), 4, assistant=spec)
    assert spec.stats is not None
    assert (spec.stats.phase, spec.stats.matchness, spec.stats.drafts) == ("", [], True)
    lines = lines_of(spec)
    assert (lines["attention blocks"], lines["MLP blocks"]) == (attention, mlp)
    assert "search" not in lines


@pytest.mark.usefixtures("no_warnings_yet")
def test_models_that_cannot_look_beside_their_text() -> None:
    model, spec = build("bloom"), SelfSpec.swift(search=OnTheFlySearch(context_window=4, budget=1.0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = generated(model, prompt(), 20, assistant=spec)
    assert any("there is no search for blocks" in str(warning.message) for warning in told)
    assert torch.equal(found, generated(model, prompt(), 20))
    assert spec._knowledge.latest(model) is None


@pytest.mark.usefixtures("no_warnings_yet")
def test_tensor_parallel_models_are_not_searched() -> None:
    """Their processes would go by timings of their own and draft different things."""
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=ClosestLayers()))
    model._tp_size = 2
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = generated(model, prompt(), 20, assistant=spec)
    assert any("tensor-parallel model, so there is no search" in str(warning.message) for warning in told)
    assert torch.equal(found, generated(model, prompt(), 20))
    assert spec._knowledge.latest(model) is None


def test_windows_longer_than_texts() -> None:
    """No text of the model can have them, or this one does not."""
    model = build("gpt2")
    with pytest.raises(SettingError, match=r"ClosestLayers\(context_window=128\) is longer .* has 128 positions"):
        generated(model, prompt(), 20, assistant=fixed_drafts(ClosestLayers(context_window=128)))
    spec = fixed_drafts(OnTheFlySearch(context_window=30, budget=1.0), 0.4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        generated(model, prompt(), 30, assistant=spec)
    assert [str(warning.message)[:50] for warning in told] == ["OnTheFlySearch(context_window=30) is longer than t"]
    assert search_of(spec, model).history == []
    generated(model, prompt(), 40, assistant=spec)
    assert search_of(spec, model).history


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: SelfSpec.swift(ratio=1.0), SettingError, r"SkipLayers\(ratio\) must lie between 0 and 1"),
        (lambda: SelfSpec.swift(ratio="half"), SettingTypeError, "'half'"),
        (lambda: SelfSpec.swift(search=32), SettingTypeError, r"OnTheFlySearch\(\), ClosestLayers\(\) or None, got 32"),
        (lambda: SkipLayers(ratio=0.4), SettingError, "search=OnTheFlySearch"),
        (
            lambda: OnTheFlySearch(context_window=0),
            SettingError,
            r"\(context_window\) must be at least 1",
        ),
        (lambda: OnTheFlySearch(target_matchness=1.5), SettingError, "target_matchness"),
        (lambda: OnTheFlySearch(budget=0.0), SettingError, r"OnTheFlySearch\(budget\) must"),
        (lambda: ClosestLayers(budget=2.0), SettingError, r"ClosestLayers\(budget\) must"),
        (lambda: OnTheFlySearch(budget=1.5), SettingError, r"OnTheFlySearch\(budget\) must"),
        (lambda: ClosestLayers(max_steps=0), SettingError, r"ClosestLayers\(max_steps\) must be at least 1"),
        (lambda: ClosestLayers(patience="12"), SettingTypeError, r"ClosestLayers\(patience\)"),
    ],
)
def test_wrong_settings(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_usual_ratios() -> None:
    assert [usual_ratio(int(billions * 1e9)) for billions in (1, 7, 13, 34, 70)] == [0.4, 0.4, 0.45, 0.5, 0.5]


def test_a_model_with_a_known_answer() -> None:
    """Half of its blocks hardly matter: without them it predicts nearly the same, without the others it does not."""
    shape = LlamaShape(64, 8, vocabulary=97, positions=256)
    model, known, agreement = known_skips_llama(shape)
    space = SkipSpace.of(Anatomy.of(model))
    places = space.places(known.plan(Anatomy.of(model)))
    assert len(places) == 6
    assert agreement > 0.8
    others = space.plan(set(range(12)) - places)
    draft = SkipLayers(tuple(others.skipped_attention), tuple(others.skipped_mlp))
    assert acceptance(model, SelfSpec(draft, FixedLength(4))) < agreement - 0.3
