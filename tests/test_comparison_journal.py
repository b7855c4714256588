"""What comparisons keep between calls, passes and runs, and what they begin anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparing import DEMO
from conftest import tiny_llama
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from hf_selfspec import SelfSpec, SettingError, compare
from hf_selfspec.bench.comparison.calls import Call, Caller
from hf_selfspec.bench.comparison.compare import Asked
from hf_selfspec.bench.comparison.journal import Journal
from hf_selfspec.bench.comparison.prompts import Batch, Prompt
from hf_selfspec.bench.comparison.settings import Settings
from hf_selfspec.bench.comparison.ways import Way

TEXTS = ["def read_text(path):", "class Stack:", "import os\n\ndef main():"]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocabulary=4096)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def calls_in(folder: Path, way: str) -> list[dict[str, Any]]:
    """The calls of a way that were written, in their order."""
    lines = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [line["call"] for line in lines if "call" in line and line["call"]["way"] == way]


def test_each_pass_begins_with_a_new_spec(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that counts does not know the texts of the ones before; within a pass a ``SelfSpec`` is kept."""
    real, specs = Caller.call, []

    def call(self: Caller, way: Way, batch: Batch, place: tuple[int, int, int], options: Any, spec: Any) -> Call:
        specs.append(spec)
        return real(self, way, batch, place, options, spec)

    monkeypatch.setattr(Caller, "call", call)
    prompts = [Prompt("a", tokenizer(text)["input_ids"]) for text in TEXTS[:2]]
    settings, methods = Settings(max_new_tokens=8, passes=3), {"free": SelfSpec.lookup()}
    Asked(model, tokenizer, prompts, settings, methods, measures_costs=False).measured(progress=False)
    used = [spec for spec in specs if spec is not None]
    assert [spec is used[0] for spec in used] == [True, True, False, False, False, False]
    assert [spec is used[4] for spec in used] == [False, False, False, False, True, True]


def test_a_new_journal_begins_without_what_another_has_learned(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """After ``calls.jsonl`` was moved away, as the error about it advises."""
    prompts = [Prompt("a", tokenizer(text)["input_ids"]) for text in TEXTS[:2]]
    journal = Journal.opened({}, tmp_path, traces=True)
    journal.keep_state("free", _with_texts(model, prompts[0]), model)
    (tmp_path / "trace.jsonl").write_text("{}\n")
    (tmp_path / "report.md").write_text("of the user")
    (tmp_path / "calls.jsonl").rename(tmp_path / "elsewhere.jsonl")
    again, spec = Journal.opened({}, tmp_path, traces=True), SelfSpec.lookup()
    again.restore_state("free", spec, model)
    assert spec._knowledge.saved is None
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "calls.jsonl",
        "elsewhere.jsonl",
        "report.md",
    }


def _with_texts(model: LlamaForCausalLM, prompt: Prompt) -> SelfSpec:
    spec = SelfSpec.lookup()
    batch = Batch.of([prompt], 0, model.device)
    model.generate(batch.ids, attention_mask=batch.mask, assistant=spec, max_new_tokens=8, pad_token_id=0)
    return spec


def test_a_way_that_became_another_is_not_put_together_with_it(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def again(spec: SelfSpec) -> None:
        compare(model, tokenizer, TEXTS[:2], {"mine": spec}, max_new_tokens=4, out=tmp_path, progress=False)

    again(SelfSpec.layerskip(3, num_draft=2))
    again(SelfSpec.layerskip(3, num_draft=2))
    with pytest.raises(
        SettingError, match=r"other settings \(settings_of_ways.mine: .*num_tokens=2.*now .*num_tokens=4"
    ):
        again(SelfSpec.layerskip(3, num_draft=4))


def test_settings_of_a_way_are_the_same_in_each_process() -> None:
    make: Any = object
    assert Way("mine", "ours", "assistant=mine", make=make).settings == "<object object>"
