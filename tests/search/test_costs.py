"""What forwards cost, and how much of a call's time the search for better drafts takes."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from helpers.architectures import build
from helpers.models import ragged_batch, tiny_llama
from helpers.searches import after_prefill, keys_and_values, search_of, space, timings
from hf_selfspec import ClosestLayers, FixedLength, OnTheFlySearch, SelfSpec, Session, SkipLayers
from hf_selfspec.draft import probe, searching
from hf_selfspec.draft.controlled import ControlledDrafter
from hf_selfspec.draft.looking import LookingDraft
from hf_selfspec.draft.probe import ProbingDraft
from hf_selfspec.draft.searching import SearchingDraft
from hf_selfspec.model import modules
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.search import costs as costs_module
from hf_selfspec.search.costs import Budget, ForwardCosts, Stopwatch
from hf_selfspec.search.proposers import SkipSpace
from hf_selfspec.search.replay import Trace
from hf_selfspec.search.skip_search import SkipSearch
from hf_selfspec.verify.scoring import Scorer

pytestmark = pytest.mark.usefixtures("no_grad")


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
    assert Budget(1.0, clock).left == math.inf


class Watched:
    """Calls on a clock by which a forward over ``n`` tokens takes ``1 + 0.1 n`` rounds, as far as its layers go.

    Exits are always ``accepted`` as often. ``step`` is what drafting a token costs beside its forward.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: Clock, accepted: float = 0.0, step: float = 0.0) -> None:
        self.clock, self.spent, self.patch = clock, 0.0, monkeypatch
        self.given: dict[str, list[tuple[Any, ...]]] = {}
        monkeypatch.undo()  # of the time that tests give to probes
        monkeypatch.setattr(modules, "perf_counter", clock)
        propose = ControlledDrafter.propose

        def proposed(draft: Any, text: Any, room: list[int]) -> Any:
            found = propose(draft, text, room)
            clock.now += 1.0  # a round
            (source,) = draft.others.values()
            known = source.study if isinstance(source, ProbingDraft) else source.search
            self.given.setdefault("drafted", []).append((found.size, known.choice))
            return found

        def seconds_of(run: Any, *given: Any) -> float:
            run()
            return self.take("seconds_of", 1.8)

        def traced(drafted: torch.Tensor, *given: Any) -> Trace:
            shape = drafted.shape[:2]
            return Trace(np.full(shape, accepted), np.full(shape, 0.9))

        monkeypatch.setattr(ControlledDrafter, "propose", proposed)
        monkeypatch.setattr(costs_module, "seconds_of", seconds_of)
        monkeypatch.setattr(probe, "trace", traced)
        monkeypatch.setattr(ProbingDraft, "_trace", lambda self, logits, following: traced(following))
        self.charge(ProbingDraft, "_trace_of", lambda draft, text, layer, n, known: (1 + 0.1 * n) * layer / 8)
        self.charge(ProbingDraft, "_traces", lambda draft, text, n: 2 * (1 + 0.1 * n))
        self.charge(SearchingDraft, "_traces", lambda draft, text, plan, window: 1 + 0.1 * window)
        self.charge(searching, "closest_layers", lambda target, text, layers, most: 1 + 0.1 * most)
        costs = ForwardCosts(fixed=0.1, attention=0.5, mlp=0.5, several=0.0, token=0.01, step=step, num_layers=8)
        monkeypatch.setattr(Stopwatch, "costs", lambda self, of=min: costs)

    def take(self, name: str, seconds: float, *given: Any) -> float:
        self.clock.now += seconds
        self.spent += seconds
        self.given.setdefault(name, []).append(given)
        return seconds

    def charge(self, owner: Any, name: str, price: Callable[..., float]) -> None:
        original = getattr(owner, name)

        def charged(*given: Any) -> Any:
            self.take(f"{owner.__name__}.{name}", price(*given), *given)
            return original(*given)

        self.patch.setattr(owner, name, charged)

    def share(self, spec: SelfSpec, model: Any, tokens: int, do_sample: bool = False) -> float:
        """Which share of a call the search took."""
        begun, self.spent = self.clock.now, 0.0
        model.generation_config.eos_token_id = None
        options = {"max_new_tokens": tokens, "do_sample": do_sample, "pad_token_id": 0}
        model.generate(**ragged_batch((12,)), assistant=spec, **options)
        return self.spent / max(self.clock.now - begun, 1.0)  # plain generate takes no time


def test_no_call_spends_more_than_its_share(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Not even the first; what does not fit into one is gone on with in the next."""
    watched = Watched(monkeypatch, clock, step=50.0)
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=OnTheFlySearch(budget=0.3)))
    shares = [watched.share(spec, model, 64) for _ in range(4)]
    assert max(shares) <= 0.3 / 2  # by these costs no set pays
    assert shares[0] > 0.0
    assert len(watched.given["SearchingDraft._traces"]) >= 3
    assert len(watched.given["seconds_of"]) >= 12


def test_exits_that_do_not_pay_are_tried_in_little_of_the_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    watched = Watched(monkeypatch, clock)
    model, spec = tiny_llama(8), SelfSpec.layerskip()
    shares = [watched.share(spec, model, 140, do_sample=True) for _ in range(5)]
    assert all(sum(shares[:count]) / count <= 0.015 for count in range(1, 6))
    assert max(shares) <= 0.03  # a call may spend what the ones before have left
    tried = [(layer, n) for _, _, layer, n, _ in watched.given["ProbingDraft._trace_of"]]
    assert "ProbingDraft._traces" not in watched.given
    assert {layer for layer, _ in tried} == {2, 3, 5}
    assert {n for _, n in tried} <= {8, 16}
    assert not any(size for size, choice in watched.given["drafted"])
    assert spec.choice(model).layer is None


def test_a_search_without_time_is_told_of_eight_rounds_at_a_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Of all their tokens, and of how long each of them took."""
    watched, told, watch = Watched(monkeypatch, clock, step=50.0), list[int](), SkipSearch.watch
    monkeypatch.setattr(SkipSearch, "watch", lambda *given, tokens: told.append(tokens) or watch(*given, tokens))
    model, spec = tiny_llama(8), SelfSpec(SkipLayers(search=OnTheFlySearch(budget=0.3)))
    watched.share(spec, model, 1 + 64)
    assert told == [8] * 8
    assert search_of(spec, model).generated == 64
    assert search_of(spec, model).pace.seconds(0) == pytest.approx(1.0)


@pytest.mark.parametrize(("tokens", "calls"), [(180, 1), (100, 2), (48, 4)])
def test_an_exit_that_pays_is_found_in_a_long_call_or_some_short_ones(
    tokens: int, calls: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The first look at all exits waits where the rest of the call is too short to gain from it."""
    watched = Watched(monkeypatch, clock, accepted=0.95)
    model, spec = tiny_llama(8), SelfSpec.layerskip()
    for _ in range(calls):
        assert spec.choice(model) is None
        watched.share(spec, model, tokens)
    assert spec.choice(model).drafts
    assert len(watched.given["ProbingDraft._trace_of"]) == 1
    before = [size for size, choice in watched.given["drafted"] if choice is None]
    assert before
    assert not any(before)


@pytest.mark.parametrize(
    "spec", [SelfSpec(SkipLayers(search=ClosestLayers())), SelfSpec.swift()], ids=["clasp", "swift"]
)
def test_nothing_drafts_before_it_is_known_to_pay(spec: SelfSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SearchingDraft, "measure", lambda self, *args: False)
    tiny_llama(8).generate(**ragged_batch((12,)), max_new_tokens=40, do_sample=False, assistant=spec)
    assert spec.stats is not None
    assert spec.stats.drafted == spec.stats.draft_steps == 0


@pytest.mark.parametrize(
    "space", [space(), SkipSpace.of(Anatomy.of(build("gemma3n_text")))], ids=["plain", "shared keys"]
)
def test_costs_of_blocks_follow_from_the_timed_plans(space: SkipSpace) -> None:
    costs = ForwardCosts(2.0, attention=0.5, mlp=1.5, several=3.0, token=0.25, step=0.125, num_layers=space.num_layers)
    found = timings(space, costs).costs()
    for name in ("fixed", "attention", "mlp", "several", "token", "step"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name)), name


def test_timings_change_nothing_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken at its end, where a row may be shorter than what is timed."""
    monkeypatch.setattr(LookingDraft, "_has_time", lambda self, tokens: True)
    target, text = after_prefill(tiny_llama(8), (20, 13, 3))
    stopwatch = Stopwatch(*SkipSpace.of(target.anatomy).timed_plans())
    scorer, known = Scorer(LogitsProcessorList(), 3, False), SelfSpec()._known(target.model)
    session = Session(target, scorer, FixedLength(2), None, 25, frozenset(), 25, None, (), known)
    draft, usual = LookingDraft(session, stopwatch.early, 25), keys_and_values(target, text)
    with target.prepared():
        assert draft.measure(text, stopwatch, 2)
    for now, then in zip(keys_and_values(target, text), usual, strict=True):
        torch.testing.assert_close(now, then)
