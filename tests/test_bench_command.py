"""``hf-selfspec bench``: the whole way on a tiny model, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from comparing import DEMO, write_model, write_suites
from transformers.utils import logging

from hf_selfspec.bench.comparison import ablations, calls, ways
from hf_selfspec_command import main

SCHEMA = Path(calls.__file__).parent / "results.schema.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_suites(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What the command sets for its process."""
    verbosity, bars, threads = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_num_threads()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar() if bars else logging.disable_progress_bar()
    torch.set_num_threads(threads)


def bench(model: Path, data: Path, out: Path, *words: str) -> int:
    given = ["--model", str(model), "--data", str(data), "--out", str(out), "--threads", "1", "--device", "cpu"]
    return main(["bench", *given, *words])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_chats_of_several_files_are_one_stream(
    files: dict[str, Path], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--data", str(files["editing"]), "--suite", "auto", "--suite", "editing"]
    words = [*more, "--kinds", "qa,editing,rag", "--prompts", "1", "--max-new-tokens", "12", "--first-calls", "1"]
    words += ["--methods", "selfspec, prompt-lookup(2)", "--methods", "SelfSpec.layerskip(3, stop=FixedLength(2))"]
    assert bench(model, files["spec-bench"], tmp_path, *words, "--repeat", "--trace") == 0
    captured = capsys.readouterr()
    assert "SelfSpec.layerskip(3, stop=FixedLength(2))" in captured.out
    assert "left 0:00:00" in captured.err
    results = json.loads((tmp_path / "results.json").read_text())
    jsonschema.validate(results, json.loads(SCHEMA.read_text()))
    (condition,) = results["conditions"]
    assert condition["kinds"] == {"editing": 1, "rag": 1, "qa, again": 1, "editing, again": 1, "rag, again": 1}
    assert all(way["equal_ids"]["share"] == 1 for way in condition["ways"])
    assert [len(way["fresh_calls"]) for way in condition["ways"]] == [0, 1, 0, 1]
    trace = [line["stats"] for line in lines(tmp_path / "trace.jsonl")]
    assert len(trace) == 2 * 6 + 2
    assert all(line["tokens"] == 12 and line["timeline"] for line in trace)


def test_a_file_of_ones_own_gives_enough_prompts_for_an_interval(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"def number_{number}():"}) for number in range(30)))
    assert bench(model, data, tmp_path / "report", "--methods", "prompt-lookup(2)", "--max-new-tokens", "2") == 0
    (condition,) = json.loads((tmp_path / "report" / "results.json").read_text())["conditions"]
    assert condition["prompts"] == 19, "the first one is told apart"
    assert condition["ways"][1]["whole"]["ratio_of_means"]["low"] is not None


def test_drawn_batches_of_beginnings(files: dict[str, Path], model: Path, tmp_path: Path) -> None:
    words = ["--raw", "--kinds", "code", "--prompts", "3", "--batch-size", "2", "--max-new-tokens", "8"]
    words += ["--methods", "selfspec,prompt-lookup", "--temperature", "0.7", "--top-p", "0.9"]
    words += ["--without", "kernels,costs", "--free-verification", "--memory"]
    assert bench(model, files["humaneval"], tmp_path, *words) == 0
    (condition,) = json.loads((tmp_path / "results.json").read_text())["conditions"]
    assert condition["kinds"] == {"batch of 2": 1}
    assert [way["name"] for way in condition["ways"]] == ["plain", "SelfSpec()"], "prompt lookup takes one prompt"
    for way in condition["ways"]:
        assert way["output_sequence_length"] == 8
        assert way["equal_ids"] is None
        assert way["peak_memory_bytes"] > 10_000_000


def test_variants_and_compiled_ways(
    files: dict[str, Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways.KNOWN["static-compiled"].options["compile_config"], "backend", "eager")  # dynamo alone
    words = ["--variants", "--prompts", "1", "--kinds", "summary", "--max-new-tokens", "8", "--passes", "3"]
    assert bench(model, files["spec-bench"], tmp_path, *words, "--methods", "static-compiled") == 0
    (condition,) = json.loads((tmp_path / "results.json").read_text())["conditions"]
    assert condition["kinds"] == {"summary": 1, "summary, variant": 1}
    compiled = condition["ways"][1]
    assert compiled["compiled_graphs"] > 0
    assert compiled["equal_ids"]["share"] == 1
    assert len([line for line in lines(tmp_path / "calls.jsonl") if "call" in line]) == 3 * 2 * 2


def test_a_log_has_no_bar_of_loading(
    files: dict[str, Path], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()
    assert bench(model, files["gsm8k"], tmp_path, "--methods", "plain", "--prompts", "1", "--max-new-tokens", "2") == 0
    assert "Loading" not in capsys.readouterr().err


def test_chats_need_a_chat_template(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(DEMO, files["text"], tmp_path / "out") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hf-selfspec: the tokenizer has no chat template, so the model cannot chat.")
    assert not (tmp_path / "out").exists()


def test_ablations_are_taken_back() -> None:
    kept = [ablations.linear._has_ways, ablations.SuffixIndex.match, ablations.clock.CostCurve.add]
    with ablations.changed(ablations.ABLATIONS, free_verification=True):
        inside = [ablations.linear._has_ways, ablations.SuffixIndex.match, ablations.clock.CostCurve.add]
        assert not any(one is two for one, two in zip(kept, inside, strict=True))
    assert kept == [ablations.linear._has_ways, ablations.SuffixIndex.match, ablations.clock.CostCurve.add]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "gsm8k"], "the first line has no question and no answer"),
        (["--suite", "gsm8k", "--suite", "text"], "--suite is given 2 times and --data 1 times"),
        (["--suite", "spec"], "--suite spec: there is no such suite"),
        (["--kinds", "poems"], "--kinds poems: --data has no such prompts, only chat, translation"),
        (["--prompts", "0"], "Invalid value for '--prompts': "),
        (["--methods", "magic"], "--methods magic: there is no such folder or preset"),
        (["--without", "luck"], "--without luck: there is no such part. Give one of kernels"),
        (["--raw", "--variants"], "--variants are chats, so --raw has no effect"),
        (["--batch-size", "99"], "batch_size=99: there are fewer prompts than that"),
        (["--max-prompt-tokens", "1"], "no prompt fits"),
        (["--clock", "sun"], "clock must be one of auto, wall, cpu"),
    ],
)
def test_mistakes_are_one_line(
    files: dict[str, Path],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert bench(model, files["spec-bench"], tmp_path, *words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hf-selfspec: ")
    assert message in line
