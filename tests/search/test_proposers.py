"""Which blocks may be skipped, what sets of them are worth, and which ones are proposed."""

import copy
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import PAST
from helpers.models import tiny_llama
from helpers.searches import after_prefill, keys_and_values, predicted, prefilled, skipping, space
from hf_selfspec import ClosestLayers, OnTheFlySearch
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.proposers import SkipSpace, closest_layers
from hf_selfspec.search.skip_search import SkipSearch
from hf_selfspec.search.trials import estimate

pytestmark = pytest.mark.usefixtures("no_grad")


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


def test_skip_space_of_shared_keys() -> None:
    """Gemma 3n: attention whose keys later layers read always runs, so such a layer is never left out as a whole."""
    anatomy = Anatomy.of(build("gemma3n_text"))
    space = SkipSpace.of(anatomy)
    assert anatomy.kv_sources == {1, 2}
    assert space.blocks == ((1, "mlp"), (2, "mlp"), (3, "attention"), (3, "mlp"))
    assert space.whole_layers == (3,)
    assert [plan.picture() for plan in space.timed_plans()] == ["###.#", "#aaa#"]


WORTH = np.array([-0.05, 0.0, -0.01, -0.04, 0.0, -0.02, 0.0, -0.03])


def tried_sets(count: int, noise: float, windows: int = 1) -> tuple[np.ndarray, ...]:
    """Random sets of half of the blocks; they score what these are worth, the number of their window and noise."""
    rng = np.random.default_rng(0)
    blocks = (rng.random((count, len(WORTH))).argsort(1) < len(WORTH) // 2).astype(float)
    on = np.arange(count) % windows
    values = 1 + blocks @ WORTH + on + noise * rng.standard_normal(count)
    return blocks, values, np.ones(count), np.arange(count), on


@pytest.mark.parametrize("windows", [1, 4])
def test_what_blocks_are_worth(windows: int) -> None:
    """Sets are of one size, so effects are known up to a constant; how easy windows are does not matter."""
    blocks, *scores = tried_sets(300, 0.005, windows)
    found = estimate(blocks, *scores)
    assert found.effects - found.effects.mean() == pytest.approx(WORTH - WORTH.mean(), abs=0.004)
    assert found.sets == pytest.approx(1 + blocks @ WORTH + np.arange(windows).mean(), abs=0.02)


def test_sets_are_compared_on_the_same_text() -> None:
    """Window 0 is hard, 1 is easy: a set tried on easy text alone does not win by that, nor lose one on hard text."""
    values, sets, windows = np.array([0.5, 0.9, 0.8, 0.6]), np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0])
    usual, easy_only, hard_only = estimate(np.eye(3), values, np.ones(4), sets, windows).sets
    assert hard_only > usual > easy_only


@pytest.mark.every_run(".*every fifth Bayesian")
@pytest.mark.parametrize("interval", [5, 1000], ids=["every fifth Bayesian", "Thompson sampling"])
@pytest.mark.parametrize(("noise", "worst"), [(0.0, 0.5), (0.02, 1.0)], ids=["alike", "noisy"])
def test_a_known_set_is_found(noise: float, worst: float, interval: int) -> None:
    """The best of 60 sets drawn uniformly has 1.8 blocks that should have run; also where texts are easy or hard and
    trials are lucky or not."""
    wrong = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        known = frozenset(np.random.default_rng(seed + 100).choice(16, 8, replace=False).tolist())
        half = frozenset(range(1, 5))
        settings = OnTheFlySearch(max_steps=60, bayes_interval=interval, target_matchness=0.999)
        search = SkipSearch(settings, space(), 0.5, LayerPlan(10, half, half))
        for step in itertools.count():
            if step % 4 == 0:
                search.begin_window()
                ease = -10 * noise * rng.random()
            if search.is_over:
                break
            plan = search.propose()
            assert plan is not None
            # Each block that should have run costs as much.
            share = 1 - len(space().places(plan) - known) / len(space().blocks) + ease + noise * rng.standard_normal()
            search.register(plan, predicted(float(np.clip(share, 0.0, 1.0))))
        wrong.append(len(search.space.places(search.best) - known))
    assert np.mean(wrong) <= worst


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


@pytest.mark.parametrize("auto", [True, False])
def test_closest_layers_of_a_text(auto: bool) -> None:
    """One forward finds the sets of the first texts, another those of each later one; a given ratio is kept."""
    asked: list[int] = []

    def proposed() -> LayerPlan | None:
        if most := search.wants_closest:
            asked.append(most)
            layers = [frozenset(range(1, count + 1)) for count in range(1, most + 1)]
            search.closest = [LayerPlan(22, skipped, skipped) for skipped in layers]
        return search.propose()

    search = SkipSearch(ClosestLayers(patience=100), space(22), 0.4, LayerPlan(22), auto)
    assert proposed() is None
    sizes: list[list[int]] = []
    for _ in range(2):
        search.begin_window()
        sizes.append([])
        while (plan := proposed()) is not None:
            sizes[-1].append(len(plan.skipped_layers))
            search.register(plan, predicted(0.9 if len(plan.skipped_layers) == 8 else 0.5))
    assert sizes == ([[2, 4, 6, 8, 10, 12, 14, 16], [8, 8, 6]] if auto else [[8], [8, 8]])
    assert asked == ([16, 8] if auto else [8, 8])


def by_hand(model: LlamaForCausalLM, ids: torch.Tensor, layers: Sequence[int], most: int) -> list[list[int]]:
    """The dynamic programme with the layers called one by one, for the last of ``ids`` ``[1, s]``."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], **{PAST: cache})
    position = torch.tensor([[ids.shape[1] - 1]])
    start = model.model.embed_tokens(ids[:, -1:])
    rotary = model.model.rotary_emb(start, position)

    def run(layer: int, state: torch.Tensor) -> torch.Tensor:
        return model.model.layers[layer](
            state, position_embeddings=rotary, position_ids=position, **{PAST: copy.deepcopy(cache)}
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


@pytest.mark.parametrize(("layers", "most", "seed"), [(range(1, 7), 5, 0), ((1, 2, 4, 6), 4, 2)])
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
