"""Which blocks to skip: passes beside the text, and what chooses from them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from architectures import build
from conftest import tiny_llama
from sklearn.gaussian_process import GaussianProcessRegressor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from hf_selfspec import FixedLength, SelfSpec, SettingError, SettingTypeError, SkipLayers
from hf_selfspec.bench.synthetic import LlamaShape, acceptance, known_skips_llama
from hf_selfspec.draft import searching
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.partial import LayerPlan
from hf_selfspec.model.target import Nodes, Target
from hf_selfspec.search.clasp import closest_layers
from hf_selfspec.search.on_the_fly import ClosestLayers, OnTheFlySearch, SkipSearch, usual_ratio
from hf_selfspec.search.skip_space import SkipSpace
from hf_selfspec.types import Text

WINDOW = 7


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def after_prefill(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[Target, Text]:
    """Rows of these lengths, all tokens of which but the last are in the cache; prepare the target to use it."""
    anatomy = Anatomy.of(model)
    width = max(lengths)
    ids = torch.randint(3, 90, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    text = Text.of(ids, [0] * len(lengths), 20)
    text.lengths = list(lengths)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, len(lengths), width + 20))
    with target.prepared():
        target.prefill(ids[:, :-1], [0] * len(lengths), [length - 1 for length in lengths])
    target.roots = text.roots()
    return target, text


@pytest.mark.parametrize("lengths", [(20,), (20, 13, 16)], ids=["one row", "ragged"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "mixtral"])
def test_window_beside_the_text(name: str, lengths: tuple[int, ...]) -> None:
    """A plan says after tokens of the text what it would have said in their place, and nothing there changes."""
    target, text = after_prefill(build(name), lengths)
    layers = target.anatomy.num_layers
    plan = LayerPlan(layers, frozenset([1]), frozenset([1]))
    columns = torch.tensor(lengths)[:, None] - 1 - WINDOW + torch.arange(WINDOW)
    tokens = text.ids.gather(1, columns)
    with target.prepared():
        before = [(layer.keys.clone(), layer.values.clone()) for layer in target.cache.layers]
        beside = target.step(tokens, text.roots(), plan, nodes=Nodes.again(WINDOW)).logits
        for (keys, values), layer in zip(before, target.cache.layers, strict=True):
            for row, root in enumerate(text.roots()):
                assert torch.equal(layer.keys[row, :, :root], keys[row, :, :root])
                assert torch.equal(layer.values[row, :, :root], values[row, :, :root])
        in_place = target.step(tokens, [root - WINDOW for root in text.roots()], plan).logits
    assert beside is not None
    assert in_place is not None
    torch.testing.assert_close(beside, in_place, rtol=1e-5, atol=1e-5)


def by_hand(model: LlamaForCausalLM, ids: torch.Tensor, count: int) -> list[int]:
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

    last = model.config.num_hidden_layers - 1
    states = {0: (run(0, start), [])}
    for layer in range(1, last):
        whole = run(layer, states[0][0])
        found = {0: (whole, [])}
        for skipped in range(1, min(count, layer) + 1):
            ways = [(states[skipped - 1][0], [*states[skipped - 1][1], layer])]
            if skipped in states:
                ways.append((run(layer, states[skipped][0]), states[skipped][1]))
            found[skipped] = max(ways, key=lambda way: torch.cosine_similarity(way[0], whole, dim=-1).item())
        states = found
    return states[count][1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_closest_layers(count: int, seed: int) -> None:
    model = tiny_llama(8, seed, factor=1.0)
    target, text = after_prefill(model, (20,))
    with target.prepared():
        plan = closest_layers(target, text, count)
    assert sorted(plan.skipped_layers) == by_hand(model, text.ids[:, :20], count)
    assert plan.skipped_attention == plan.skipped_mlp


def test_closest_layers_of_a_batch() -> None:
    """One plan for all rows: that of one row where all are alike, and not that of the first where they differ."""
    model = tiny_llama(8, factor=1.0)
    plans = []
    for text_of in (lambda ids: ids[:1].repeat(3, 1), lambda ids: ids):
        target, text = after_prefill(model, (20, 20, 20))
        text.ids = text_of(text.ids)
        with target.prepared():
            target.prefill(text.ids[:, :19], [0] * 3, [19] * 3)
            plans.append(closest_layers(target, text, 3))
    assert sorted(plans[0].skipped_layers) == by_hand(model, text.ids[:1, :20], 3)
    assert plans[1] != plans[0]


def test_skip_space() -> None:
    space = SkipSpace.of(Anatomy.of(tiny_llama(6)))
    assert len(space.blocks) == 8
    assert space.count(0.5) == 4
    assert space.count(0.01) == 1
    plan = space.highest(np.array([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6]), 0.5)
    assert plan == LayerPlan(6, frozenset(), frozenset([1, 2, 3, 4]))
    assert space.plan(space.places(plan)) == plan
    chance = np.random.default_rng(0)
    drawn = [space.places(space.random(chance, 0.25)) for _ in range(200)]
    assert {len(places) for places in drawn} == {2}
    assert set().union(*drawn) == set(range(8))


def test_skip_space_of_shared_keys() -> None:
    """Gemma 3n: attention whose keys later layers read always runs."""
    anatomy = Anatomy.of(build("gemma3n_text"))
    blocks = SkipSpace.of(anatomy).blocks
    assert anatomy.kv_sources
    assert not any((layer, "attention") in blocks for layer in anatomy.kv_sources)


def test_too_few_layers() -> None:
    with pytest.raises(SettingError, match=r"at least 4 layers, LlamaForCausalLM has 3"):
        SkipSpace.of(Anatomy.of(tiny_llama(3)))


# The search -----------------------------------------------------------------------------------------------------------


def space(layers: int = 10) -> SkipSpace:
    return SkipSpace(layers, tuple((layer, name) for layer in range(1, layers - 1) for name in ("attention", "mlp")))


def matchness_of(known: frozenset[int], plan: LayerPlan) -> float:
    """Each block that should have run costs as much."""
    return 1 - len(space().places(plan) - known) / len(space().blocks)


def run_search(settings: OnTheFlySearch, known: frozenset[int], ratio: float = 0.5) -> SkipSearch:
    half = frozenset(range(1, 5))
    search = SkipSearch(settings, space(), ratio, LayerPlan(10, half, half))
    while not search.is_over:
        plan = search.propose()
        search.register(plan, matchness_of(known, plan))
    return search


def test_search_begins_with_the_set_that_drafts() -> None:
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, start := LayerPlan(10, frozenset([3]), frozenset()))
    assert search.matchness == 0
    assert search.propose() == search.best == start
    search.register(start, 0.4)
    assert search.matchness == pytest.approx(0.4)
    drawn = [search.propose() for _ in range(20)]
    assert {len(search.space.places(plan)) for plan in drawn} == {8}
    assert len(set(drawn)) > 10
    search.register(drawn[0], 0.3)
    assert search.best == start
    search.register(drawn[1], 0.5)
    assert search.best == drawn[1]
    assert search.history == [0.4, 0.3, 0.5]


def test_a_lucky_set_is_found_out() -> None:
    """What scored best is tried again on later text, and the mean counts, drawn towards the usual score."""
    steady, lucky, other = (LayerPlan(10, frozenset([layer]), frozenset()) for layer in (1, 2, 3))
    search = SkipSearch(OnTheFlySearch(), space(), 0.5, steady)
    search.propose()
    for plan, score in ((steady, 0.6), (lucky, 0.9), (other, 0.0)):
        search.register(plan, score)
    assert search.best == lucky
    assert search.matchness == pytest.approx((0.9 + 0.5 * 0.5) / 1.5)
    search.begin_window()
    assert [search.propose() for _ in range(3)] == [lucky, steady, other]
    assert search.propose() not in (steady, lucky, other)
    for plan, score in ((lucky, 0.1), (steady, 0.6)):
        search.register(plan, score)
    assert search.best == steady


@pytest.mark.parametrize(
    ("settings", "scores", "steps"),
    [
        (OnTheFlySearch(max_steps=5), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 5),
        (OnTheFlySearch(patience=2), [0.1, 0.2, 0.2, 0.1, 0.9], 4),
        (OnTheFlySearch(target_matchness=0.85), [0.1, 0.2, 1.0, 1.0, 1.0, 1.0], 5),
    ],
    ids=["max_steps", "patience", "target"],
)
def test_search_ends(settings: OnTheFlySearch, scores: list[float], steps: int) -> None:
    search = SkipSearch(settings, space(), 0.5, LayerPlan(10))
    plans = [search.propose(), *(search.propose() for _ in range(2))]
    for count, score in enumerate(scores):
        assert search.is_over == (count >= steps)
        if not search.is_over:  # the third one is tried again and again
            search.register(plans[min(count, 2)] if settings.target_matchness < 0.9 else search.propose(), score)
    assert len(search.history) == steps


def test_bayesian_proposals_find_a_known_set() -> None:
    """Better than as many random sets, and nearly the best there is."""
    known = frozenset(np.random.default_rng(3).choice(16, 8, replace=False).tolist())
    found = run_search(OnTheFlySearch(max_steps=60, bayes_interval=5, target_matchness=0.999), known)
    drawn = run_search(OnTheFlySearch(max_steps=60, bayes_interval=1000, target_matchness=0.999), known)
    assert found.matchness > drawn.matchness
    assert len(found.space.places(found.best) - known) <= 1


def test_history_of_the_gaussian_process_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = GaussianProcessRegressor.fit
    monkeypatch.setattr(
        GaussianProcessRegressor, "fit", lambda self, x, y: sizes.append(len(y)) or original(self, x, y)
    )
    run_search(OnTheFlySearch(max_steps=301, bayes_interval=50, target_matchness=1.0), frozenset(range(8)))
    assert sizes[:2] == [49, 99]
    assert len(sizes) == 6
    assert max(sizes) <= 200


# While generating -----------------------------------------------------------------------------------------------------


def greedy(model: PreTrainedModel, ids: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
    model.generation_config.eos_token_id = None
    options = {"do_sample": False} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **options)


def prompt(rows: int = 1, length: int = 6) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [lambda: tiny_llama(8), lambda: build("gemma3_text"), lambda: build("gpt_oss")])
@pytest.mark.parametrize(
    "search",
    [OnTheFlySearch(context_window=8, bayes_interval=4), ClosestLayers(context_window=8, target_matchness=1.0)],
    ids=["swift", "clasp"],
)
def test_searching_changes_no_token(make: Any, rows: int, search: OnTheFlySearch | ClosestLayers) -> None:
    model = make()
    spec = SelfSpec.swift(search=search)
    for _ in range(2):
        ids = prompt(rows, 10)
        assert torch.equal(greedy(model, ids, 40, assistant=spec), greedy(model, ids, 40))
    found = spec._learned.searches[model]
    assert len(found.history) >= 5
    assert spec.stats.search_seconds > 0
    assert spec.stats.plan == found.best.picture()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_matchness_is_what_the_set_says_of_the_text(monkeypatch: pytest.MonkeyPatch, do_sample: bool) -> None:
    """What it says in the text's place, against the tokens, or the model's first choices where they were drawn."""
    model = tiny_llama(8, factor=1.0)
    tried: list[tuple[LayerPlan, float, torch.Tensor]] = []
    original = SearchingDraft._matchness

    def watched(self: SearchingDraft, text: Text, plan: LayerPlan, window: int) -> float:
        found = original(self, text, plan, window)
        tried.append((plan, found, text.ids[:, : text.lengths[0]].clone()))
        return found

    monkeypatch.setattr(SearchingDraft, "_matchness", watched)
    spec = SelfSpec.swift(ratio=0.2, search=OnTheFlySearch(context_window=WINDOW))
    torch.manual_seed(0)
    greedy(model, prompt(), 80, assistant=spec, **({"do_sample": True} if do_sample else {}))
    assert len({found for _, found, _ in tried}) > 1
    for plan, found, ids in tried:
        target, text = after_prefill(model, (ids.shape[1],))
        text.ids = ids
        with target.prepared():
            target.prefill(ids[:, :-1], [0], [ids.shape[1] - 1])
            logits = target.step(ids[:, -1 - WINDOW : -1], [ids.shape[1] - 1 - WINDOW], plan).logits
        assert logits is not None
        expected = model(ids).logits[:, -1 - WINDOW : -1].argmax(-1) if do_sample else ids[:, -WINDOW:]
        assert found == pytest.approx((logits.argmax(-1) == expected).float().mean().item())


def test_the_best_set_drafts_from_the_next_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafts = tiny_llama(8), []
    good = LayerPlan(8, frozenset([5]), frozenset([5]))
    monkeypatch.setattr(SkipSearch, "propose", lambda self, look: good if len(self.history) == 3 else self.best)
    monkeypatch.setattr(SearchingDraft, "_matchness", lambda self, text, plan, window: 0.5 if plan == good else 0.1)
    propose = SearchingDraft.propose
    monkeypatch.setattr(
        SearchingDraft, "propose", lambda self, text, room: drafts.append(self.plan) or propose(self, text, room)
    )
    spec = SelfSpec.swift(search=OnTheFlySearch(context_window=4))
    greedy(model, prompt(), 40, assistant=spec)
    change = drafts.index(good)
    assert change > 3
    assert set(drafts[:change]) == {SkipLayers().plan(Anatomy.of(model))}
    assert set(drafts[change:]) == {good}
    greedy(model, prompt(), 3, assistant=spec)
    assert spec.stats.plan == good.picture()


def test_models_that_cannot_look_beside_their_text() -> None:
    model, spec = build("bloom"), SelfSpec.swift(search=OnTheFlySearch(context_window=4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = greedy(model, prompt(), 20, assistant=spec)
    assert any("there is no search for blocks" in str(warning.message) for warning in told)
    assert torch.equal(found, greedy(model, prompt(), 20))
    assert not spec._learned.searches


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
    ],
)
def test_wrong_settings(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_usual_ratios() -> None:
    assert [usual_ratio(int(billions * 1e9)) for billions in (1, 7, 13, 34, 70)] == [0.4, 0.4, 0.45, 0.5, 0.5]


def test_closest_layers_draft_from_the_second_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no window; each window of text brings one look more."""
    model, looks, drafts = tiny_llama(8, factor=1.0), [], []
    original, propose = searching.closest_layers, SearchingDraft.propose

    def watched(target: Target, text: Text, count: int) -> LayerPlan:
        looks.append(text.lengths[0])
        found = original(target, text, count)
        assert sorted(found.skipped_layers) == by_hand(model, text.ids[:, : text.lengths[0]], count)
        return found

    monkeypatch.setattr(searching, "closest_layers", watched)
    monkeypatch.setattr(
        SearchingDraft, "propose", lambda self, text, room: drafts.append(self.plan) or propose(self, text, room)
    )
    spec = SelfSpec.swift(ratio=0.5, search=ClosestLayers(context_window=8, target_matchness=1.0))
    greedy(model, prompt(), 60, assistant=spec)
    search = spec._learned.searches[model]
    assert drafts[0] == SkipLayers().plan(Anatomy.of(model))
    assert len(drafts[1].skipped_layers) == search.layers == 3
    assert 2 < len(looks) <= 2 + 60 // 8
    assert len(search.history) > len(looks)
    assert search.best in search._scores


def test_a_model_with_a_known_answer() -> None:
    """Half of its blocks hardly matter: without them it says nearly the same, without the others it does not."""
    shape = LlamaShape(64, 8, vocabulary=97, positions=256)
    model, known, agreement = known_skips_llama(shape)
    space = SkipSpace.of(Anatomy.of(model))
    places = space.places(known.plan(Anatomy.of(model)))
    assert len(places) == 6
    assert agreement > 0.8
    others = space.plan(set(range(12)) - places)
    draft = SkipLayers(tuple(others.skipped_attention), tuple(others.skipped_mlp))
    assert acceptance(model, SelfSpec(draft, FixedLength(4))) < agreement - 0.3
