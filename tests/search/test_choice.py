"""What a probe or a search has chosen, and how it comes back from a file."""

import json

import numpy as np
import pytest

from hf_selfspec import ConfidenceThreshold, ExitChoice, FixedLength, SkipChoice
from hf_selfspec.drafts.controller import LEAST_SPEEDUP
from hf_selfspec.model.plan import LayerPlan
from hf_selfspec.search.choice import replayed
from hf_selfspec.search.forward_costs import ForwardCosts
from hf_selfspec.search.replay import Trace, replays

LAYERS = 6
EXIT = LayerPlan.early_exit(LAYERS, 2)
COSTS = ForwardCosts(fixed=0.1, attention=1.0, mlp=1.0, several=0.5, token=0.01, step=0.0, num_layers=LAYERS)


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_fastest_rule_of_a_plan(share: float) -> None:
    """By it the plan drafts, if that pays."""
    traces = [Trace(np.full((1, 40), share), np.full((1, 40), 0.9))]
    candidates = [FixedLength(1), FixedLength(4), ConfidenceThreshold(0.95)]
    speeds = COSTS.plain() / replays(traces, candidates, EXIT, COSTS, 8).seconds_per_token
    choice = replayed(EXIT, candidates, traces, COSTS, 8)
    assert choice.stop == candidates[int(np.argmax(speeds))]
    assert choice.expected_speedup == pytest.approx(max(speeds))
    assert choice.drafts == (max(speeds) >= LEAST_SPEEDUP) == (share == 1.0)
    assert choice.acceptance_rate == pytest.approx(share)


def exit_choice(speedup: float = 1.5) -> ExitChoice:
    drafts = speedup >= LEAST_SPEEDUP
    plan = EXIT if drafts else LayerPlan(LAYERS)
    return ExitChoice(plan, drafts, FixedLength(2), speedup, 0.5, by_layer={1: 0.9, 2: speedup}, reuse_from=3, tokens=9)


def test_choices_come_back_from_json() -> None:
    skip = SkipChoice(EXIT, 0.7)
    assert SkipChoice.of_state(json.loads(json.dumps(skip.state()))) == skip
    for speedup, layer in ((1.5, 2), (1.0, None)):
        choice = exit_choice(speedup)
        assert choice.layer == layer
        assert ExitChoice.of_state(json.loads(json.dumps(choice.state())), LAYERS) == choice
