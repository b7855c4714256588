"""Stop rules: the shipped ones by hand, a user's own inside ``generate``."""

import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.fitted import Recording
from helpers.models import VOCABULARY, damp, ragged_batch, tiny_llama
from hf_selfspec import (
    AdaptiveThreshold,
    Cascade,
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    Lookup,
    ProductThreshold,
    SelfSpec,
    SettingTypeError,
)
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.drafts.stop import LateBound, Memory, StopRule, start

EXIT = 2


def running(rule: StopRule, rows: int = 2, memory: Memory | None = None) -> Any:
    return start(rule, rows, 6, memory or Memory())


def asked(rule: Any, *shares: float) -> list[bool]:
    """What a rule answers to one drafted token in each row, with these top-1 probabilities, each above a half."""
    rows, logits = len(shares), torch.tensor([[share, 1 - share, 1e-30] for share in shares]).log()
    return rule(torch.zeros(rows, 5, dtype=torch.long), logits, torch.zeros(rows, 8)).tolist()


def test_thresholds_by_hand() -> None:
    """0.9 0.9 0.9 0.9 0.9 is below 0.6 with the fifth factor (0.590); 0.8 0.8 0.8 with the third (0.512)."""
    assert asked(running(ConfidenceThreshold(0.65), 3), 0.6, 0.7, 0.9) == [True, False, False]
    assert asked(running(ConfidenceThreshold(), 3), 0.6, 0.7, 0.9) == [True, True, False]
    assert asked(running(FixedLength(3), 2), 0.6, 0.7) == [False, False]
    rule = running(ProductThreshold(0.6))
    for _ in range(2):  # a new draft begins anew
        rule.begin()
        answers = [asked(rule, 0.9, 0.8) for _ in range(5)]
        assert answers == [[False, False], [False, False], [False, True], [False, True], [True, True]]
    # In full precision: 4096 of e^0 beside one of e^9 leave 0.664 for the top.
    logits = torch.zeros(1, 4097, dtype=torch.bfloat16)
    logits[0, 7] = 9.0
    found = [ConfidenceThreshold(least).sure(logits, torch.zeros(1, 8)).item() < least for least in (0.66, 0.67)]
    assert found == [False, True]


def test_confidence_of_ones_own() -> None:
    """From the state behind the token; it takes the place of the top-1 probability in both rules."""

    def sure(logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, 0].double()

    given = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 3), torch.tensor([[0.7, 9], [0.8, 9]])
    assert running(ConfidenceThreshold(0.75, sure))(*given).tolist() == [True, False]
    product = running(ProductThreshold(0.6, sure))
    assert [product(*given).tolist() for _ in range(3)] == [[False, False], [True, False], [True, True]]
    with pytest.raises(SettingTypeError, match=r"must return a tensor \[2\], one probability per row, got None"):
        running(ConfidenceThreshold(0.75, lambda logits, states: None))(*given)


def test_adaptive_threshold_by_hand() -> None:
    """β1 = 0.5, β2 = 0.9, ε = 0.01, α = 0.9: a round moves the threshold by 0.001."""
    rule = running(AdaptiveThreshold(ProductThreshold(0.8)), 3)
    # AR begins at α: 0.9 -> 0.95, 0.65, 0.9 (which is not above α); a row that drafts nothing takes no part.
    rule.update([4, 5, 0], [4, 2, 0])
    assert rule.thresholds == pytest.approx((0.799, 0.801, 0.8))
    rule.update([4, 5, 1], [4, 5, 0])  # AR 0.975, 0.825, 0.45
    assert rule.thresholds == pytest.approx((0.798, 0.802, 0.801))
    rule.update([6, 6, 6], [6, 6, 3])  # the longest drafts: AR 0.9875, 0.9125, 0.475
    assert rule.thresholds == pytest.approx((0.798, 0.802, 0.802))
    assert asked(rule, 0.8, 0.8, 0.8) == [False, True, True]
    assert asked(rule, 1.0, 1.0, 1.0) == [False, True, True]
    rule.begin()
    assert asked(rule, 0.805, 0.805, 0.8) == [False, False, True]
    # Another target; a probability stays one.
    rule = running(AdaptiveThreshold(ConfidenceThreshold(0.5), 0.4))
    rule.update([4, 4], [2, 1])  # AR 0.45 and 0.325
    assert rule.thresholds == pytest.approx((0.499, 0.501))
    for _ in range(600):
        rule.update([4, 4], [4, 0])
    assert rule.thresholds == (0.0, 1.0)
    # The next call goes on with the mean of the rows.
    rule = running(AdaptiveThreshold(ConfidenceThreshold(0.5)), 2, memory := Memory())
    rule.update([4, 4], [0, 0])
    rule.update([4, 0], [0, 0])
    assert running(AdaptiveThreshold(), 3, memory).thresholds == pytest.approx((0.5015,) * 3)
    assert running(AdaptiveThreshold(), 1).thresholds == pytest.approx((0.8,))


def test_a_gpu_is_asked_after_the_verification() -> None:
    """By the hand calculation above the rule ends drafts with the fifth and the third token, and never where all are
    sure; a row that has ended, whose logits are zeros, has no part in the widths of a tree."""
    rule, told = running(ProductThreshold(0.6), 4), list[Any]()
    late, rule.update = LateBound(rule, 9), lambda *counts: told.append(counts)

    def drafts(rule: Any, late: LateBound, *tops: float, wanted: list[int]) -> list[int]:
        rule.begin()
        lengths, top = late.begin(wanted), torch.tensor(tops)
        for _ in range(max(lengths)):
            late.add(torch.stack([top, 1 - top], 1).log(), torch.zeros(len(tops), 8), top)
        late.send()
        late.update(lengths, lengths)
        return lengths

    found = [drafts(rule, late, 0.9, 0.8, 0.999, 0.5, wanted=[12, 12, 12, 0]) for _ in range(30)]
    assert (found[0], found[-1]) == ([4, 4, 4, 0], [5, 3, 9, 0])
    assert (told[0], told[-1]) == (([4, 3, 4, 0],) * 2, ([5, 3, 9, 0],) * 2)
    assert late.tops == pytest.approx([0.8] * 3 + [0.9] * 2 + [0.999] * 4)
    assert late.begin([2, 12, 12, 1]) == [2, 3, 9, 1]
    fixed = running(FixedLength(6))
    assert [drafts(fixed, LateBound(fixed, 6), 0.9, 0.8, wanted=[2, 8])] == [[2, 6]]
    # What was right to the end of a draft that the rule would have let go on says nothing about its threshold.
    rule = running(AdaptiveThreshold(ConfidenceThreshold(0.7)))
    late = LateBound(rule, 6)
    for _ in range(9):
        drafts(rule, late, 0.9, 0.6, wanted=[6, 6])
    assert rule.thresholds == pytest.approx((0.7, 0.691))


def drafts_well() -> LlamaForCausalLM:
    """A model whose layers from the exit on add nothing, so that every drafted token is kept."""
    model = tiny_llama(layers=4)
    damp(model, model.model.layers, EXIT, 0.0)
    return model


def stats_of(model: LlamaForCausalLM, stop: StopRule, new_tokens: int, max_draft: int, *lengths: int) -> Any:
    spec = SelfSpec(draft=EarlyExit(EXIT), stop=stop, max_draft=max_draft)
    model.generate(**ragged_batch(lengths), do_sample=False, max_new_tokens=new_tokens, assistant=spec)
    return spec.stats


@pytest.mark.parametrize(
    ("stop", "max_draft", "new_tokens", "accepted"),
    [
        # 12 tokens after the first: three rounds of 3 + 1, or one round of 11 + 1.
        (FixedLength(3), 25, 13, {3: 6}),
        (FixedLength(5), 3, 13, {3: 6}),
        (lambda *given: torch.zeros(2, dtype=torch.bool), 3, 13, {3: 6}),
        (lambda *given: torch.zeros(2, dtype=torch.long), 25, 13, {11: 2}),  # whole numbers are fine
        (lambda *given: torch.tensor([True, False]), 2, 7, {1: 3, 2: 2}),
    ],
    ids=["fixed", "max_draft is shorter", "max_draft alone", "room alone", "the first row alone"],
)
def test_length_of_drafts(stop: StopRule, max_draft: int, new_tokens: int, accepted: dict[int, int]) -> None:
    stats = stats_of(drafts_well(), stop, new_tokens, max_draft, 5, 9)
    assert stats.accepted_lengths == accepted
    assert stats.drafted == sum(length * count for length, count in accepted.items())


@pytest.mark.parametrize("lengths", [(6,), (4, 9, 6)])
def test_what_a_users_rule_sees(llama: LlamaForCausalLM, lengths: tuple[int, ...]) -> None:
    """The text with the drafted token, that token's logits, and the state of the exit layer."""
    rule = Recording(ends=False)
    assert stats_of(llama, rule, 12, 3, *lengths).draft_steps == len(rule.calls)
    for input_ids, logits, hidden_states in rule.calls:
        assert logits.shape == (len(lengths), VOCABULARY)
        assert hidden_states.shape == (len(lengths), llama.config.hidden_size)
        assert torch.equal(input_ids[:, -1], logits.argmax(-1))
        if len(lengths) == 1:
            with torch.no_grad():
                state = llama(input_ids[:, :-1], output_hidden_states=True).hidden_states[EXIT][:, -1]
                torch.testing.assert_close(hidden_states, state, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(logits, llama.lm_head(llama.model.norm(state)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "answer", [None, torch.tensor(True), torch.ones(2, 1, dtype=torch.bool), torch.tensor([0.9, 0.0])]
)
def test_a_users_rule_must_answer_for_each_row(answer: Any, llama: LlamaForCausalLM) -> None:
    with pytest.raises(SettingTypeError, match=r"must return a BoolTensor \[2\], one value per row, got "):
        stats_of(llama, lambda *given: answer, 4, 25, 4, 6)


class Remembered:
    """An adaptive threshold that shows the memory of each call, and what this held at its start."""

    def __init__(self) -> None:
        self.begun: list[tuple[Memory, Any]] = []

    def start(self, rows: int, max_draft: int, memory: Memory) -> Any:
        self.begun.append((memory, memory.value))
        return AdaptiveThreshold(ConfidenceThreshold(0.5)).start(rows, max_draft, memory)


def test_the_threshold_follows_the_drafts_of_each_kind_of_call() -> None:
    model, rule = drafts_well(), Remembered()
    spec, shorter = SelfSpec(EarlyExit(EXIT), rule, max_draft=4), list[int]()
    for lengths in ((5,), (5, 5), (5,)):
        model.generate(**ragged_batch(lengths), do_sample=False, max_new_tokens=12, assistant=spec)
        shorter.append(sum(count for length, count in spec.stats.accepted_lengths.items() if 0 < length < 4))
    (single, first), (several, other), (again, second) = rule.begun
    assert first is other is None
    assert single is again is not several
    # Everything is accepted: each draft that could have been longer lowers the threshold.
    assert 0.5 > second[0] == pytest.approx(0.5 - 0.001 * shorter[0])


def test_two_exits_in_one_cascade_learn_apart(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a threshold of its own."""
    turns, rule = itertools.count(), Remembered()
    monkeypatch.setattr(Controller, "choose", lambda _, promised, free=0.0: sorted(promised)[next(turns) % 2])
    spec = SelfSpec(Cascade([Lookup(0), EarlyExit(1), EarlyExit(5)]), rule)
    llama.generate(**ragged_batch((6,)), max_new_tokens=60, assistant=spec)
    first, second = (memory.value for memory, _ in rule.begun)
    assert None not in (first, second)
    assert first != second
