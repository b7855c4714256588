"""What decides what drafts: times of rounds, rates of sources, and the choice of a cascade that follows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.models import ragged_batch
from hf_selfspec import Cascade, ClosestLayers, Drafter, DraftSource, EarlyExit, Lookup, SelfSpec, Session, SkipLayers
from hf_selfspec.batch import Draft, Text, Verdict
from hf_selfspec.control.controller import FREE, ArmStats, Controller, Measurements
from hf_selfspec.control.costs import SIZES, CostCurve
from hf_selfspec.draft import FixedDrafter, controlled
from hf_selfspec.stop.rules import FixedLength

pytestmark = pytest.mark.times_decide

LARGEST = SIZES[-1]


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
    assert seconds[8] == seconds[15]
    assert clock.plain == 0.02
    assert clock.is_measured
    # More tokens never cost less, and what was not timed scales with what was.
    for few in ({0: 0.05}, {0: 0.05, 15: 0.02, 31: 0.04}):
        found = fed(CostCurve(True), few, 20).costs
        assert list(found) == sorted(found)
        assert found[31] == pytest.approx(few.get(31, 0.05 * CostCurve(True).costs[31]), rel=0.2)
    # They change with the machine.
    slower = {size: 3 * each for size, each in given.items()}
    assert fed(clock, slower, 20).costs[15] == pytest.approx(0.24, rel=0.1)


def test_a_curve_for_each_kind_of_round() -> None:
    found = Measurements()

    def curve(device: str = "cpu", rows: int = 1, context: int = 100) -> CostCurve:
        return found.curve(device, rows, context, True, False)

    one = fed(curve(), {0: 0.02}, 20)
    assert curve(context=1023) is one
    others = [curve("cuda"), curve(rows=2), curve(context=5000), curve(context=20000)]
    assert len({id(other) for other in [one, *others]}) == 5
    # The next kind of call knows them, too; a service with batches of all sizes has few.
    assert Measurements(found).curve("cpu", 1, 100, True, False) is one
    for rows in range(3, 500):
        curve(rows=rows)
    assert len(found._curves) <= 64


def test_a_curve_for_new_rows_begins_like_the_nearest() -> None:
    """Its times show how far this machine is from the first guesses."""
    found, guessed = Measurements(), CostCurve(True, 3).costs
    for rows, factor in ((1, 9.0), (4, 2.0), (16, 7.0)):
        seconds = CostCurve(True, rows).costs
        fed(found.curve("cpu", rows, 100, True, False), {size: factor * seconds[size] for size in SIZES}, 20)
    four, three = (found.curve("cpu", rows, 100, True, False) for rows in (4, 3))
    assert three.is_measured
    assert three.plain / four.plain == pytest.approx(1.5 / 1.65, rel=0.02)  # of forwards over so many tokens
    assert [each / three.plain for each in three.costs] == pytest.approx(guessed, rel=0.01)


def test_pace() -> None:
    """Of late, and not below one token for each plain round."""
    clock = CostCurve(True)
    for drafted, tokens in ((3, 4), (3, 2), (LARGEST + 1, 6)):
        for _ in range(900):
            clock.add(drafted, tokens, 0.02)
        assert clock.pace == pytest.approx(50 * tokens, rel=0.01)
    slow = fed(CostCurve(True), {0: 0.02, 31: 1.0}, 50)
    assert slow.pace == pytest.approx(1 / slow.plain)


def test_frozen_controllers_decide_alike() -> None:
    """As processes of one model have to, whose times differ."""
    decided = []
    for seconds in (0.001, 100.0):
        controller = Controller(Measurements(), "cpu", on_cpu=True, is_frozen=True)
        for turn in range(300):
            controller.begin(rows=1 + turn // 200, running=3, context=100)
            assert controller.pays(FREE)
            assert not controller.pays("layers", 2.0)
            decided.append((controller.curve.costs, controller.curve.pace))
            controller.record((None, FREE, "layers")[turn % 3], turn % 9, 4, seconds * (1 + turn % 7))
    assert decided[:300] == decided[300:]
    assert {costs for costs, _ in decided} == {CostCurve(True, 3).costs}


STEEP = {1: 4.0, 2: 7.0, 3: 10.0, 7: 20.0, 15: 40.0, 31: 90.0}


@pytest.mark.parametrize(
    ("seconds", "most"),
    [({7: 1.1, 31: 1.2}, 31), ({7: 1.2, 15: 3.0, 31: 8.0}, 7), (STEEP, 0)],
    ids=["flat", "stairs", "steep"],
)
def test_certain_tokens_are_as_many_as_pay(seconds: dict[int, float], most: int) -> None:
    controller = Controller(Measurements(), "cpu", on_cpu=True)
    controller.begin(rows=1, running=1, context=100)
    fed(controller.curve, {0: 1.0} | seconds, 40)
    assert controller.most_certain() == most


def test_stale_times_are_dropped() -> None:
    """A size that seemed too dear is believed less and less while it is not drafted."""
    clock = fed(CostCurve(True), {0: 0.02, 15: 2.0}, 3)
    dear = clock.costs[15]
    found = []
    for _ in range(4):
        fed(clock, {0: 0.02}, 150)
        found.append(clock.costs[15])
    assert dear > 0.3
    assert found[-1] == pytest.approx(0.02 * CostCurve(True).costs[15], rel=0.1)
    assert clock.costs[0] == pytest.approx(0.02, rel=0.05)


def test_results_by_hand() -> None:
    """Promises are believed at first, then results; what loses is looked at again for a small share of the time."""
    arm = ArmStats()
    assert arm.acceptance_rate == 0.5
    assert (arm.speedup(None), arm.speedup(3.0), arm.speedup(0.0)) == (math.inf, 3.0, 0.0)
    for _ in range(3):
        arm.add(4, 2.0, 3, 6)
    assert arm.speedup(None) == math.inf  # too few
    assert arm.acceptance_rate == pytest.approx((1.98 * 3 + 1) / (1.98 * 6 + 2))  # without the first round
    arm.add(4, 2.0, 3, 6)
    assert arm.speedup(None) == arm.speedup(1000.0) == pytest.approx(2.0)
    assert arm.speedup(0.0) == 0.0
    for _ in range(200):
        arm.add(1, 1.5, 0, 6)
    assert arm.speedup(None) == pytest.approx(1 / 1.5, rel=0.01)
    assert arm.acceptance_rate < 0.02
    waited = 0
    while arm.speedup(7.0) != 7.0:
        arm.wait(1.0)
        waited += 1
    assert waited == pytest.approx(4 * 0.5 / 0.006, abs=2)
    for _ in range(4):
        arm.add(1, 1.5, 0, 6)
    assert arm.speedup(7.0) == pytest.approx(1 / 1.5, rel=0.01)
    for _ in range(400):
        arm.wait(1.0)
    for _ in range(4):
        arm.add(4, 1.0, 6, 6)
    assert arm.speedup(None) > 1.5  # what is new weighs as much as what was


ROUND = 0.1


class Watch:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def forward(self, *_: Any) -> None:
        self.now += ROUND


@dataclass(frozen=True)
class Told(DraftSource):
    answer: tuple[int, ...]
    seconds: list[float] = field(compare=False, repr=False)
    watch: Watch = field(compare=False, repr=False)
    promises: list[float | None] = field(default_factory=lambda: [None], compare=False, repr=False)
    length: int = 3

    def start(self, session: Session) -> Drafter:
        session.target.clock = self.watch
        return Telling(self)


class Telling(FixedDrafter):
    drafts = 0
    accepted: ClassVar[Counter[int]] = Counter()

    def __init__(self, settings: Told) -> None:
        self.settings = settings

    @property
    def expected_speedup(self) -> float | None:
        return self.settings.promises[0]

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        Telling.drafts += 1
        self.settings.watch.now += self.settings.seconds[0]
        begin = text.lengths[0]
        tokens = list(self.settings.answer[begin : begin + min(self.settings.length, max_new[0])])
        return Draft(torch.tensor([tokens], dtype=torch.long).view(1, -1), [len(tokens)])

    def update(self, text: Text, verdicts: list[Verdict], logits: torch.Tensor) -> None:
        Telling.accepted.update(node for node in verdicts[0].nodes if node >= 0)


PROMPT = ragged_batch((12,), seed=11)


@pytest.fixture
def watch(llama: LlamaForCausalLM) -> Iterator[Watch]:
    """Every forward takes a tenth of a second, whatever it verifies, where sources bring this clock to a call."""
    found = Watch()
    hook = llama.register_forward_hook(found.forward)
    yield found
    hook.remove()


def arms(spec: SelfSpec, model: LlamaForCausalLM) -> dict[str, ArmStats]:
    (found,) = spec._knowledge.record(model).measurements.values()
    return found.arms


def run(model: LlamaForCausalLM, spec: SelfSpec, tokens: int = 60) -> int:
    Telling.drafts = 0
    options = {"max_new_tokens": tokens, "do_sample": False}
    ids = model.generate(**PROMPT, **options, assistant=spec)
    assert torch.equal(ids, model.generate(**PROMPT, **options))
    return Telling.drafts


@pytest.fixture(scope="module")
def answer(llama: LlamaForCausalLM) -> tuple[int, ...]:
    return tuple(llama.generate(**PROMPT, max_new_tokens=80)[0].tolist())


def test_a_source_drafts_while_it_is_faster(llama: LlamaForCausalLM, answer: tuple[int, ...], watch: Watch) -> None:
    """A draft of three right tokens that costs nothing, then one that takes ten rounds, then nothing again."""
    source = Told(answer, [0.0], watch)
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0, max_nodes=1), source]))
    assert run(llama, spec) > spec.stats.rounds - 4  # the first are timed, the last has no room
    assert spec.stats.accepted > 40
    source.seconds[0] = 10 * ROUND
    run(llama, spec)
    assert run(llama, spec) <= 1
    assert spec.stats.rounds > 20


def test_promises_are_believed_until_tried(llama: LlamaForCausalLM, answer: tuple[int, ...], watch: Watch) -> None:
    source = Told(answer, [10 * ROUND], watch, [5.0])
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0, max_nodes=1), source]))
    assert run(llama, spec) == 4
    none = Told(answer, [0.0], watch, [0.0])
    assert run(llama, SelfSpec(Cascade([Lookup(), none]))) == 0
    little = Told(answer, [0.0], watch, [0.5])
    assert run(llama, SelfSpec(Cascade([Lookup(), little]))) == 0


def test_the_fastest_of_several(llama: LlamaForCausalLM, answer: tuple[int, ...], watch: Watch) -> None:
    slow, fast = Told(answer, [2 * ROUND], watch), Told(answer, [0.0], watch, length=4)
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0, max_nodes=1), slow, fast]))
    run(llama, spec)
    rates = arms(spec, llama)
    assert rates[repr(slow)].rounds == 4
    assert rates[repr(fast)].rounds > 4


def test_free_tokens_are_not_the_drafts_own(llama: LlamaForCausalLM, answer: tuple[int, ...], watch: Watch) -> None:
    """A source of one token, behind which those of the same text before are accepted."""
    source = Told(answer, [0.0], watch, [None], 1)
    spec = SelfSpec(Cascade([Lookup(), source]))
    run(llama, spec)
    Telling.accepted.clear()
    drafts = run(llama, spec)
    assert spec.stats.accepted > 2 * drafts > 4
    assert Telling.accepted == {1: drafts}
    rates = arms(spec, llama)
    assert rates[repr(source)].accepted == pytest.approx(rates[repr(source)].drafted)


@pytest.mark.parametrize(
    "source", [SkipLayers(search=ClosestLayers(budget=1.0)), EarlyExit(None)], ids=["search", "probe"]
)
def test_free_rounds_price_layer_drafts(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    """One cost curve decides what drafts: that of the rounds that were timed."""
    curve = tuple(0.5 + 0.1 * size for size in range(LARGEST + 1))
    monkeypatch.setattr(Controller, "round_seconds", lambda self: curve)
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0, max_nodes=1), source]))
    llama.generate(**PROMPT, max_new_tokens=60, min_new_tokens=60, do_sample=False, assistant=spec)
    found = spec._knowledge.latest(llama, lambda found: hasattr(found, "timings"))
    assert found.timings.found.further == pytest.approx([seconds - 0.5 for seconds in curve])


def test_rounds_without_room_teach_nothing(llama: LlamaForCausalLM, answer: tuple[int, ...], watch: Watch) -> None:
    """The last token of a call is verified without a draft, which is not the source's fault."""
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0, max_nodes=1), Told(answer, [0.0], watch)]))
    for _ in range(6):
        run(llama, spec, 2)
    assert all(arm.rounds == 0 for arm in arms(spec, llama).values())


def test_no_times_decide_in_parallel_models(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a tensor-parallel model have different times and must draft alike."""

    def sizes(factor: float) -> list[tuple[int, int]]:
        now = iter(range(1 << 30))
        monkeypatch.setattr(controlled, "perf_counter", lambda: factor * next(now))
        spec = SelfSpec(Cascade([Lookup(), EarlyExit(3)]), FixedLength(3))
        found = []
        for _ in range(2):
            run(llama, spec)
            found += spec.stats.round_sizes
        return found

    monkeypatch.setattr(Session, "is_tensor_parallel", True)
    assert sizes(1.0) == sizes(1e6)


def test_a_clock_that_was_set_back_is_not_believed() -> None:
    clock = CostCurve(on_cpu=True)
    for _ in range(3):
        clock.add(3, 4, -1.0)
    assert not clock.is_measured
    clock.add(3, 4, 0.01)
    clock.add(3, 4, 0.01)
    assert clock.is_measured


@pytest.mark.every_run("3-(llama|qwen3_next)")
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "opt", "gpt_oss", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("rows", [1, 3])
def test_sources_that_take_turns_change_nothing(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, free drafts, layers with free drafts, layers alone, matches; again and again."""
    turn, seen = [0], set[tuple[bool, bool]]()
    begin, model = Controller.begin, build(name)

    def begun(self: Controller, *given: Any) -> None:
        turn[0] += 1
        begin(self, *given)

    def choose(self: Controller, promised: Any, free: float = 0.0) -> str | None:
        found = next(iter(promised)) if turn[0] % 5 in (2, 3) else None
        seen.add((free > 0, found is not None))
        return found

    monkeypatch.setattr(Controller, "begin", begun)
    monkeypatch.setattr(Controller, "pays", lambda self, name: turn[0] % 5 in (1, 2))
    monkeypatch.setattr(Controller, "choose", choose)
    inputs = ragged_batch((4, 9, 6)[:rows], seed=11)
    options = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    spec = SelfSpec(Cascade([Lookup(), EarlyExit(2)]), FixedLength(3))
    assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
    assert len(seen) == 4


@pytest.mark.parametrize("what", ["costs", "results"])
def test_threads_change_what_they_share_one_after_the_other(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, threads = Measurements(), list[Thread]()
    first, second = (Controller(found if kind == 0 else Measurements(found), "cpu", True) for kind in range(2))
    for controller in (first, second):
        controller.begin(1, 1, 100)
        fed(controller.curve, {0: 0.02}, 8)
    assert first.curve is second.curve
    arms = first.arms
    other = second if what == "costs" else Controller(found, "cpu", True)
    other.begin(1, 1, 100)
    owner, name = (CostCurve, "_measured") if what == "costs" else (ArmStats, "add")
    original = getattr(owner, name)

    def half_way(*args: Any) -> Any:
        """Another thread records a round while this one does."""
        if not threads:
            task = other.curve.add if what == "costs" else other.record
            threads.append(Thread(target=task, args=(0, 1, 0.02) if what == "costs" else ("source", 0, 1, 0.02)))
            threads[0].start()
            threads[0].join(0.3)
            assert threads[0].is_alive()
        return original(*args)

    monkeypatch.setattr(owner, name, half_way)
    arms["source"].rounds = 0
    if what == "costs":
        fed(first.curve, {3: 0.02}, 2)
    else:
        first.record("source", 0, 1, 0.02)
    threads[0].join()
    assert what == "costs" or arms["source"].rounds == 2
