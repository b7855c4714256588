"""Searches on a model whose best set is known."""

import importlib
from typing import Any

import pytest

from helpers.processes import EXAMPLES
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    return importlib.import_module("known_answer")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Passing `generation_config` together")
def test_searches_go_towards_the_known_set(figure: Any) -> None:
    """On text that no search saw, the whole model matches always and the known set far better than the first one."""
    synthetic = importlib.import_module("synthetic")
    model, known = synthetic.known_skips_llama(synthetic.LlamaShape(64, 8, vocabulary=97, positions=512))
    whole, best = figure.held_out_matchness(model, [LayerPlan(8), known.plan(Anatomy.of(model))])
    assert whole == pytest.approx(1.0)
    settings = figure.proposers(40)
    assert len(settings) == 4
    course = figure.follow(model, known, 0.5, settings["random"])
    assert course.total_steps == 40
    assert course.known_matchness == pytest.approx(best)
    assert course.found[-1] >= 5
    assert course.matchness[0] < course.matchness[-1] <= best + 0.05
