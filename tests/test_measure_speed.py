"""The script that measures a stream of prompts: its prompts, its figures, and the whole way on a tiny model."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_llama
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from speed_prompts import Encoder, Sources, repeated, stream_of, stream_of_variants
from speed_report import Figures, Run, Sample, cost_where_free, decoding, in_total, looping_share, report, whole_call

EXAMPLES = Path(__file__).parent.parent / "examples"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three items of each kind."""
    folder = tmp_path_factory.mktemp("prompts")
    bench = [
        {"category": category, "turns": [f"Summarize: The {category} city of Paris, {number}.\nWhere is it?"]}
        for number in range(3)
        for category in ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")
    ]
    tasks = [
        {
            "entry_point": f"add_{number}",
            "prompt": f"def add_{number}(x, y):\n" + '    """Adds two numbers, also ones of other types."""\n' * 4,
            "canonical_solution": "    return x + y\n",
        }
        for number in range(3)
    ]
    questions = [{"question": f"What is {number} and {number}?"} for number in range(3)]
    text = "\n".join(
        f"In {number} the town of Paris @-@ on @-@ Sea , <unk> had walls .{' It was old .' * 20}" for number in range(3)
    )
    found = {"spec_bench": folder / "bench.jsonl", "humaneval": folder / "tasks.jsonl", "gsm8k": folder / "gsm8k.jsonl"}
    for path, items in zip(found.values(), (bench, tasks, questions), strict=True):
        path.write_text("\n".join(map(json.dumps, items)))
    found["text"] = folder / "text.txt"
    found["text"].write_text(text)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocabulary=4096).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_model")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def test_stream_has_as_many_of_each_kind_in_turn(files: dict[str, Path], folder: Path) -> None:
    texts = Sources(**files).questions()
    encoder = Encoder(AutoTokenizer.from_pretrained(folder), 10_000, None)
    stream = stream_of(texts, encoder, 2, random.Random(0))
    kinds = ["chat", "translation", "summary", "qa", "math", "rag", "code", "gsm8k", "editing"]
    assert [prompt.kind for prompt in stream] == 2 * kinds
    assert stream == stream_of(texts, encoder, 2, random.Random(0))
    assert [prompt.ids for prompt in repeated(stream)] == 2 * [prompt.ids for prompt in stream]
    edits = [text for text in texts["editing"] if "change Paris to Arden" in text]
    assert len(edits) == 3
    assert "Paris-on-Sea, had walls." in edits[0]


def test_prompts_that_do_not_fit_are_counted(files: dict[str, Path], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(tokenizer, 64, None)
    stream = stream_of(Sources(**files).questions(), encoder, 3, random.Random(0))
    assert {prompt.kind for prompt in stream} >= {"gsm8k", "qa"}
    assert encoder.left_out["code"] == encoder.left_out["editing"] // 2 == 3
    raw = Encoder(tokenizer, 10_000, 64)
    texts = {"code": Sources(**files).beginnings()["code"], "gsm8k": Sources(**files).beginnings()["gsm8k"]}
    assert {len(prompt.ids) for prompt in stream_of(texts, raw, 3, random.Random(0))} == {64}
    assert raw.left_out["gsm8k"] == 3


def test_variants_come_after_what_they_vary(files: dict[str, Path], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = Sources(**files).pairs()
    stream = stream_of_variants(pairs, Encoder(tokenizer, 10_000, None), 3, random.Random(1))
    texts = [tokenizer.decode(prompt.ids).strip() for prompt in stream]
    places = [tuple(texts.index(text.strip()) for text in pair) for both in pairs.values() for pair in both]
    assert len(stream) == 2 * len(places) == 24
    assert all(original < variant for original, variant in places)
    assert any(variant - original > 2 for original, variant in places)


def test_figures_are_ratios_of_seconds_per_token() -> None:
    def run(seconds: float, tokens: int, looping: float = 0.0) -> Run:
        return Run(wall=seconds, cpu=2 * seconds, tokens=tokens, ids=[list(range(tokens))], looping=looping)

    first = Sample(
        "a", [9], {"prefill": run(1, 1), "plain": run(5, 9, 0.5), "lookup2": run(3, 9), "lookup3": run(4, 9)}
    )
    second = Sample("b", [9], {"prefill": run(1, 1), "plain": run(3, 5), "lookup2": run(5, 9), "lookup3": run(2, 5)})
    assert in_total([first], "lookup2", decoding("wall")) == pytest.approx(2.0)
    assert in_total([second], "lookup2", decoding("cpu")) == pytest.approx(1.0)
    assert in_total([first], "lookup2", whole_call("wall")) == pytest.approx(5 / 3)
    printed = report(Figures({"do_sample": False}, [first, second]), "wall")
    assert "| a | 1 | 2.00 | 1.33 | 2.00 |" in printed
    assert "| b | 1 | 1.00 | 2.00 | 2.00 |" in printed
    assert printed.count("| kind | samples |") == 5, "texts that loop and others have tables of their own"


def test_loops_and_free_verification() -> None:
    assert looping_share(list(range(40))) == 0
    assert looping_share([*range(20), *range(15), 99]) == pytest.approx(15 / 36)
    assert looping_share([*range(20), *range(11), 99]) == 0
    assert looping_share([]) == 0
    assert cost_where_free([(1, 1), (32, 5), (64, 3)]) == (9, 4.0)


def run_script(*arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / "measure_speed.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_script_measures_chats(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    given = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    printed = run_script(
        f"--model={folder}", *given, "--prompts-per-kind=1", "--max-new-tokens=12", "--kinds", "qa", "editing", "rag",
        "--ways", "selfspec", "lookup2", "lookup3-5", "--spec", "exit=SelfSpec.layerskip(1, stop=FixedLength(2))",
        "--first-calls=1", "--repeat", f"--json={tmp_path / 'figures.json'}", f"--trace={tmp_path / 'trace.jsonl'}",
    )  # fmt: skip
    for shown in ("| exit |", "| qa, again |", "| all | 6 |", "best lookup", "First calls", "| 6/6 |"):
        assert shown in printed
    figures = Figures.load(tmp_path / "figures.json")
    ways = ["prefill", "plain", "selfspec", "lookup2", "lookup3-5", "exit"]
    assert [list(sample.runs) for sample in figures.samples] == [ways] * 6
    assert [sample.kind for sample in figures.samples[:3]] == ["qa", "editing", "rag"]
    assert [call.way for call in figures.first_calls] == ["selfspec", "exit"] * 2
    assert report(figures, "cpu") in printed
    trace = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(trace) == 2 * 6 + 2
    assert all(line["stats"]["tokens"] == 12 and line["stats"]["timeline"] for line in trace)


def test_script_measures_drawn_batches_of_texts(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    printed = run_script(
        f"--model={folder}", f"--humaneval={files['humaneval']}", "--raw", "--kinds", "code", "--prompts-per-kind=3",
        "--batch=2", "--max-new-tokens=8", "--ways", "selfspec", "lookup2", "--do-sample", "--top-p=0.9",
        "--without", "kernels", "costs", f"--json={tmp_path / 'figures.json'}",
    )  # fmt: skip
    assert "| batch of 2 | 1 |" in printed
    assert "lookup2 " not in printed.partition("\n\n")[2].partition("\n\n")[2]
    run = Figures.load(tmp_path / "figures.json").samples[0].runs["plain"]
    assert run.tokens == 16


def test_script_measures_compiled_decoding(
    files: dict[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_compiled = importlib.import_module("measure_compiled")
    monkeypatch.setattr(measure_compiled.COMPILED, "backend", "eager")  # dynamo alone
    arguments = f"--model {folder} --spec-bench {files['spec_bench']} --kinds chat --prompts-per-kind 1"
    monkeypatch.setattr(sys, "argv", ["measure_compiled.py", *arguments.split(), "--max-new-tokens", "12"])
    measure_compiled.main()
    printed = capsys.readouterr().out
    assert "| kind | plain | static, compiled | SelfSpec() | SelfSpec(compile=...) |" in printed
    assert "| ids of plain | 1/1 | 1/1 | 1/1 | 1/1 |" in printed
