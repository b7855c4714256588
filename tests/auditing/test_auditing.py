"""Audits: what is equal, what rounding explains, what is wrong, and distributions that are right and that are not."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from helpers.models import VOCABULARY, character_tokenizer
from helpers.sampling import SPECS, accepts_everything, exact_joint
from helpers.sampling import llama as small_vocabulary
from hf_selfspec import EarlyExit, FixedLength, SampleTest, SelfSpec, SettingError, SettingTypeError, audit
from hf_selfspec.auditing.differences import difference_at
from hf_selfspec.auditing.distribution import ChiSquared, Expected
from hf_selfspec.verify import walk

TEXTS = ["def f(x):", "Once upon", "1 + 1 ="]
SPEC = SelfSpec(EarlyExit(3), FixedLength(4))


def test_equal_ids_pass(llama: LlamaForCausalLM) -> None:
    steps: list[None] = []
    found = audit(llama, character_tokenizer(), TEXTS, SPEC, max_new_tokens=12, after_prompt=lambda: steps.append(None))
    assert found.passed
    assert found.partings == ()
    assert (found.prompts, found.tokens, len(steps)) == (3, 36, 3)
    assert 0 < found.accepted < found.drafted
    assert "3 of 3 prompts have equal ids; exact" in str(found)
    assert "LlamaForCausalLM, float32, cpu, greedy" in str(found)


def test_wrong_tokens_do_not_pass(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LlamaForCausalLM.generate

    def changed(self: Any, *args: Any, assistant: Any = None, **options: Any) -> Any:
        ids = generate(self, *args, assistant=assistant, **options)
        if isinstance(assistant, SelfSpec):
            ids = ids.clone()
            ids[0, 12] = (ids[0, 12] + 1) % VOCABULARY
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", changed)
    found = audit(llama, character_tokenizer(), ["def f(x):", "a"], SPEC, max_new_tokens=14, name="mine")
    assert not found.passed
    assert [(one.prompt, one.token) for one in found.partings] == [(0, 3), (1, 11)]
    assert not any(one.difference.is_near_tie for one in found.partings)
    told = str(found)
    assert told.startswith("mine against plain generate")
    assert told.count("DIFFERENT") == 2
    assert "0 of 2 prompts have equal ids; 2 differ where rounding does not explain it: NOT exact" in told


def test_a_text_that_ends_early_does_not_pass(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LlamaForCausalLM.generate

    def cut(self: Any, *args: Any, assistant: Any = None, **options: Any) -> Any:
        ids = generate(self, *args, assistant=assistant, **options)
        return ids[:, :-2] if isinstance(assistant, SelfSpec) else ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", cut)
    found = audit(llama, character_tokenizer(), ["a"], SPEC, max_new_tokens=8)
    (parting,) = found.partings
    assert (parting.token, parting.got) == (6, None)
    assert not found.passed
    assert "(end)" in str(found)


def test_gaps_are_those_behind_processors(llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty changes which tokens are likeliest; with the bare logits a near tie would be an error."""
    model = copy.deepcopy(llama)
    model.generation_config.repetition_penalty = 3.0
    ids = torch.tensor([character_tokenizer()("abcabc")["input_ids"]])
    output = model.generate(
        ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_scores=True, assistant=False
    )
    second = int(output.scores[3][0].topk(2).indices[1])
    generate = LlamaForCausalLM.generate

    def changed(self: Any, *args: Any, assistant: Any = None, **options: Any) -> Any:
        found = generate(self, *args, assistant=assistant, **options)
        if isinstance(assistant, SelfSpec):
            found = found.clone()
            found[0, ids.shape[1] + 3] = second
        return found

    monkeypatch.setattr(LlamaForCausalLM, "generate", changed)
    (parting,) = audit(model, character_tokenizer(), ["abcabc"], SPEC, max_new_tokens=6).partings
    top = output.scores[3][0].topk(2).values
    assert parting.difference.margin == pytest.approx(float(top[0] - top[1]))


def test_near_ties_are_within_rounding_of_the_dtype() -> None:
    scores = torch.tensor([1.0, 10.0, 9.99, -torch.inf])
    assert not difference_at(0, 0, 1, 2, scores, torch.float32).is_near_tie
    assert difference_at(0, 0, 1, 2, scores, torch.bfloat16).is_near_tie
    assert not difference_at(0, 0, 1, 0, scores, torch.bfloat16).is_near_tie


def test_ties_of_three_are_near_ties() -> None:
    """Of three tokens that are as likely, kernels that round differently choose any two."""
    scores = torch.tensor([10.0, 10.0, 9.99, 8.0, -torch.inf])
    tie = difference_at(0, 0, 1, 2, scores, torch.bfloat16)
    assert tie.is_near_tie
    assert tie.margin == pytest.approx(0.01, abs=1e-5)
    assert not difference_at(0, 0, 1, 2, scores, torch.float32).is_near_tie
    assert difference_at(0, 0, 1, 3, scores, torch.bfloat16).margin == 2.0
    for other in (3, 4, -1):  # unlikely, forbidden, and a text that has ended
        assert not difference_at(0, 0, 1, other, scores, torch.bfloat16).is_near_tie


def test_nothing_drafted_is_told(llama: LlamaForCausalLM) -> None:
    found = audit(llama, character_tokenizer(), TEXTS, SPEC, max_new_tokens=1)
    assert found.passed
    assert "nothing was drafted, so this shows little" in str(found)


# Drawn tokens ---------------------------------------------------------------------------------------------------------


class Numbers:
    """The tokens of a text of digits."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(digit) for digit in text]}

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(map(str, tokens))


def sampled(**options: Any) -> Any:
    torch.manual_seed(0)
    return audit(
        small_vocabulary(), Numbers(), ["3", "31"], SPECS["early exit"], sample=SampleTest(draws=1500, **options)
    )


@pytest.mark.every_run("options0")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_p": 0.8}])
def test_the_right_distribution_passes(options: dict[str, float]) -> None:
    found = sampled(**options)
    assert found.passed
    assert [test.draws for test in found.tests] == [1500, 1500]
    assert found.test.freedom == sum(test.freedom for test in found.tests) > 30
    assert 0 < found.accepted < found.drafted
    assert "first 4 tokens: consistent with plain generate's distribution" in str(found)


def test_a_biased_distribution_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "choose_sampled", accepts_everything)
    found = sampled()
    assert not found.passed
    assert found.test.p_value < 1e-10
    assert "NOT plain generate's distribution" in str(found)


def test_impossible_tokens_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are."""
    generate, done = LlamaForCausalLM.generate, []

    def with_one_more(self: Any, *args: Any, assistant: Any = None, **options: Any) -> Any:
        ids = generate(self, *args, assistant=assistant, **options)
        if isinstance(assistant, SelfSpec) and not done:
            last = small_vocabulary()(ids[:1, :1]).logits[0, -1]
            done.append(int(last.argmin()))
            ids[0, 1] = done[0]
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", with_one_more)
    torch.manual_seed(0)
    spec, model = SPECS["early exit"], small_vocabulary()
    found = audit(model, Numbers(), ["3"], spec, sample=SampleTest(draws=200, top_p=0.5))
    assert found.test.impossible == 1
    assert found.test.p_value == 0
    assert not found.passed


def test_expected_shares_are_exact() -> None:
    model, draws = small_vocabulary(), 10**9
    ids = torch.tensor([[3]])
    found = Expected.of(model, ids, 4, draws, frozenset(), {"do_sample": True})
    joint = exact_joint(model, [])
    places = {text: int("".join(map(str, text)), 5) for text in found.cells}
    assert len(places) > 500
    for text, share in found.cells.items():
        assert share == pytest.approx(float(joint[places[text]]), rel=1e-3)


def test_texts_that_end_are_cells_of_their_own() -> None:
    model = small_vocabulary()
    found = Expected.of(model, torch.tensor([[3]]), 4, 10**6, frozenset({2}), {"do_sample": True})
    assert all(2 not in text[:-1] for text in found.cells)
    assert any(len(text) < 4 and text[-1] == 2 for text in found.cells)
    assert sum(found.cells.values()) == pytest.approx(1, abs=1e-3)


def test_p_values_are_those_of_scipy() -> None:
    for statistic, freedom in ((3.2, 4), (40.0, 12), (80.0, 100)):
        assert ChiSquared(statistic, freedom).p_value == pytest.approx(chi2.sf(statistic, freedom))
    both = ChiSquared(3.0, 4, 10) + ChiSquared(5.0, 2, 20, 1)
    assert (both.statistic, both.freedom, both.draws, both.p_value) == (8.0, 6, 30, 0.0)


def test_too_few_draws_are_told() -> None:
    torch.manual_seed(0)
    found = audit(small_vocabulary(), Numbers(), ["3"], SPECS["early exit"], sample=SampleTest(draws=4))
    assert "so this shows nothing" in str(found)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ("a text", {}, r"audit\(texts\) must be a list of strings or chats"),
        ([[{"role": "user", "content": "a"}]], {}, "the tokenizer has no chat template"),
        (["a"], {"max_new_tokens": 0}, r"audit\(max_new_tokens\) must be at least 1, got 0"),
        (["a"], {"spec": "lookup"}, r"audit\(spec\) must be a SelfSpec or None, got 'lookup'"),
        (["a"], {"sample": True}, r"audit\(sample\) must be SampleTest\(...\) or None, got True"),
    ],
)
def test_what_cannot_be_audited(texts: Any, options: dict[str, Any], words: str, llama: LlamaForCausalLM) -> None:
    with pytest.raises((SettingError, SettingTypeError), match=words):
        audit(llama, character_tokenizer(), texts, **options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draws": 0}, r"SampleTest\(draws\) must be at least 1"),
        ({"temperature": 0}, r"SampleTest\(temperature\) must be a finite number above 0"),
        ({"temperature": float("nan")}, r"SampleTest\(temperature\) must be a finite number above 0"),
        ({"top_p": 2}, r"SampleTest\(top_p\) must lie between 0 and 1"),
    ],
)
def test_how_tokens_cannot_be_drawn(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        SampleTest(**settings)
