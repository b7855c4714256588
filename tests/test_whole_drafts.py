"""Drafts as one graph: what steps would draft, token for token, and only where rounds show that it is faster."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conftest import ragged_batch, tiny_gpt2, tiny_llama
from test_sampling import OPTIONS, PROMPT, check_exact, exact_joint, llama, sample
from torch._dynamo.utils import counters
from transformers import (
    CompileConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from hf_selfspec import (
    AdaptiveThreshold,
    CalibratedEntropy,
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    GenerationStats,
    LinearProbe,
    ProductThreshold,
    SelfSpec,
    SkipLayers,
    TopKTree,
    decoding,
)
from hf_selfspec.control import forms
from hf_selfspec.control.forms import Forms
from hf_selfspec.draft import whole
from hf_selfspec.draft.whole import WholeDrafts, _Numbers
from hf_selfspec.errors import NumericalError
from hf_selfspec.model.fixed import FixedShapes
from hf_selfspec.model.graphs import Graphs, graphs_of
from hf_selfspec.model.step import Best
from hf_selfspec.stop.rules import Memory, start
from hf_selfspec.types import Draft, Text
from hf_selfspec.verify import walk
from hf_selfspec.verify.scoring import Scorer
from hf_selfspec.verify.stopping import Stopper

pytestmark = pytest.mark.usefixtures("always_graphs")
QUICK = CompileConfig(backend="eager", mode="default")
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
# Drafts of all lengths, some ended by the rule and some not.
KINDS: dict[str, dict[str, Any]] = {
    "exit": {"draft": EarlyExit(2), "stop": FixedLength(3)},
    "confidence": {"draft": EarlyExit(2), "stop": ConfidenceThreshold(0.3), "max_draft": 3},
    "product": {"draft": EarlyExit(2), "stop": ProductThreshold(0.1), "max_draft": 3},
    "adaptive": {
        "draft": EarlyExit(2),
        "stop": AdaptiveThreshold(ConfidenceThreshold(0.2), target=0.4),
        "max_draft": 3,
    },
    "adaptive product": {
        "draft": EarlyExit(2),
        "stop": AdaptiveThreshold(ProductThreshold(0.2), target=0.4),
        "max_draft": 3,
    },
    "skips": {"draft": SkipLayers([2], [1]), "stop": ConfidenceThreshold(0.3), "max_draft": 3},
}


@cache
def sure_llama(layers: int = 4) -> LlamaForCausalLM:
    """A tiny model that is sure of some tokens and not of others; all tests share its graphs."""
    model = tiny_llama(layers, factor=0.5)
    with torch.no_grad():
        model.model.norm.weight.mul_(10.0)
    return model


def whole_graphs(model: PreTrainedModel) -> Graphs:
    return graphs_of(model, QUICK).beside["graphs of whole drafts"]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafts are one graph after the first rounds; returns the lengths of those that were."""
    sizes: list[int] = []
    original = WholeDrafts.proposed

    def proposed(self: WholeDrafts, draft: Any, steps: int) -> None:
        if self._round is not None and self._round.at_once:
            sizes.append(draft.size)
        original(self, draft, steps)

    monkeypatch.setattr(WholeDrafts, "proposed", proposed)
    monkeypatch.setattr(Forms, "at_once", lambda self: self._rounds[False] > 0)
    return sizes


def counted(stats: GenerationStats | None) -> tuple[Any, ...]:
    assert stats is not None
    return (
        *(stats.rounds, stats.drafted, stats.accepted, stats.verify_passes, stats.draft_steps),
        *(stats.from_draft, [size for size, _ in stats.round_sizes]),
    )


def same_as_steps(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], settings: dict[str, Any], **options: Any
) -> tuple[torch.Tensor, GenerationStats]:
    """Ids and all counts are those of eager steps, in two calls with the same spec; returns those of the second."""
    options = GREEDY | options
    eager, compiled = (SelfSpec(**settings, compile=config) for config in (False, QUICK))
    for seed in (3, 4):
        found = []
        for spec in (eager, compiled):
            torch.manual_seed(seed)
            found.append(model.generate(**inputs, **options, assistant=spec))
        assert torch.equal(*found)
        assert counted(compiled.stats) == counted(eager.stats)
    assert compiled.stats is not None
    return found[1], compiled.stats


@pytest.mark.parametrize("rows", [(9,), (9, 5, 7)], ids=["row", "batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_steps(kind: str, rows: tuple[int, ...], at_once: list[int]) -> None:
    model, inputs = sure_llama(), ragged_batch(rows)
    ids, stats = same_as_steps(model, inputs, KINDS[kind], max_new_tokens=60)
    assert torch.equal(ids, model.generate(**inputs, **GREEDY | {"max_new_tokens": 60}))
    assert 0 < stats.accepted < stats.drafted
    assert len(at_once) > 5
    assert min(at_once) < max(at_once)


@pytest.mark.parametrize("kind", ["exit", "confidence"])
def test_a_draft_ends_with_the_token_that_ends_the_text(kind: str, at_once: list[int]) -> None:
    model, inputs = sure_llama(), ragged_batch((9, 5, 7))
    width = inputs["input_ids"].shape[1]
    text = model.generate(**inputs, **GREEDY)[:, width:]
    for place in (6, 12, 17, 21, 30):
        eos = int(text[0, place])
        ids, _ = same_as_steps(model, inputs, KINDS[kind], eos_token_id=eos)
        assert torch.equal(ids, model.generate(**inputs, **GREEDY, eos_token_id=eos))
        assert (ids[:, width:] == eos).any()
    assert at_once


def test_the_end_of_a_text(at_once: list[int]) -> None:
    """Its last drafts are shorter than their graph."""
    model, inputs = sure_llama(), ragged_batch((9, 5, 7))
    for count in (1, 2, 3, 5, 8, 13, 14, 15, 16):
        ids, _ = same_as_steps(model, inputs, KINDS["exit"], max_new_tokens=count)
        assert torch.equal(ids, model.generate(**inputs, **GREEDY | {"max_new_tokens": count}))
    assert at_once


def test_the_last_position_of_a_model(at_once: list[int]) -> None:
    """Steps behind the end of a draft may have no position of their own."""
    model, inputs = tiny_gpt2(32), ragged_batch((6,))
    settings = {"draft": EarlyExit(3), "stop": FixedLength(5)}
    ids, _ = same_as_steps(model, inputs, settings, max_new_tokens=26)
    assert ids.shape[1] == 32
    assert torch.equal(ids, model.generate(**inputs, **GREEDY | {"max_new_tokens": 26}))
    assert at_once


def test_what_is_written_behind_a_draft_is_not_read(at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, original = sure_llama(), ragged_batch((9, 5, 7)), WholeDrafts._draft

    def littering(self: WholeDrafts, text: Any, *given: Any) -> Any:
        draft = original(self, text, *given)
        for buffer in self._target.cache.buffers() if draft is not None else ():
            for row, root in enumerate(text.last_slots()):
                buffer[row, :, root + draft.size + 1 : root + 8] = 1e4
        return draft

    monkeypatch.setattr(WholeDrafts, "_draft", littering)
    ids, _ = same_as_steps(model, inputs, KINDS["confidence"])
    assert torch.equal(ids, model.generate(**inputs, **GREEDY))
    assert at_once


def test_an_overflow_stays_in_its_draft(at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked value that is no number would reach what attention gives."""
    model, inputs, original = sure_llama(), ragged_batch((9, 5, 7)), FixedShapes.several

    def overflowing(self: FixedShapes, *given: Any) -> list[torch.Tensor] | None:
        found, (count, _, starts) = original(self, *given), given[2:5]
        if found is not None:
            found[1][:, 1:] = torch.nan
            for buffer in self.target.cache.buffers():
                for row, start in enumerate(starts):
                    buffer[row, :, start + 2 : start + count] = torch.nan
        return found

    monkeypatch.setattr(FixedShapes, "several", overflowing)
    spec = SelfSpec(**KINDS["exit"], compile=QUICK)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **GREEDY, assistant=spec), model.generate(**inputs, **GREEDY))
    assert set(at_once) == {1}


@pytest.mark.parametrize("rows", [(9,), (9, 5, 7)], ids=["row", "batch"])
def test_an_overflow_in_a_draft_that_is_not_read(
    rows: tuple[int, ...], at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last drafts of a text are shorter than their graph, whose further steps nothing overwrites."""
    monkeypatch.setattr(whole, "_READ_AT_ONCE", ())
    model, inputs, draft, several = sure_llama(), ragged_batch(rows), WholeDrafts._draft, FixedShapes.several
    most = [0]

    def noting(self: WholeDrafts, text: Text, max_new: list[int], *given: Any) -> Draft | None:
        most.append(max(max_new))
        return draft(self, text, max_new, *given)

    def overflowing(self: FixedShapes, *given: Any) -> list[torch.Tensor] | None:
        found, (count, _, starts) = several(self, *given), given[2:5]
        if found is not None:
            for buffer in self.target.cache.buffers():
                for row, start in enumerate(starts):
                    buffer[row, :, start + most[-1] + 1 : start + count] = torch.nan
        return found

    settings = {"draft": EarlyExit(2), "stop": FixedLength(5)}
    expected = {new: model.generate(**inputs, **GREEDY | {"max_new_tokens": new}) for new in (13, 14, 15, 16)}
    same_as_steps(model, inputs, settings)
    monkeypatch.setattr(WholeDrafts, "_draft", noting)
    monkeypatch.setattr(FixedShapes, "several", overflowing)
    at_once.clear()
    spec = SelfSpec(**settings, compile=QUICK)
    for new, ids in expected.items():
        assert torch.equal(model.generate(**inputs, **GREEDY | {"max_new_tokens": new}, assistant=spec), ids)
    assert 0 < min(at_once) < 5


@pytest.mark.parametrize("rows", [(9,), (9, 5, 7)], ids=["row", "batch"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "drawn"])
def test_drafts_that_are_not_read(
    do_sample: bool, rows: tuple[int, ...], at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the host would wait for them."""
    monkeypatch.setattr(whole, "_READ_AT_ONCE", ())
    for count in (5, 13, 14, 16, 40):
        same_as_steps(sure_llama(), ragged_batch(rows), KINDS["exit"], max_new_tokens=count, do_sample=do_sample)
    assert at_once


def test_no_draft_where_nothing_can_be_chosen(at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, original = sure_llama(), ragged_batch((9,)), FixedShapes.several

    def overflowing(self: FixedShapes, *given: Any) -> list[torch.Tensor] | None:
        found = original(self, *given)
        if found is not None:
            found[1][:] = torch.nan
        return found

    monkeypatch.setattr(FixedShapes, "several", overflowing)
    spec = SelfSpec(**KINDS["exit"], compile=QUICK)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant=spec), model.generate(**inputs, **GREEDY))
    assert set(at_once) == {0}


def test_nothing_is_compiled_a_second_time(at_once: list[int]) -> None:
    sure_llama.cache_clear()
    model, spec = sure_llama(), SelfSpec(**KINDS["confidence"], compile=QUICK)
    counters.clear()
    made = []
    for _ in range(3):
        for rows in ((9,), (9, 5, 7)):
            inputs = ragged_batch(rows)
            ids = model.generate(**inputs, **GREEDY | {"max_new_tokens": 200}, assistant=spec)
            assert torch.equal(ids, model.generate(**inputs, **GREEDY | {"max_new_tokens": 200}))
        made.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    assert made[1] == made[2] == graphs_of(model, QUICK).count + whole_graphs(model).count
    assert whole_graphs(model).count == 2


@pytest.mark.parametrize("config", [CompileConfig(backend="aot_eager", mode="default"), True], ids=str)
def test_compilers(config: Any, at_once: list[int]) -> None:
    model, inputs = sure_llama(2), ragged_batch((9,))
    spec = SelfSpec(EarlyExit(1), FixedLength(2), compile=config)
    ids = model.generate(**inputs, **GREEDY, assistant=spec)
    assert torch.equal(ids, model.generate(**inputs, **GREEDY))
    assert at_once


@pytest.mark.parametrize("rows", [(9,), (9, 5, 7)], ids=["row", "batch"])
def test_graphs_find_what_the_full_model_chooses(
    rows: tuple[int, ...], at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off a CPU, where a host would wait for them."""
    monkeypatch.setattr(decoding, "SLOW_CHOICES", ())
    found, original = [], walk.verify

    def verify(*given: Any) -> Any:
        best = given[-1]
        if best is not None:
            assert torch.equal(best.tokens, given[2].argmax(-1))
            assert torch.equal(best.highest, given[2].amax(-1))
        found.append(best is not None)
        return original(*given)

    monkeypatch.setattr(decoding, "verify", verify)
    model, inputs = sure_llama(), ragged_batch(rows)
    ids, _ = same_as_steps(model, inputs, KINDS["confidence"])
    assert torch.equal(ids, model.generate(**inputs, **GREEDY))
    assert sum(found) > 10
    found.clear()
    same_as_steps(model, inputs, KINDS["exit"], do_sample=True, max_new_tokens=12)
    same_as_steps(model, inputs, KINDS["exit"], repetition_penalty=1.2, max_new_tokens=12)
    assert not any(found)


def test_found_choices_are_checked() -> None:
    """Logits that are no numbers are an error, wherever they were looked at."""
    text = Text.of(torch.tensor([[3]]), [0], 2)
    best = Best(torch.tensor([[1]]), torch.tensor([[torch.nan]]))
    given = (Draft.none(text), torch.zeros(1, 1, 5), Scorer(LogitsProcessorList(), 1, False))
    with pytest.raises(NumericalError):
        walk.verify(text, *given, Stopper(StoppingCriteriaList()), [False], None, "Tiny", best)


# Drawn tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rows", "options"),
    [
        ("exit", (9, 5, 7), {}),
        ("confidence", (9, 5, 7), {"top_p": 0.9, "temperature": 0.8}),
        ("skips", (9,), {"top_k": 20}),
    ],
)
def test_a_seed_has_the_tokens_of_steps(
    kind: str, rows: tuple[int, ...], options: dict[str, Any], at_once: list[int]
) -> None:
    same_as_steps(sure_llama(), ragged_batch(rows), KINDS[kind], do_sample=True, **options)
    assert at_once


def test_no_number_is_drawn_twice() -> None:
    """Whatever another thread draws while a draft is made."""
    shape, device = (1, 4), torch.device("cpu")
    torch.manual_seed(0)
    for kept in range(4):
        numbers = _Numbers(3, shape, device)
        others = torch.rand(2, 4)
        numbers.keep(kept)
        later = torch.rand(8, 4)
        assert not torch.isin(others, later).any()


def test_numbers_are_those_of_steps() -> None:
    shape, device = (2, 4), torch.device("cpu")
    for kept in range(4):
        torch.manual_seed(kept)
        numbers = _Numbers(3, shape, device)
        given = numbers.filled(5)
        numbers.keep(kept)
        later = torch.rand(3)
        torch.manual_seed(kept)
        expected = [torch.empty(shape).exponential_() for _ in range(kept)]
        assert all(map(torch.equal, given, expected))
        assert torch.equal(torch.rand(3), later)
        assert (given[3:] == 1).all()


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"draft": EarlyExit(2), "stop": FixedLength(3)}, "plain"),
        ({"draft": SkipLayers((1, 2), (2,)), "stop": ConfidenceThreshold(0.45)}, "top_p"),
    ],
    ids=["early exit", "skipped layers"],
)
def test_joint_distribution(settings: dict[str, Any], options: str, at_once: list[int]) -> None:
    named, processors = OPTIONS[options]
    spec = SelfSpec(**settings, compile=QUICK)
    sample(spec, rows=700, **named)  # its first rounds are steps
    at_once.clear()
    check_exact(sample(spec, rows=700, calls=3, **named), exact_joint(llama(), processors))
    assert PROMPT.shape[1] == 1
    assert len(at_once) > 3


# Drafts that are made in steps ---------------------------------------------------------------------------------------


class _Doubling(LogitsProcessor):
    """A user's own, which knows the text."""

    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def _own_rule(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    return input_ids[:, -1] % 3 == 0


class _Other(ConfidenceThreshold):
    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return _own_rule(input_ids, logits, hidden_states)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"stop": _own_rule}, {}),
        ({"stop": _Other()}, {}),
        ({"stop": ConfidenceThreshold(0.3, lambda logits, states: logits.softmax(-1).amax(-1))}, {}),
        ({"stop": AdaptiveThreshold(ProductThreshold(0.3, lambda logits, _: logits.softmax(-1).amax(-1)))}, {}),
        ({"stop": ConfidenceThreshold(0.4, LinearProbe(2, 64))}, {}),
        ({"stop": CalibratedEntropy()}, {}),
        ({"stop": FixedLength(3), "tree": TopKTree(((0.5, 3), (1.0, 1)))}, {}),
        ({"stop": FixedLength(33), "max_draft": 40}, {}),
        ({"stop": FixedLength(3)}, {"repetition_penalty": 1.3}),
        ({"stop": FixedLength(3)}, {"suppress_tokens": [5, 9]}),
        ({"stop": FixedLength(3)}, {"logits_processor": LogitsProcessorList([_Doubling()])}),
    ],
)
@pytest.mark.filterwarnings("ignore:the probe")
def test_what_no_graph_holds(settings: dict[str, Any], options: dict[str, Any], at_once: list[int]) -> None:
    model, inputs = sure_llama(), ragged_batch((9,))
    spec = SelfSpec(draft=EarlyExit(2), **settings, compile=QUICK)
    for _ in range(2):
        ids = model.generate(**inputs, **GREEDY, **options, assistant=spec)
        assert torch.equal(ids, model.generate(**inputs, **GREEDY, **options))
    assert not at_once


def test_a_draft_that_cannot_be_traced(at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps can."""
    monkeypatch.setattr("hf_selfspec.notices._warned", set())

    def failing(*_: Any) -> list[torch.Tensor]:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(WholeDrafts, "_steps", failing)
    sure_llama.cache_clear()
    model, inputs, spec = sure_llama(), ragged_batch((9,)), SelfSpec(**KINDS["exit"], compile=QUICK)
    with pytest.warns(UserWarning, match="A whole draft of LlamaForCausalLM runs without compiled graphs"):
        ids = model.generate(**inputs, **GREEDY, assistant=spec)
    assert torch.equal(ids, model.generate(**inputs, **GREEDY))
    assert not at_once
    assert not graphs_of(model, QUICK).refused
    assert graphs_of(model, QUICK).count
    sure_llama.cache_clear()


def test_drafts_whose_plan_is_found_while_they_run(at_once: list[int]) -> None:
    """A probe times steps; what it chooses drafts at once."""
    model, inputs = sure_llama(), ragged_batch((9,))
    spec = SelfSpec(EarlyExit(), compile=QUICK)
    for _ in range(3):
        ids = model.generate(**inputs, **GREEDY | {"max_new_tokens": 80}, assistant=spec)
        assert torch.equal(ids, model.generate(**inputs, **GREEDY | {"max_new_tokens": 80}))


# The rule and the choice ---------------------------------------------------------------------------------------------


def test_equal_rules_have_one_graph() -> None:
    first, second = (start(ConfidenceThreshold(value), 3, 5, Memory()) for value in (0.2, 0.6))
    product = start(ProductThreshold(0.2), 3, 5, Memory())
    rules = [rule.traced() for rule in (first, second, product)]
    assert [rule.bounds for rule in rules] == [(value,) * 3 for value in (0.2, 0.6, 0.2)]
    assert rules[0].reach is rules[1].reach is not rules[2].reach


def rounds(known: Forms, count: int, at_once: bool, milliseconds: float, size: int = 4) -> None:
    for _ in range(count):
        known.add(at_once, size, 3, milliseconds / 1e3)


def test_the_faster_form_is_chosen() -> None:
    for seconds, expected in ((1.0, True), (3.0, False)):
        known = Forms(True, 1)
        assert not known.at_once()
        known.add_steps(0.5, 1.0)
        rounds(known, forms._TRIED, False, 2.0)
        assert known.at_once()
        rounds(known, forms._TRIED, True, seconds)
        assert known.at_once() is expected


def test_a_graph_of_all_steps_is_not_made_where_they_spend_their_time_in_graphs() -> None:
    known = Forms(True, 1)
    known.add_steps(0.05, 1.0)
    rounds(known, forms._TRIED, False, 2.0)
    assert not known.at_once()


def test_the_lengths_of_drafts_count() -> None:
    """Steps that a short draft does not need are not free."""
    known = Forms(True, 1)
    known.add_steps(0.5, 1.0)
    for size, steps in ((1, 1.0), (7, 4.0)):
        rounds(known, forms._TRIED, False, steps, size)
        rounds(known, forms._TRIED, True, 2.0, size)
    for size in (1, 7, 1):
        rounds(known, 2 * forms._COMPARED, size == 7, 1.0 if size == 1 else 2.0, size)
        assert known.at_once() is (size == 7)
        known._waiting = 0


def test_the_slower_form_is_tried_again() -> None:
    known = Forms(True, 1)
    known.add_steps(0.5, 1.0)
    rounds(known, forms._TRIED, False, 1.0)
    rounds(known, forms._TRIED, True, 2.0)
    tries = []
    for _ in range(4 * forms._AGAIN):
        tries.append(known.at_once())
        rounds(known, 1, tries[-1], 2.0 if tries[-1] else 1.0)
    assert tries.count(True) == 2
