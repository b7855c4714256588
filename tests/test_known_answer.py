"""Searches on a model whose best set is known."""

from __future__ import annotations

import pytest

from hf_selfspec import SettingError
from hf_selfspec.bench.known_answer import Course, follow, held_out_matchness, plot, proposers
from hf_selfspec.bench.synthetic import LlamaShape, known_skips_llama
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.plan import LayerPlan


def test_a_set_is_near_from_where_it_stays_near() -> None:
    course = Course([0, 3, 5, 9], [0.0] * 4, [0.5, 0.89, 0.8, 0.9], [1, 5, 4, 6], 12, 1.0, 0.9, 6)
    assert course.near_from == 9
    assert course.row("random") == "| random | 12 | 1.0 | 0.900 | 0.900 | +0.0 | 6/6 | 9 |"


def test_a_plot_that_cannot_be_saved() -> None:
    course = Course([0], [0.0], [0.5], [1], 1, 1.0, 0.9, 6)
    with pytest.raises(SettingError, match="no picture format"):
        plot({"random": course}, "8 layers", "plot.none")


@pytest.mark.filterwarnings("ignore:Passing `generation_config` together")
def test_searches_go_towards_the_known_set() -> None:
    """On text that no search saw, the whole model matches always and the known set far better than the first one."""
    model, known, _ = known_skips_llama(LlamaShape(64, 8, vocabulary=97, positions=512))
    plan = known.plan(Anatomy.of(model))
    whole, best = held_out_matchness(model, [LayerPlan(8), plan])
    assert whole == pytest.approx(1.0)
    settings = proposers(60)
    assert len(settings) == 4
    course = follow(model, known, 0.5, settings["Bayesian"])
    assert course.total_steps == 60
    assert course.known_matchness == pytest.approx(best)
    assert course.found[-1] >= 5
    assert course.matchness[0] < course.matchness[-1] <= best + 0.05
    figure = plot({"Bayesian": course}, "8 layers")
    assert [axes.get_xlabel() for axes in figure.axes] == ["sets tried", "seconds of search"]
