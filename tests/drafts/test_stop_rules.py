"""Stop rules: the shipped ones by hand, a user's own inside ``generate``."""

from collections import Counter

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from hf_selfspec import (
    AdaptiveThreshold,
    CalibratedEntropy,
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    ProductThreshold,
    SelfSpec,
    SettingTypeError,
)
from hf_selfspec.drafts.stop.rules import Memory, StopRule, start

EXIT = 2


def test_confidence_threshold_stops_below_the_top_probability() -> None:
    assert asked(ConfidenceThreshold(0.65), 0.6, 0.7, 0.9) == [True, False, False]
    assert asked(ConfidenceThreshold(), 0.6, 0.7, 0.9) == [True, True, False]
    # In full precision: 4096 of e^0 beside one of e^9 leave 0.664 for the top.
    logits = torch.zeros(1, 4097, dtype=torch.bfloat16)
    logits[0, 7] = 9.0
    ids, states = torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 8)
    assert [ConfidenceThreshold(least)(ids, logits, states).item() for least in (0.66, 0.67)] == [False, True]


def with_top(*shares: float) -> torch.Tensor:
    """``[b, 3]`` logits whose top-1 probabilities are these, each above a half."""
    return torch.tensor([[share, 1 - share, 1e-30] for share in shares]).log()


def asked(rule: StopRule, *shares: float) -> list[bool]:
    """What a rule answers to one drafted token in each row."""
    rows = len(shares)
    return rule(torch.zeros(rows, 5, dtype=torch.long), with_top(*shares), torch.zeros(rows, 8)).tolist()


def test_product_by_hand() -> None:
    """0.9 0.9 0.9 0.9 0.9 is below 0.6 with the fifth factor (0.590); 0.8 0.8 0.8 with the third (0.512)."""
    rule = start(ProductThreshold(0.6), 2, 25, Memory())
    for _ in range(2):  # a new draft begins anew
        rule.begin()
        answers = [asked(rule, 0.9, 0.8) for _ in range(5)]
        assert answers == [[False, False], [False, False], [False, True], [False, True], [True, True]]


def test_confidence_of_ones_own() -> None:
    """From the state behind the token; it takes the place of the top-1 probability in both rules."""

    def sure(logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[:, 0].double()

    ids, logits, states = torch.zeros(2, 5, dtype=torch.long), with_top(0.99, 0.51), torch.tensor([[0.7, 9], [0.8, 9]])
    assert ConfidenceThreshold(0.75, sure)(ids, logits, states).tolist() == [True, False]
    product = start(ProductThreshold(0.6, sure), 2, 25, Memory())
    assert [product(ids, logits, states).tolist() for _ in range(3)] == [[False, False], [True, False], [True, True]]
    with pytest.raises(SettingTypeError, match=r"must return a tensor \[2\], one probability per row, got None"):
        ConfidenceThreshold(0.75, lambda logits, states: None)(ids, logits, states)


class _Contrary(ConfidenceThreshold):
    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return ~super().__call__(input_ids, logits, hidden_states)


def test_adaptive_threshold_by_hand() -> None:
    """β1 = 0.5, β2 = 0.9, ε = 0.01, α = 0.9: a round moves the threshold by 0.001."""
    rule = start(AdaptiveThreshold(ProductThreshold(0.8)), 3, 6, Memory())
    # AR begins at α: 0.9 -> 0.95, 0.65, 0.9 (which is not above α); a row that drafts nothing takes no part.
    rule.update([4, 5, 0], [4, 2, 0])
    assert rule.thresholds == pytest.approx((0.799, 0.801, 0.8))
    rule.update([4, 5, 1], [4, 5, 0])  # AR 0.975, 0.825, 0.45
    assert rule.thresholds == pytest.approx((0.798, 0.802, 0.801))
    rule.update([6, 6, 6], [6, 6, 3])  # the longest drafts: AR 0.9875, 0.9125, 0.475
    assert rule.thresholds == pytest.approx((0.798, 0.802, 0.802))
    assert asked(rule, 0.8, 0.8, 0.8) == [False, True, True]
    assert asked(rule, 0.999, 0.999, 0.999) == [False, True, True] == asked(rule, 1.0, 1.0, 1.0)
    rule.begin()
    assert asked(rule, 0.805, 0.805, 0.8) == [False, False, True]


def test_adaptive_threshold_has_the_settings_it_was_given() -> None:
    settings = AdaptiveThreshold(ConfidenceThreshold(0.5), target=0.5, step=0.1, rate_memory=0.0, threshold_memory=0.0)
    rule = start(settings, 2, 6, Memory())
    rule.update([4, 4], [3, 2])  # above the target, and not
    assert rule.thresholds == pytest.approx((0.4, 0.6))
    for _ in range(12):
        rule.update([4, 4], [4, 0])
    assert rule.thresholds == (0.0, 1.0)  # a probability stays one


def test_adaptive_threshold_goes_on_where_the_last_call_ended() -> None:
    memory = Memory()
    rule = start(AdaptiveThreshold(ConfidenceThreshold(0.5)), 2, 6, memory)
    rule.update([4, 4], [0, 0])
    rule.update([4, 0], [0, 0])
    assert start(AdaptiveThreshold(), 3, 6, memory).thresholds == pytest.approx((0.5015,) * 3)
    assert start(AdaptiveThreshold(), 1, 6, Memory()).thresholds == pytest.approx((0.8,))


def test_calibrated_entropy_by_hand() -> None:
    """Surer tokens are right, less sure ones are not: drafts end at those, once 32 are known."""

    def entropies(rule: StopRule, *shares: float) -> list[bool]:
        """One drafted token in each row whose entropy grows with its share of the second choice."""
        return asked(rule, *(1 - share for share in shares))

    memory = Memory()
    rule = start(CalibratedEntropy(0.9), 2, 25, memory)
    for known in range(0, 32, 4):
        rule.begin()
        # 0.1 is right and 0.3 wrong in both rows; of what comes behind the wrong one nothing is known.
        assert [entropies(rule, *([share] * 2)) for share in (0.1, 0.3, 0.2)] == [[False] * 2] * 3, known
        rule.update([3, 3], [1, 1])
    assert len(memory.value) == 32
    rule.begin()
    assert entropies(rule, 0.1, 0.3) == [False, True]
    assert entropies(rule, 0.11, 0.09) == [True, False]
    # Four of five: below nine tenths, unless the wrong ones are told apart, and enough where less is asked for.
    for epsilon, ends in ((0.9, True), (0.4, False)):
        assert entropies(start(CalibratedEntropy(epsilon), 1, 25, memory), 0.3) == [ends]
    wrong = Memory()
    rule = start(CalibratedEntropy(0.9), 1, 25, wrong)
    for _ in range(32):
        rule.begin()
        entropies(rule, 0.2)
        rule.update([1], [0])
    assert entropies(rule, 0.0) == [True]  # nothing is right often enough


def never(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(logits), dtype=torch.bool)


def drafts_well() -> LlamaForCausalLM:
    """A model whose layers from the exit on add nothing, so that every drafted token is kept."""
    model = tiny_llama(layers=4)
    with torch.no_grad():
        for layer in model.model.layers[EXIT:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def generate(model: LlamaForCausalLM, stop: StopRule, new_tokens: int, max_draft: int = 25, **inputs: torch.Tensor):
    spec = SelfSpec(draft=EarlyExit(EXIT), stop=stop, max_draft=max_draft)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, assistant=spec)
    assert spec.stats is not None
    return ids, spec.stats


@pytest.mark.parametrize(
    ("stop", "max_draft", "length"),
    [(FixedLength(3), 25, 3), (FixedLength(5), 3, 3), (never, 3, 3), (_Contrary(1 - 1e-9), 3, 3), (never, 25, 11)],
    ids=["fixed", "max_draft is shorter", "max_draft alone", "a subclass that never ends", "room alone"],
)
def test_length_of_drafts_that_no_token_ends(stop: StopRule, max_draft: int, length: int) -> None:
    # 12 tokens after the first: three rounds of 3 + 1, or one round of 11 + 1.
    stats = generate(drafts_well(), stop, new_tokens=13, max_draft=max_draft, **ragged_batch((5, 9)))[1]
    assert stats.accepted_lengths == Counter({length: 2 * 12 // (length + 1)})
    assert stats.drafted == 2 * 12 // (length + 1) * length


def test_each_row_stops_by_itself() -> None:
    def first_row_only(input_ids: torch.Tensor, logits: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tensor([True, False])

    stats = generate(drafts_well(), first_row_only, new_tokens=1 + 2 * 3, max_draft=2, **ragged_batch((5, 9)))[1]
    assert stats.accepted_lengths == Counter({1: 3, 2: 2})
    assert stats.drafted == 3 * 1 + 2 * 2


@pytest.mark.parametrize("lengths", [(6,), (4, 9, 6)])
def test_what_a_users_rule_sees(llama: LlamaForCausalLM, lengths: tuple[int, ...]) -> None:
    """The text with the drafted token, that token's logits, and the state of the exit layer."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def rule(*given: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(tensor.clone() for tensor in given))
        return torch.zeros(len(given[1]), dtype=torch.bool)

    stats = generate(llama, rule, new_tokens=12, max_draft=3, **ragged_batch(lengths))[1]
    assert len(calls) == stats.draft_steps
    for input_ids, logits, hidden_states in calls:
        assert logits.shape == (len(lengths), VOCABULARY)
        assert hidden_states.shape == (len(lengths), llama.config.hidden_size)
        assert torch.equal(input_ids[:, -1], logits.argmax(-1))
        if len(lengths) == 1:
            with torch.no_grad():
                state = llama(input_ids[:, :-1], output_hidden_states=True).hidden_states[EXIT][:, -1]
                torch.testing.assert_close(hidden_states, state, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(logits, llama.lm_head(llama.model.norm(state)), rtol=1e-4, atol=1e-5)


def test_a_users_rule_must_answer_for_each_row(llama: LlamaForCausalLM) -> None:
    for answer in (None, torch.tensor(True), torch.ones(2, 1, dtype=torch.bool), torch.tensor([0.9, 0.0])):
        with pytest.raises(SettingTypeError, match=r"must return a BoolTensor \[2\], one value per row, got "):
            generate(llama, lambda *given, answer=answer: answer, new_tokens=4, **ragged_batch((4, 6)))
    stats = generate(llama, lambda *given: torch.ones(2, dtype=torch.long), new_tokens=8, **ragged_batch((4, 6)))[1]
    assert max(stats.accepted_lengths) <= 1  # whole numbers are fine


def test_the_threshold_follows_the_drafts_of_each_kind_of_call() -> None:
    model, spec = drafts_well(), SelfSpec(EarlyExit(EXIT), AdaptiveThreshold(ConfidenceThreshold(0.5)), max_draft=4)
    model.generate(**ragged_batch((5,)), do_sample=False, max_new_tokens=12, assistant=spec)
    assert spec.stats is not None
    shorter = sum(count for length, count in spec.stats.accepted_lengths.items() if 0 < length < 4)
    memory = spec._knowledge.record(model).in_process["stop rule", "greedy"]
    # Everything is accepted: each draft that could have been longer lowers the threshold.
    assert memory.value[0] == pytest.approx(0.5 - 0.001 * shorter)
    assert memory.value[0] < 0.5
    assert ("stop rule", "greedy, several rows") not in spec._knowledge.record(model).in_process
    assert SelfSpec.adaspeed(2).stop == AdaptiveThreshold(ProductThreshold(0.8))
