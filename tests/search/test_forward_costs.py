"""What forwards cost, and how much of a call's time the search for better drafts takes."""

import math
from typing import Any

import pytest
import torch

from helpers.models import damp, ragged_batch, tiny_llama
from helpers.sampling import peak
from hf_selfspec import SelfSpec
from hf_selfspec.generate import decoder
from hf_selfspec.model import module_tools
from hf_selfspec.search import forward_costs
from hf_selfspec.search.forward_costs import Budget

pytestmark = pytest.mark.usefixtures("no_grad")


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_is_a_share_of_the_time_so_far() -> None:
    found = Budget(0.1, clock := Clock())
    assert found.left == 0.0
    clock.now += 20.0
    assert found.left == pytest.approx(2.0)
    with found.spending():
        clock.now += 1.5
        assert found.left == pytest.approx(0.1 * 21.5 - 1.5)
    assert Budget(1.0, clock).left == math.inf


class Timed:
    """A model on a clock by which a forward over ``n`` tokens takes ``1 + 0.1 n`` seconds, all layers the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: int = 4, factor: float = 0.3, layers: int = 8) -> None:
        """The layers from ``start`` on weigh so much."""
        self.clock, self.model = Clock(), tiny_llama(layers, factor=1.0)
        damp(self.model, self.model.model.layers, start, factor)
        peak(self.model.model.norm)
        monkeypatch.undo()  # of the time that tests give to probes
        for place in (module_tools, decoder):
            monkeypatch.setattr(place, "perf_counter", self.clock)
        monkeypatch.setattr(forward_costs, "seconds_of", lambda run, *_: self.seconds_of(run))
        for layer in self.model.model.layers:
            layer.mlp.register_forward_pre_hook(self.forward)

    def forward(self, _: Any, args: tuple[torch.Tensor]) -> None:
        self.clock.now += (1 + 0.1 * args[0].shape[1]) / len(self.model.model.layers)

    def seconds_of(self, run: Any) -> float:
        begun = self.clock.now
        run()
        return self.clock.now - begun

    def call(self, spec: SelfSpec, tokens: int, **options: Any) -> float:
        """Generates, and returns which share of the time went into the search."""
        begun = self.clock.now
        options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0} | options
        self.model.generate(**ragged_batch((12,)), assistant=spec, **options)
        assert spec.stats is not None
        return spec.stats.search_seconds / (self.clock.now - begun)


def test_exits_that_do_not_pay_are_tried_in_little_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, spec = Timed(monkeypatch, 3, 30.0, layers=4), SelfSpec.layerskip()
    shares = []
    for _ in range(5):
        shares.append(timed.call(spec, 140, do_sample=True))
        assert spec.stats.drafted == 0
        assert sum(shares) / len(shares) <= 0.015
    assert 0 < max(shares) <= 0.03  # a call may spend what the ones before have left
    assert spec.choice(timed.model).layer is None


@pytest.mark.every_run("100-2")
@pytest.mark.parametrize(("tokens", "calls"), [(180, 1), (100, 2)])
def test_an_exit_that_pays_is_found_in_a_long_call_or_some_short_ones(
    tokens: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at all exits waits where the rest of the call is too short to gain from it."""
    timed, spec = Timed(monkeypatch, 1, 0.01), SelfSpec.layerskip()
    for _ in range(calls):
        assert spec.choice(timed.model) is None
        timed.call(spec, tokens)
    assert spec.choice(timed.model).drafts
