"""Tuning in advance: what is found, and what is refused."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.architectures import build
from helpers.models import tiny_llama
from hf_selfspec import (
    AdaptiveThreshold,
    ConfidenceThreshold,
    FixedLength,
    OfflineSearch,
    OnTheFlySearch,
    SelfSpec,
    TopKTree,
    tune,
)
from hf_selfspec.drafts import SkipLayers
from hf_selfspec.errors import SettingError, SettingTypeError
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search import bayes
from hf_selfspec.search.skip_space import SkipSpace
from hf_selfspec.tools.tuning import _Tuning

TEXTS = ["def add(a, b):", "Once upon a time", "1 + 1 ="]
SPEED = 0.01


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_llama(8, factor=0.6)


class Timings:
    """Times that follow from the set and the stop rule, in the place of measured ones."""

    def __init__(self, model: PreTrainedModel, known: set[int], least: float = 0.5) -> None:
        self.anatomy = Anatomy.of(model)
        self.space = SkipSpace.of(self.anatomy)
        self.known = known
        self.least = least
        self.asked: list[LayerPlan] = []
        self.rules: list[Any] = []
        # The machine takes longer and longer, for whatever runs.
        self.drift = 1.0

    def of(self, plan: LayerPlan) -> float:
        """Shorter the more blocks are skipped that may be, longer for each that may not; plain ``generate`` takes 1."""
        skipped = self.space.places(plan)
        good, bad = len(skipped & self.known), len(skipped - self.known)
        return 1.0 - (1.0 - self.least) * good / len(self.known) + 0.1 * bad

    def places(self, spec: SelfSpec) -> frozenset[int]:
        """The blocks that a ``SelfSpec`` skips."""
        return self.space.places(spec.draft.plan(self.anatomy))

    def seconds(self, spec: SelfSpec | None) -> float:
        self.drift *= 1.02
        if spec is None:
            return SPEED * self.drift
        plan = spec.draft.plan(self.anatomy)
        self.asked.append(plan)
        self.rules.append(spec.stop)
        assert len(self.asked) < 200, "this has no end"
        return SPEED * self.drift * self.of(plan)


@pytest.fixture
def fake(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Timings]:
    """Puts made-up timings in the place of measured ones."""

    def begin(known: set[int] | None = None, **settings: Any) -> Timings:
        times = Timings(llama, known or {0, 3, 4}, **settings)
        monkeypatch.setattr(_Tuning, "seconds", lambda self, spec, rows=None: times.seconds(spec))
        return times

    return begin


@pytest.fixture
def tuned(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Callable[..., SelfSpec]:
    return partial(tune, llama, tokenizer, TEXTS)


def test_tuning_with_real_timings(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tune: no set of blocks", UserWarning)
        spec = tune(llama, tokenizer, TEXTS[:1], search=OfflineSearch(3, 1), max_new_tokens=3, tree=TopKTree())
    assert isinstance(spec.draft, SkipLayers)
    assert spec.draft.attention or spec.draft.mlp
    assert spec.stop == AdaptiveThreshold(ConfidenceThreshold())
    assert spec.tree == TopKTree()
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(5))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(llama.generate(ids, assistant=spec, **options), llama.generate(ids, **options))


def test_a_known_best_set_of_another_size_is_found(
    tuned: Callable[..., SelfSpec], fake: Callable[..., Timings]
) -> None:
    """Random sets have 2 to 7 of the 12 blocks; Bayesian optimisation goes on to the best one, of 9."""
    known = {0, 1, 2, 4, 5, 6, 8, 9, 11}
    times = fake(known)
    spec = tuned(search=OfflineSearch(40, 8), stop=FixedLength(3))
    assert times.places(spec) == known
    assert spec.stop == FixedLength(3)
    assert len(set(times.asked[:40])) == 40
    assert set(times.rules) == {FixedLength(3)}


def test_whole_layers_are_proposed_by_what_others_took(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a layer is skipped as a whole or not at all, as in Mamba."""
    model, asked = build("mamba2"), list[int]()
    monkeypatch.setattr(_Tuning, "seconds", lambda self, spec, rows=None: SPEED * (1.0 if spec is None else 0.5))

    def suggest(space: SkipSpace, speeds: dict[LayerPlan, float], *_: Any, **__: Any) -> LayerPlan:
        asked.append(len(speeds))
        return space.plan(range(len(space.blocks)))

    monkeypatch.setattr(bayes, "suggest", suggest)
    tune(model, tokenizer, TEXTS, search=OfflineSearch(3, 2))
    assert asked[0] == 2


def test_nothing_is_faster(tuned: Callable[..., SelfSpec], fake: Callable[..., Timings]) -> None:
    fake(least=1.5)
    with pytest.warns(UserWarning, match=r"no set of blocks to skip made LlamaForCausalLM faster.*0\.\d\dx") as told:
        spec = tuned(search=OfflineSearch(4, 4))
    assert told[0].filename == __file__
    assert isinstance(spec, SelfSpec)


def test_a_machine_that_slows_down_favours_no_set(
    tuned: Callable[..., SelfSpec], fake: Callable[..., Timings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 2 % with each timing: what was timed late is as good as what was timed early."""
    times, kept = fake(), list[dict[LayerPlan, float]]()
    monkeypatch.setattr(bayes, "suggest", lambda space, speeds, *_, **__: kept.append(dict(speeds)) or suggest(space))

    def suggest(space: SkipSpace) -> LayerPlan:
        return space.random(np.random.default_rng(len(kept)), 0.4)

    tuned(search=OfflineSearch(14, 2))
    ratios = [speed * times.of(plan) for plan, speed in kept[-1].items()]
    assert len(ratios) > 8
    assert max(ratios) / min(ratios) < 1.07


def test_bad_options(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, fake: Callable[..., Timings]) -> None:
    times = fake()
    for options, words in (
        ({"texts": []}, r"tune\(texts\) must be a list of strings, at least one"),
        ({"search": OnTheFlySearch()}, r"tune\(search\) must be OfflineSearch\(...\) or None"),
        ({"max_new_tokens": 0}, r"tune\(max_new_tokens\) must be at least 1"),
        ({"stop": 3}, r"SelfSpec\(stop\)"),
    ):
        with pytest.raises((SettingError, SettingTypeError), match=words):
            tune(llama, tokenizer, **{"texts": TEXTS} | options)
    assert not times.asked
