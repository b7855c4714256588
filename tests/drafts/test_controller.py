"""What decides what drafts: what rounds cost, and who records that. See ``test_replay.py`` for its choices."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from helpers.models import ROW
from hf_selfspec import Cascade, EarlyExit, Lookup, SelfSpec, Session
from hf_selfspec.drafts import controlled
from hf_selfspec.drafts.controller import Arms, ArmStats, Controller, Curves
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.drafts.stop import FixedLength
from hf_selfspec.model import target

pytestmark = pytest.mark.times_decide


def fed(clock: CostCurve, seconds: dict[int, float], times: int) -> CostCurve:
    """The clock after so many rounds of each size."""
    for _ in range(times):
        for size, each in seconds.items():
            clock.add(size, 1, each)
    return clock


def test_costs_follow_the_times() -> None:
    """To within a tenth of them, in steps that end where sizes do."""
    given = {0: 0.02, 1: 0.021, 2: 0.03, 3: 0.031, 7: 0.05, 15: 0.08, 31: 0.2}
    clock = fed(CostCurve(True), given, 20)
    seconds = clock.costs
    for size, each in given.items():
        assert seconds[size] == pytest.approx(each, rel=0.1)
    assert seconds[4] == seconds[5] == seconds[7]
    # More tokens never cost less, and what was not timed scales with what was.
    for few in ({0: 0.05}, {0: 0.05, 15: 0.02, 31: 0.04}):
        found = fed(CostCurve(True), few, 20).costs
        assert list(found) == sorted(found)
        assert found[31] == pytest.approx(few.get(31, 0.05 * CostCurve(True).costs[31]), rel=0.2)
    # They change with the machine; what seemed too dear is believed less and less while it is not drafted.
    assert fed(clock, {size: 3 * each for size, each in given.items()}, 20).costs[15] == pytest.approx(0.24, rel=0.1)
    dear = fed(CostCurve(True), {0: 0.02, 15: 2.0}, 3)
    assert dear.costs[15] > 0.3
    assert fed(dear, {0: 0.02}, 600).costs[15] == pytest.approx(0.02 * CostCurve(True).costs[15], rel=0.1)
    # The system clock was set back.
    assert not fed(CostCurve(True), {3: -1.0}, 3).is_measured


def test_costs_are_known_before_the_first_draft() -> None:
    """By what the model's own layers take longer, once plain rounds tell what all else takes; by guesses else."""
    asked = list[int]()

    def priced(seconds: float | None) -> Callable[[], Callable[[int], float] | None]:
        return lambda: asked.append(1) or (None if seconds is None else lambda tokens: seconds * (tokens - 1))

    dear, cheap, unknown = (CostCurve(True, rows=2, priced=priced(seconds)) for seconds in (0.01, 0.001, None))
    for curve in (dear, cheap, unknown):
        for _ in range(4):
            curve.add_plain(2, 0.02)
        assert not curve.wants_plain
    assert len(asked) == 3
    assert [dear.costs[count] for count in (0, 1, 7)] == pytest.approx([0.02, 0.04, 0.16])
    assert [cheap.costs[count] for count in (0, 1, 7)] == pytest.approx([0.02, 0.022, 0.034])
    guessed = CostCurve(True, rows=2).costs
    assert unknown.costs == pytest.approx([0.02 * cost / guessed[0] for cost in guessed])


def test_what_one_has_measured_others_know(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    priced, model = list[Any](), copy.deepcopy(llama)
    monkeypatch.setattr(controlled, "added_seconds", lambda view: priced.append(view.model))
    for _ in range(3):
        model.generate(**ROW, max_new_tokens=12, do_sample=False, assistant=SelfSpec())
    assert priced == [model]


@pytest.mark.parametrize("tokens", [2, 12])
def test_costs_do_not_keep_a_model(llama: LlamaForCausalLM, tokens: int) -> None:
    """Neither those that were measured nor those that never will be."""
    model = copy.deepcopy(llama)
    model.generate(**ROW, max_new_tokens=tokens, do_sample=False, assistant=SelfSpec())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_curve_for_each_kind_of_round() -> None:
    found = Curves()

    def curve(machine: str = "cpu", rows: int = 1, context: int = 100) -> CostCurve:
        return found.curve(machine, rows, context, on_cpu=True)

    kinds = [curve(), curve("cuda"), curve(rows=2), curve(context=5000), curve(context=20000), curve(rows=16)]
    assert len(set(kinds)) == 6
    assert curve(context=1023) is kinds[0]
    assert curve(rows=15) is kinds[-1]


def test_no_times_decide_in_parallel_models(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a tensor-parallel model have different times and must draft alike."""

    def sizes(factor: float) -> list[tuple[int, int]]:
        now = itertools.count()
        monkeypatch.setattr(target, "perf_counter", lambda: factor * next(now))
        spec, found = SelfSpec(Cascade([Lookup(), EarlyExit(3)]), FixedLength(3)), []
        model = copy.deepcopy(llama)  # on which nothing was timed
        for _ in range(2):
            model.generate(**ROW, max_new_tokens=60, do_sample=False, assistant=spec)
            found += spec.stats.round_sizes
        return found

    monkeypatch.setattr(Session, "is_tensor_parallel", True)
    assert sizes(1.0) == sizes(1e6)


def test_threads_record_rounds_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share costs alone, and those that share results, too."""
    found, threads, add, arms = Curves(), list[Thread](), ArmStats.add, Arms(ArmStats)
    first, *others = controllers = [Controller(of, found, "cpu", True) for of in (arms, arms, Arms(ArmStats))]
    for controller in controllers:
        controller.begin([1], 1, 100)
    fed(first.curve, {0: 0.02}, 8)
    assert all(other.curve is first.curve for other in others)
    arms = [controller.arms["source"] for controller in controllers]

    def half_way(*given: Any) -> None:
        """Other threads record a round while this one does."""
        if not threads:
            threads.extend(Thread(target=other.record, args=("source", 0, 1, 0.02)) for other in others)
            for thread in threads:
                thread.start()
            threads[0].join(0.2)
            assert all(thread.is_alive() for thread in threads)
        add(*given)

    monkeypatch.setattr(ArmStats, "add", half_way)
    first.record("source", 0, 1, 0.02)
    for thread in threads:
        thread.join()
    assert [arm.rounds for arm in arms] == [2, 2, 1]
