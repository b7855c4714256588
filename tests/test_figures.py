"""``hf-selfspec measure``: figures on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import tiny_llama
from transformers import AutoTokenizer

from hf_selfspec import SettingError
from hf_selfspec.bench.figures import FIGURES, GPU, main
from hf_selfspec_command import main as command
from hf_selfspec_command.measure import _FIGURES

DEMO = Path(__file__).parent.parent / "examples" / "demo_model"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocabulary=4096).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    prompt = "import os\n\n\n" + "def read(path):\n    return open(path).read()\n\n\n" * 8
    path.write_text("\n".join([json.dumps({"prompt": prompt})] * 9))
    return path


def test_help_names_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["measure", "--help"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in _FIGURES.splitlines()] == [*FIGURES, GPU]
    assert _FIGURES in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], "argument FIGURE: invalid choice: 'speed'"),
        (["engine", "--width", "wide"], "argument --width: invalid int value: 'wide'"),
        (["engine", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["exits", "--model", "/nowhere", "--humaneval", "a"], "--model /nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingError, match=message):
        main(words)
    assert command(["measure", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_exits_show_all_ways(model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["exits", "--model", str(model), "--humaneval", str(tasks), "--prompts", "1", "--repeats", "1"]
    words += ["--tokens", "12"]
    assert main([*words, "--output", str(tmp_path / "figures.md")]) == 0
    printed, written = capsys.readouterr().out, (tmp_path / "figures.md").read_text()
    for way in ("plain generate", "assistant_early_exit", "prompt lookup", "ours", "early exit only", "Attainable"):
        assert written.count(way) >= 4
        assert way in printed
    assert written.count("KVQ reuse never | ") == 4
    assert main([*words, "--plot", str(tmp_path / "exits.png")]) == 0
    assert (tmp_path / "exits.png").stat().st_size > 1000


def test_compiled_rounds_have_the_ids_of_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compiled", "--tokens", "40", "--repeats", "1", "--backend", "eager"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[-1].strip() for row in rows] == ["yes"] * 3
    assert all(float(row[-2]) > 1.5 for row in rows)


def test_searches_learn_over_a_stream(model: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(model), "--humaneval", str(tasks), "--prompts", "1", "--tokens", "33"]
    assert main(["searches", *words]) == 0
    printed = capsys.readouterr().out
    for way in ("| plain generate |", "| SelfSpec() |", "| swift(), CostTree |", "Attainable with its set"):
        assert way in printed


def test_stop_rules_adapters_and_heads_are_fitted_and_timed(
    model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--humaneval", str(tasks), "--prompts", "2", "--tokens", "12", "--repeats", "1"]
    words += ["--files", "3", "--out", str(tmp_path)]
    assert main(["fitted", "stops", *words]) == 0
    printed = capsys.readouterr().out
    assert "| AdaSPEED with the probe: 0.8 |" in printed
    assert printed.count("| 4/4 |") == 12


def test_grammar_shows_all_ways(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is a test extra that not all platforms have")
    assert main(["grammar", "--model", str(model), "--prompts", "2", "--max-new-tokens", "24"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[-3:]] == ["plain", "kept", "fresh"]
