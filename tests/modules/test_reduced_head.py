"""Drafts of some tokens alone: exact all the same, whatever the model does behind its head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from helpers.architectures import build
from helpers.calls import check_lossless
from helpers.models import VOCABULARY, ragged_batch, tiny_llama
from helpers.sampling import SAMPLES, check_exact, exact_joint, llama, sample
from helpers.watched import drafts_into
from hf_selfspec import EarlyExit, FixedLength, ReducedHead, SelfSpec, fit_reduced_head
from hf_selfspec.batch import Draft
from hf_selfspec.errors import SettingError, SettingTypeError, UnsupportedModelError, UnsupportedOptionError
from hf_selfspec.model import head
from hf_selfspec.model.head import HeadRows
from hf_selfspec.model.linear import FewTokenLinear

KEPT = list(range(0, VOCABULARY, 3))


def head_of(tokens: list[int], vocabulary: int = VOCABULARY) -> ReducedHead:
    return ReducedHead.of(tokens, vocabulary)


def drafted_by(model: LlamaForCausalLM, spec: SelfSpec, **options: Any) -> set[int]:
    """Tokens that were drafted in a call."""
    drafts: list[Draft] = []
    spec = replace(spec, draft=drafts_into(drafts, spec.draft))
    model.generate(**ragged_batch((9, 5)), max_new_tokens=12, pad_token_id=0, assistant=spec, **options)
    lines = [draft.tokens[row, :length] for draft in drafts for row, length in enumerate(draft.lengths)]
    return set(torch.cat(lines).tolist())


@pytest.mark.parametrize("do_sample", [False, True])
def test_only_these_are_drafted(do_sample: bool, llama: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    drafted = drafted_by(llama, SelfSpec(EarlyExit(2, head_of(KEPT)), FixedLength(3)), do_sample=do_sample)
    assert len(drafted) > 2
    assert drafted <= set(KEPT)


@pytest.mark.every_run("gemma2")
@pytest.mark.parametrize("name", ["gemma2", "phi", "falcon_h1"])
def test_scales_caps_biases_and_ties(name: str) -> None:
    """What comes before and behind the head is the model's own code: all tokens are what the whole head says."""
    model = build(name)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    whole, usual = (
        [stats.accepted for stats in check_lossless(model, SelfSpec(draft, FixedLength(2)), 10)]
        for draft in (EarlyExit(1, head_of(list(range(vocabulary)), vocabulary)), EarlyExit(1))
    )
    assert whole == usual
    half = SelfSpec(EarlyExit(1, head_of(list(range(0, vocabulary, 2)), vocabulary)), FixedLength(2))
    assert {token % 2 for token in drafted_by(model, half, do_sample=False)} == {0}


@pytest.mark.slow
def test_drawn_tokens_have_the_models_distribution() -> None:
    spec = SelfSpec(EarlyExit(2, head_of([1, 4], 5)), FixedLength(3))
    check_exact(sample(spec, rows=SAMPLES, top_k=0), exact_joint(llama(), []))


def test_the_most_frequent_tokens_are_found(tmp_path: Path) -> None:
    model = tiny_llama()
    model.generation_config.eos_token_id = [90, 91, 200, -1]
    texts = [{"input_ids": [5] * 9 + [8] * 7 + [3] * 7 + [60] * 2}] * 40
    head = fit_reduced_head(model, None, texts, size=5, output_dir=tmp_path / "head")
    assert head.tokens.tolist() == [3, 5, 8, 90, 91]
    assert head.about["figures"]["share of held-out tokens"] == pytest.approx(0.92, abs=0.04)
    again = ReducedHead.load(tmp_path / "head")
    assert again.tokens.tolist() == head.tokens.tolist()
    assert again.vocabulary == VOCABULARY
    assert fit_reduced_head(model, None, texts, size=10**5).tokens.tolist() == list(range(VOCABULARY))
    assert fit_reduced_head(model, None, texts, size=7).tokens.tolist() == [0, 3, 5, 8, 60, 90, 91]
    spec = SelfSpec(EarlyExit(3, tmp_path / "head"), FixedLength(2))
    spec.save_pretrained(tmp_path / "spec")
    assert SelfSpec.from_pretrained(tmp_path / "spec").draft == spec.draft
    check_lossless(model, spec, 8)


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, far = tiny_llama(), SelfSpec(EarlyExit(2, head_of([1, 97], 98)))
    reduced = SelfSpec(EarlyExit(2, head_of(KEPT)), FixedLength(2))
    head_of([2, 5]).save_pretrained(tmp_path / "head")
    weight = model.lm_head.weight
    model.lm_head = type("Other", (torch.nn.Linear,), {})(64, VOCABULARY, bias=False)
    model.lm_head.weight = weight
    for wrong, error, words in (
        (lambda: EarlyExit(2, 8192), SettingTypeError, r"EarlyExit\(head\) must be ReducedHead or the path"),
        (lambda: EarlyExit(2, tmp_path / "nowhere"), SettingError, "there is no saved part"),
        (lambda: reduced.export_draft(tmp_path / "export", tiny_llama()), UnsupportedOptionError, "cannot be exported"),
        (lambda: fit_reduced_head(tiny_llama(), None, [{"input_ids": [97]}]), SettingError, "distinct ids"),
        (lambda: check_lossless(tiny_llama(), far), UnsupportedModelError, "names token 97"),
        (lambda: check_lossless(model, reduced), UnsupportedModelError, "no output head that is a plain linear layer"),
        (lambda: ReducedHead.of([3, 3], VOCABULARY), SettingError, "must have distinct ids"),
    ):
        with pytest.raises(error, match=words):
            wrong()
    monkeypatch.setattr(LlamaForCausalLM, "get_output_embeddings", lambda _: None)
    check_lossless(tiny_llama(), SelfSpec(EarlyExit(2), FixedLength(2)), 8)
    with pytest.raises(UnsupportedModelError, match="leave `head` out"):
        check_lossless(tiny_llama(), reduced)
    file = tmp_path / "head" / "model.safetensors"
    save_file(load_file(file) | {"tokens": torch.tensor([2, 97])}, file)
    with pytest.raises(SettingError, match="must have distinct ids"):
        ReducedHead.load(tmp_path / "head")


@pytest.mark.usefixtures("no_warnings_yet")
def test_a_model_that_does_not_call_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(factor=0.5)

    class Products(torch.nn.Linear):
        """As some models of the Hub multiply: with the weight, past the module."""

    original = type(model).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        head, self.lm_head = self.lm_head, Products(64, VOCABULARY, bias=False)
        self.lm_head.weight = head.weight
        try:
            return original(self, *args, **options)
        finally:
            self.lm_head = head

    monkeypatch.setattr(type(model), "forward", forward)
    spec = SelfSpec(EarlyExit(2, head_of(KEPT)), FixedLength(2))
    ids = ragged_batch((9,))["input_ids"]
    with pytest.warns(UserWarning, match="without a call of its output head"):
        drafted = model.generate(ids, max_new_tokens=9, do_sample=False, assistant=spec)
    assert torch.equal(drafted, model.generate(ids, max_new_tokens=9, do_sample=False))


def test_rows_are_copied_once_for_a_model_until_its_head_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec, made = tiny_llama(factor=0.5), SelfSpec(EarlyExit(2, head_of(KEPT)), FixedLength(3)), list[int]()
    monkeypatch.setattr(
        head, "FewTokenLinear", lambda *sizes, **options: made.append(sizes[1]) or FewTokenLinear(*sizes, **options)
    )
    for _ in range(2):
        with torch.inference_mode():
            drafted_by(model, spec, do_sample=False)
    assert made == [len(KEPT)]
    states = torch.ones(1, 64, requires_grad=True)
    HeadRows(model, spec.draft.module.tokens).of_tokens(states).sum().backward()  # as in a training
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    drafted_by(model, spec, do_sample=False)
    model.lm_head = torch.nn.Linear(64, VOCABULARY, bias=False)
    drafted_by(model, spec, do_sample=False)
    drafted_by(model, SelfSpec(EarlyExit(2, head_of(KEPT[1:])), FixedLength(3)), do_sample=False)
    assert made == [len(KEPT)] * 3 + [len(KEPT) - 1]
