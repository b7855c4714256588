"""Texts that free drafts know before the first call."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from helpers.models import tiny_llama
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    Lookup,
    SelfSpec,
    SettingError,
    SettingTypeError,
)
from hf_selfspec.drafts.free.kept_texts import LookupFindings
from hf_selfspec.drafts.free.observing import observe

pytestmark = pytest.mark.machine("verification_is_free")

PROMPT, NEW = "once upon a time", 32


def generate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, **options: Any) -> torch.Tensor:
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(2, factor=0.5)


@cache
def plain(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    return generate(llama, tokenizer)


@pytest.fixture
def answer(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the model writes, which nobody can know who has not seen it."""
    return tokenizer.decode(plain(llama, tokenizer)[0])


def tokens_a_round(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, spec: SelfSpec) -> float:
    assert torch.equal(generate(llama, tokenizer, assistant=spec), plain(llama, tokenizer))
    return spec.stats.mean_generated_length


def test_what_was_read_is_drafted_from_the_first_call_on_and_saved(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, answer: str, tmp_path: Path
) -> None:
    spec, unread = SelfSpec(), tokens_a_round(llama, tokenizer, SelfSpec.lookup())
    spec.observe(llama, tokenizer, [answer, "something else"])
    spec.save_pretrained(tmp_path, llama)
    for one in (spec, SelfSpec.from_pretrained(tmp_path)):
        assert tokens_a_round(llama, tokenizer, one) > 2 * unread


def test_successors_without_any_texts(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, answer: str) -> None:
    spec = SelfSpec.lookup(stored_tokens=0)
    spec.observe(llama, tokenizer, [answer])
    known = spec._knowledge.latest(llama)
    assert len(known.store.tokens) == 0
    assert len(known.successors) > NEW // 2
    assert tokens_a_round(llama, tokenizer, spec) > 1.3 * tokens_a_round(llama, tokenizer, SelfSpec.lookup())


def test_successors_are_those_of_one_forward(
    llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, as if the text was read at once."""
    monkeypatch.setattr("hf_selfspec.drafts.free.observing._CHUNK", 7)
    spec = SelfSpec.lookup()
    spec.observe(llama, tokenizer, [answer])
    ids = tokenizer(answer)["input_ids"]
    with torch.no_grad():
        expected = llama(torch.tensor([ids])).logits[0].topk(8).indices.tolist()
    last = {(before, token): top for before, token, top in zip(ids, ids[1:], expected[1:], strict=False)}
    successors = spec._knowledge.latest(llama).successors
    assert len(last) > 10
    for (before, token), top in last.items():
        found = successors.get(before, token)
        assert found.is_pair
        assert list(found.tokens) == top


def test_texts_without_tokens_are_passed_over(llama: LlamaForCausalLM) -> None:
    """As those of white space are for some tokenizers."""
    observe(llama, findings := LookupFindings(), [[], [1, 2, 3], [4]])
    assert len(findings.successors) == 2
    assert findings.store.tokens[-1] == 4


def test_prompts_are_answered(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    spec = SelfSpec.lookup()
    spec.observe(llama, tokenizer, [PROMPT], max_new_tokens=NEW)
    assert spec.stats.tokens == NEW
    assert tokens_a_round(llama, tokenizer, spec) > 2 * tokens_a_round(llama, tokenizer, SelfSpec.lookup())


def test_texts_are_in_the_cache(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    texts = ["the first text", "and another one", "the last"]
    SelfSpec.lookup().observe(llama, tokenizer, texts)  # without a folder
    SelfSpec(Lookup(), cache_dir=tmp_path).observe(llama, tokenizer, texts)
    again = SelfSpec(Lookup(), cache_dir=tmp_path)
    generate(llama, tokenizer, assistant=again)
    stored = again._knowledge.latest(llama).store.tokens
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert any(stored[place : place + len(ids)] == ids for place in range(len(stored)))


def test_the_model_is_left_as_it_was(tokenizer: PreTrainedTokenizerFast, fresh_llama: LlamaForCausalLM) -> None:
    fresh_llama.train()
    SelfSpec().observe(fresh_llama, tokenizer, ["a text"])
    assert all(module.training for module in fresh_llama.modules())


def test_refusals(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    junk: list[Any] = ["one string", [], [""], ["good", 3], [[{"role": "user"}, "no"]], {"a": "b"}, None]
    for texts in junk:
        with pytest.raises(SettingTypeError, match=r"SelfSpec.observe\(texts\) must be a list of strings"):
            SelfSpec().observe(llama, tokenizer, texts)
    with pytest.raises(SettingError, match=r"EarlyExit\(layer=1\) has none\. Add Lookup\(\)"):
        SelfSpec(EarlyExit(1), FixedLength(2)).observe(llama, tokenizer, ["a"])
    with pytest.raises(SettingTypeError, match=r"SelfSpec\.observe"):
        SelfSpec().observe("a model", tokenizer, ["a"])
    with pytest.raises(SettingTypeError, match=r"SelfSpec.observe\(max_new_tokens\)"):
        SelfSpec().observe(llama, tokenizer, ["a"], max_new_tokens="x")
