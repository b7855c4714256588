"""Which blocks may be skipped."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from helpers.architectures import build
from helpers.models import tiny_llama
from helpers.processes import EXAMPLES
from hf_selfspec import FixedLength, SelfSpec, SettingError, SettingTypeError, SkipLayers
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.on_the_fly import ClosestLayers, OnTheFlySearch, usual_ratio
from hf_selfspec.search.proposers import SkipSpace

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
    with pytest.raises(SettingError, match=r"at least 4 layers, but LlamaForCausalLM has 3"):
        SkipSpace.of(Anatomy.of(tiny_llama(3)))


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


def test_a_model_with_a_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its blocks hardly matter: without them it predicts nearly the same, without the others it does not."""
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    synthetic = importlib.import_module("synthetic")
    model, known = synthetic.known_skips_llama(synthetic.LlamaShape(64, 8, vocabulary=97, positions=256))
    agreement = synthetic.acceptance(model, SelfSpec(known, FixedLength(4)))
    space = SkipSpace.of(Anatomy.of(model))
    places = space.places(known.plan(Anatomy.of(model)))
    assert len(places) == 6
    assert agreement > 0.8
    others = space.plan(set(range(12)) - places)
    draft = SkipLayers(tuple(others.skipped_attention), tuple(others.skipped_mlp))
    assert synthetic.acceptance(model, SelfSpec(draft, FixedLength(4))) < agreement - 0.3
