"""Arms and the choice among them, which probe, search and tuning share."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hf_selfspec import ConfidenceThreshold, ExitChoice, FixedLength, SkipChoice
from hf_selfspec.control.controller import LEAST_SPEEDUP
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.choice import LayerArm, fastest, replayed_arm
from hf_selfspec.search.costs import ForwardCosts
from hf_selfspec.search.replay import Trace, replays

LAYERS = 6
EXIT = LayerPlan.early_exit(LAYERS, 2)
COSTS = ForwardCosts(fixed=0.1, attention=1.0, mlp=1.0, several=0.5, token=0.01, step=0.0, num_layers=LAYERS)


def test_the_fastest_rule_makes_the_arm() -> None:
    traces = [Trace(np.ones((1, 40)), np.full((1, 40), 0.9))]
    candidates = [FixedLength(1), FixedLength(4), ConfidenceThreshold(0.95)]
    speeds = COSTS.plain() / replays(traces, candidates, EXIT, COSTS, 8).seconds_per_token
    arm = replayed_arm(EXIT, candidates, traces, COSTS, 8)
    assert arm.stop == candidates[int(np.argmax(speeds))] == FixedLength(4)
    assert arm.speedup == pytest.approx(max(speeds))
    assert arm.acceptance_rate == pytest.approx(1.0)
    slower = LayerArm(LayerPlan(LAYERS), None, speedup=arm.speedup - 0.1)
    assert fastest([slower, arm]) is fastest([arm, slower]) is arm


@pytest.mark.parametrize(("speedup", "drafts"), [(LEAST_SPEEDUP, True), (LEAST_SPEEDUP - 1e-6, False), (1.0, False)])
def test_a_choice_drafts_where_its_arm_pays(speedup: float, drafts: bool) -> None:
    choice = SkipChoice.of(LayerArm(EXIT, FixedLength(2), speedup=speedup, acceptance_rate=0.5), matchness=0.7)
    assert choice == SkipChoice(EXIT, drafts, FixedLength(2), speedup, 0.5, 0.7)


def exit_choice(speedup: float = 1.5) -> ExitChoice:
    return ExitChoice.of(
        LayerArm(EXIT, FixedLength(2), speedup=speedup, acceptance_rate=0.5),
        by_layer={1: 0.9, 2: speedup},
        reuse_from=3,
        tokens=9,
    )


def test_choices_come_back_from_json() -> None:
    skip = SkipChoice(EXIT, True, None, None, 0.5, 0.7)
    assert SkipChoice.of_state(json.loads(json.dumps(skip.state()))) == skip
    for speedup, layer in ((1.5, 2), (1.0, None)):
        choice = exit_choice(speedup)
        assert choice.layer == layer
        again = ExitChoice.of_state(json.loads(json.dumps(choice.state())), LAYERS)
        assert (again.layer, again.state()) == (layer, choice.state())


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 3},
        {"layer": LAYERS, "by_layer": [[LAYERS, 1.5]]},
        {"layer": 0, "by_layer": [[0, 1.5]]},
        {"by_layer": []},
        {"stop": None},
        {"expected_speedup": None},
    ],
    ids=str,
)
def test_an_exit_that_does_not_fit_the_model(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        ExitChoice.of_state(exit_choice().state() | change, LAYERS)
