"""Audits: what is equal, what rounding explains, what is wrong."""

import copy
import re
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.models import VOCABULARY, character_tokenizer
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SelfSpecError, audit
from hf_selfspec.tools.audits import Audit, Difference, difference_at

TEXTS = ["def f(x):", "Once upon", "1 + 1 ="]
SPEC = SelfSpec(EarlyExit(3), FixedLength(4))


def test_equal_ids_pass(llama: LlamaForCausalLM) -> None:
    found = audit(llama, character_tokenizer(), TEXTS, SPEC, max_new_tokens=12)
    assert found.passed
    assert (found.differences, found.prompts, found.tokens) == ((), 3, 36)
    assert 0 < found.accepted < found.drafted
    assert "3 of 3 prompts have equal ids; exact" in str(found)
    assert "LlamaForCausalLM, float32, cpu, greedy" in str(found)
    nothing = audit(llama, character_tokenizer(), TEXTS[:1], SPEC, max_new_tokens=1)
    assert nothing.passed
    assert "nothing was drafted, so this shows little" in str(nothing)


def test_what_is_promised(llama: LlamaForCausalLM) -> None:
    """Of what is bit for bit any other token is an error, however near its logit."""
    model = copy.deepcopy(llama).to(torch.bfloat16)
    for spec, words in (
        (SelfSpec(exact=True), "promise: bit for bit\n"),
        (SelfSpec(), r"promise: near-ties, bit for bit with exact=True( not to be had here: .* differs)?\n"),
    ):
        assert re.search(words, str(audit(model, character_tokenizer(), TEXTS[:1], spec, max_new_tokens=8)))
    tie = Difference(row=0, column=3, expected=1, token=2, margin=0.0, tolerance=1.0, texts=("a", "b"))
    for promise, passed in (("near-ties", True), ("bit for bit", False)):
        found = Audit("mine", "Llama", "bfloat16", "cpu", 1, 8, 4, 2, promise, (tie,))
        assert found.passed is passed
        assert ("NOT exact" in str(found)) is not passed


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has calls with a ``SelfSpec`` return something else."""
    generate = LlamaForCausalLM.generate

    def changed(model: Any, *args: Any, change: Any, assistant: Any = None, **options: Any) -> Any:
        ids = generate(model, *args, assistant=assistant, **options)
        return change(ids.clone()) if isinstance(assistant, SelfSpec) else ids

    return lambda change: monkeypatch.setattr(LlamaForCausalLM, "generate", partialmethod(changed, change=change))


def with_token(column: int, token: int | None = None) -> Any:
    def change(ids: torch.Tensor) -> torch.Tensor:
        ids[0, column] = (ids[0, column] + 1) % VOCABULARY if token is None else token
        return ids

    return change


def test_wrong_and_missing_tokens_do_not_pass(llama: LlamaForCausalLM, changing: Any) -> None:
    changing(with_token(12))
    found = audit(llama, character_tokenizer(), ["def f(x):", "a"], SPEC, max_new_tokens=14, name="mine")
    assert not found.passed
    assert [(one.row, one.column, one.is_near_tie) for one in found.differences] == [(0, 3, False), (1, 11, False)]
    assert str(found).startswith("mine against plain generate")
    assert str(found).count("DIFFERENT") == 2
    assert "0 of 2 prompts have equal ids; 2 differ where rounding does not explain it: NOT exact" in str(found)
    changing(lambda ids: ids[:, :-2])
    found = audit(llama, character_tokenizer(), ["a"], SPEC, max_new_tokens=8)
    assert [(one.column, one.texts[1]) for one in found.differences] == [(6, None)]
    assert not found.passed
    assert "(end)" in str(found)


def test_gaps_are_those_behind_processors(llama: LlamaForCausalLM, changing: Any) -> None:
    """A penalty changes which tokens are likeliest; with the bare logits a near tie would be an error."""
    model = copy.deepcopy(llama)
    model.generation_config.repetition_penalty = 3.0
    ids = torch.tensor([character_tokenizer()("abcabc")["input_ids"]])
    told = {"return_dict_in_generate": True, "output_scores": True, "assistant": False}
    tops = model.generate(ids, max_new_tokens=6, do_sample=False, **told).scores[3][0].topk(2)
    changing(with_token(ids.shape[1] + 3, int(tops.indices[1])))
    (difference,) = audit(model, character_tokenizer(), ["abcabc"], SPEC, max_new_tokens=6).differences
    assert difference.margin == pytest.approx(float(tops.values[0] - tops.values[1]))


class Rounding(torch.nn.Module):
    """A model whose logits are others where several tokens go through together, all of them by 5 as well."""

    def __init__(self, logits: torch.Tensor, noise: torch.Tensor) -> None:
        super().__init__()
        self.config, self.logits, self.noise, self.tokens = LlamaConfig(), logits, noise, []

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
        self.tokens.append(input_ids.shape[1])
        together = self.noise + 5 if input_ids.shape[1] > 1 else 0
        return SimpleNamespace(logits=(self.logits + together).expand(1, input_ids.shape[1], -1))


@pytest.mark.parametrize(
    ("pair", "noise", "margin", "is_tie"),
    [
        ((1, 2), 0.01, 0.05, True),  # of three that are nearly as likely, rounding may choose any two
        ((1, 2), 0.005, 0.05, False),
        ((0, 1), 0.0, 0.0, True),
        ((0, 1), 2**-19, 0.0, True),  # beside which a step counts
        ((1, 3), 0.1, 2.0, False),
        ((1, 4), 0.1, float("inf"), False),  # a forbidden token
        ((1, -1), 0.1, float("inf"), False),  # a text that has ended
    ],
)
def test_near_ties(pair: tuple[int, int], noise: float, margin: float, is_tie: bool) -> None:
    """Noise is what logits change by when the text goes through together, beside what all have in common."""
    logits = torch.tensor([10.0, 10.0, 9.95, 8.0] + [5.0] * 60 + [-50.0] * 9)
    signs = torch.tensor([1.0, -1.0]).repeat(32)
    model = Rounding(logits, torch.cat([signs * noise, torch.full((9,), 7.0)]))  # of unlikely tokens none counts
    scores = logits.clone()
    scores[4] = -torch.inf
    found = difference_at(0, 0, *pair, model, torch.ones(1, 40, dtype=torch.long), scores)
    assert model.tokens == [8, *[1] * 32, 40]
    # With one step from 10 to the next number of float32.
    assert found.tolerance == pytest.approx(6 * noise + 2**-20, rel=1e-2)
    assert found.margin == pytest.approx(margin, abs=1e-5)
    assert found.is_near_tie == is_tie


def test_what_cannot_be_audited(llama: LlamaForCausalLM) -> None:
    for texts, options, words in (
        ("a text", {}, r"audit\(texts\) must be a list of strings or chats"),
        ([[{"role": "user", "content": "a"}]], {}, "the tokenizer has no chat template"),
        (["a"], {"max_new_tokens": 0}, r"audit\(max_new_tokens\) must be at least 1, got 0"),
        (["a"], {"spec": "lookup"}, r"audit\(spec\) must be a SelfSpec or None, got 'lookup'"),
    ):
        with pytest.raises(SelfSpecError, match=words):
            audit(llama, character_tokenizer(), texts, **options)
