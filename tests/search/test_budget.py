"""How much of a call's time the search for better drafts takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from helpers.models import ragged_batch, tiny_llama
from hf_selfspec import ClosestLayers, OnTheFlySearch, SelfSpec, SkipLayers
from hf_selfspec.control.controller import LEAST_SPEEDUP
from hf_selfspec.draft import searching
from hf_selfspec.draft.controlled import ControlledDrafter
from hf_selfspec.draft.partial import PartialDraft
from hf_selfspec.draft.probe import ProbingDraft
from hf_selfspec.draft.searching import _LEAST, SearchingDraft
from hf_selfspec.model import modules
from hf_selfspec.search import costs as costs_module
from hf_selfspec.search.costs import Budget, ForwardCosts, Pace, Stopwatch
from hf_selfspec.search.replay import Trace


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_budget_is_a_share_of_the_time_so_far(clock: Clock) -> None:
    found = Budget(0.1, clock)
    assert found.left == 0.0
    clock.now += 20.0
    assert found.left == pytest.approx(2.0)
    with found.spending():
        clock.now += 1.5
        assert found.left == pytest.approx(0.1 * 21.5 - 1.5)
    assert found.left == pytest.approx(0.1 * 21.5 - 1.5)
    assert Budget(1.0, clock).left == math.inf


def test_a_pace_is_what_rounds_and_tries_took() -> None:
    pace = Pace()
    assert (pace.seconds(1), pace.tokens(1e9)) == (math.inf, 0)
    pace.add_round(2.0)
    assert pace.seconds(10) == pytest.approx(2.0 * (1 + 10 * costs_module._TOKEN))
    pace.add(20, 6.0)
    assert pace.seconds(20) == pytest.approx(6.0)
    assert pace.seconds(0) == pytest.approx(2.0)
    assert (pace.tokens(1.9), pace.tokens(4.0), pace.tokens(6.0)) == (0, 10, 20)
    pace.add(20, 1.0)  # faster than one token, so that tokens are free
    assert pace.tokens(2.0) > 1000


class Watched:
    """A call on a clock by which each forward takes as long as it has tokens, and what the search spent of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
        self.clock, self.calls, self.spent = clock, 0.0, 0.0
        self.trials: list[int] = []
        self.timed = self.tokens = 0
        monkeypatch.setattr(modules, "perf_counter", clock)
        propose, traces, measure = ControlledDrafter.propose, SearchingDraft._traces, Stopwatch.measure
        closest = searching.closest_layers

        def proposed(draft: Any, text: Any, room: list[int]) -> Any:
            found = propose(draft, text, room)
            self.clock.now += 1.0  # a round
            return found

        def tried(draft: Any, text: Any, plan: Any, window: int) -> Any:
            self.take(1 + 0.1 * window)
            self.trials.append(window)
            return traces(draft, text, plan, window)

        def layers_found(target: Any, text: Any, layers: Any, most: int) -> Any:
            self.take(1 + 0.1 * most)
            return closest(target, text, layers, most)

        def timed(stopwatch: Any, *args: Any) -> bool:
            *others, may_run = args

            def may(tokens: int) -> bool:
                if not may_run(tokens):
                    return False
                self.timed += 1
                self.tokens = tokens
                return True

            return measure(stopwatch, *others, may)

        def seconds_of(run: Any, *given: Any) -> float:
            run()
            self.take(1 + 0.1 * self.tokens)
            return 1 + 0.1 * self.tokens

        monkeypatch.setattr(ControlledDrafter, "propose", proposed)
        monkeypatch.setattr(SearchingDraft, "_traces", tried)
        monkeypatch.setattr(searching, "closest_layers", layers_found)
        monkeypatch.setattr(Stopwatch, "measure", timed)
        monkeypatch.setattr(costs_module, "seconds_of", seconds_of)
        # By these no draft pays, so that each call has as many rounds.
        costs = ForwardCosts(fixed=0.1, attention=1.0, mlp=1.0, several=0.0, token=0.01, step=50.0, num_layers=8)
        monkeypatch.setattr(Stopwatch, "costs", lambda self, of=min: costs)

    def take(self, seconds: float) -> None:
        self.clock.now += seconds
        self.spent += seconds

    def share(self, spec: SelfSpec, model: Any, tokens: int) -> float:
        """Which share of a call the search took."""
        begun, self.spent = self.clock.now, 0.0
        inputs = ragged_batch((12,))
        model.generate(**inputs, max_new_tokens=tokens, do_sample=False, assistant=spec)
        return self.spent / max(self.clock.now - begun, 1.0)  # plain generate takes no time


def test_no_call_spends_more_than_its_share(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Not even the first; what does not fit into one is gone on with in the next."""
    watched = Watched(monkeypatch, clock)
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=OnTheFlySearch(budget=0.12)))
    shares = [watched.share(spec, model, 128) for _ in range(12)]
    assert max(shares) <= 0.12 / 2  # by these costs no set pays
    assert shares[0] > 0.0
    found = spec._knowledge.latest(model)
    assert found.timings.texts >= 1
    assert len(watched.trials) >= 3
    assert min(watched.trials) >= _LEAST
    assert watched.timed >= 12


class Probed:
    """Calls on a clock by which a forward over ``n`` tokens takes ``1 + 0.1 n`` rounds, as far as its layers go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock, accepted: float) -> None:
        monkeypatch.undo()  # of the time that tests give to probes
        self.clock, self.spent = clock, 0.0
        self.tried: list[tuple[int, int]] = []
        self.looked = 0
        self.drafted_before: list[int] = []
        monkeypatch.setattr(modules, "perf_counter", clock)
        propose, try_one, look = ControlledDrafter.propose, ProbingDraft._trace_of, ProbingDraft._traces

        def proposed(draft: Any, text: Any, room: list[int]) -> Any:
            found = propose(draft, text, room)
            self.clock.now += 1.0
            (probing,) = draft.others.values()
            if probing.study.choice is None:
                self.drafted_before.append(found.size)
            return found

        def tried(draft: Any, text: Any, layer: int, n: int, known: list[bool]) -> Any:
            self.take((1 + 0.1 * n) * layer / 8)
            self.tried.append((layer, n))
            found = try_one(draft, text, layer, n, known)
            return Trace(np.full_like(found.accept, accepted), found.confidence)

        def looked(draft: Any, text: Any, n: int) -> Any:
            self.take(2 * (1 + 0.1 * n))
            self.looked += 1
            traces = look(draft, text, n)
            return {
                layer: [Trace(np.full_like(one.accept, accepted), one.confidence) for one in found]
                for layer, found in traces.items()
            }

        def seconds_of(run: Any, *given: Any) -> float:
            run()
            self.take(1.0)
            return 1.0

        monkeypatch.setattr(ControlledDrafter, "propose", proposed)
        monkeypatch.setattr(ProbingDraft, "_trace_of", tried)
        monkeypatch.setattr(ProbingDraft, "_traces", looked)
        monkeypatch.setattr(costs_module, "seconds_of", seconds_of)
        costs = ForwardCosts(fixed=0.1, attention=0.5, mlp=0.5, several=0.0, token=0.01, step=0.0, num_layers=8)
        monkeypatch.setattr(Stopwatch, "costs", lambda self, of=min: costs)

    def take(self, seconds: float) -> None:
        self.clock.now += seconds
        self.spent += seconds

    def share(self, spec: SelfSpec, model: Any, tokens: int, do_sample: bool = False) -> float:
        begun, self.spent = self.clock.now, 0.0
        model.generation_config.eos_token_id = None
        options = {"max_new_tokens": tokens, "do_sample": do_sample, "pad_token_id": 0}
        model.generate(**ragged_batch((12,)), assistant=spec, **options)
        return self.spent / max(self.clock.now - begun, 1.0)  # plain generate takes no time


def test_exits_that_do_not_pay_are_tried_in_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    watched = Probed(monkeypatch, clock, accepted=0.0)
    model, spec = tiny_llama(8), SelfSpec.layerskip()
    shares = [watched.share(spec, model, 200, do_sample=True) for _ in range(8)]
    assert all(sum(shares[:count]) / count <= 0.015 for count in range(1, 9))
    assert max(shares) <= 0.02  # a call may spend what the ones before have left
    assert not watched.looked
    assert {layer for layer, _ in watched.tried} == {2, 3, 5}
    assert {n for _, n in watched.tried} == {16}
    assert not any(watched.drafted_before)
    choice = spec.choice(model)
    assert (choice.layer, choice.tokens) == (None, 128)
    before = len(watched.tried)
    watched.share(spec, model, 200, do_sample=True)
    assert len(watched.tried) == before == 8


@pytest.mark.parametrize(("tokens", "calls"), [(240, 1), (48, 6)])
def test_an_exit_that_pays_is_found_in_a_long_call_or_some_short_ones(
    tokens: int, calls: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    watched = Probed(monkeypatch, clock, accepted=0.95)
    model, spec = tiny_llama(8), SelfSpec.layerskip()
    for _ in range(calls):
        watched.share(spec, model, tokens)
    choice = spec.choice(model)
    assert choice.drafts
    assert len(watched.tried) == 1
    assert watched.drafted_before
    assert not any(watched.drafted_before)


def test_nothing_drafts_before_it_is_known_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[float | None] = []
    propose = PartialDraft.propose

    def watched(draft: Any, text: Any, room: list[int]) -> Any:
        drafted.append(draft.search.choice.expected_speedup)
        return propose(draft, text, room)

    monkeypatch.setattr(PartialDraft, "propose", watched)
    monkeypatch.setattr(SearchingDraft, "measure", lambda self, *args: False)
    model = tiny_llama(8)
    for spec in (SelfSpec(SkipLayers(search=ClosestLayers())), SelfSpec.swift()):
        model.generate(**ragged_batch((12,)), max_new_tokens=60, do_sample=False, assistant=spec)
        assert spec.stats is not None
        assert not spec.stats.drafted
    assert not drafted
    monkeypatch.undo()
    spec = SelfSpec(SkipLayers(search=ClosestLayers(context_window=8, budget=1.0)))
    torch.manual_seed(0)
    model = tiny_llama(8, factor=0.01)
    for _ in range(3):
        model.generate(**ragged_batch((12,)), max_new_tokens=60, do_sample=False, assistant=spec)
    choice = spec.choice(model)
    assert choice is not None
    assert choice.drafts == (choice.expected_speedup >= LEAST_SPEEDUP)
