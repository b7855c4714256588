"""The scripts of ``examples/benchmarks``, each with its smallest setting, as a user starts them."""

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from helpers.models import tiny_llama
from helpers.processes import EXAMPLES

SCRIPTS = EXAMPLES / "benchmarks"
# What the scripts share, which are no figures.
SHARED = {"corpus", "fitting", "synthetic", "timing"}
RANDOM = "--width 64 --dtype float32 --layers 4 --vocabulary 97"
TRAINED = "--model {model} --data {tasks} --repeats 1"
FITTED = f"{TRAINED} --prompts 2 --tokens 12 --out {{folder}}/fitted"
# For each script its words, and what it has to print.
CASES: dict[str, tuple[str, str]] = {
    "engine": (f"{RANDOM} --exit-layer 2 --tokens 12 --repeats 1", "| width 64, float32, batch 1, prompt 64 |"),
    "exactness": ("--shapes tiny", "| tiny | 2 layers, exact |"),
    "fewer_bits": ("--width 64 --layers 2 --vocabulary 97 --repeats 1", "| Quantized(bits=8"),
    "forward": (f"{RANDOM} --repeats 1 --prompt 20", "| width 64, float32, ours |"),
    "host": ("--model {model} --data {tasks} --prompts 2 --tokens 12 --rows 1 2", "| 2 |"),
    "compiled": ("--tokens 40 --repeats 1 --backend eager", "| skip set, line of 4 |"),
    "known_answer": (f"{RANDOM} --layers 6 --steps 3 --plot {{folder}}/plot.png", "| closest layers (CLaSp) | 3 |"),
    "grammar": ("--model {model} --prompts 1 --max-new-tokens 24", "| fresh |"),
    "suites": ("humaneval {humaneval} spec-bench {spec_bench}", '{"kind": "summary", "prompt": "Summarize: a text."}'),
    "memory": (f"{RANDOM} --exit-layer 2 --tokens 4 --prompt 8", "| width 64, float32 |"),
    "training": (f"{RANDOM} --repeats 1 --prompt 16", "| dropout 0.2 |"),
    "exits": ("--model {model} --repeats 1 --prompts 1 --tokens 40", "The probe promised"),
    "searches": ("--model {model} --data {tasks} --prompts 1 --tokens 33", "| no search |"),
    "stops": (f"{FITTED} --files 2", "| AdaSPEED with the probe |"),
    "adapters": (f"{FITTED} --files 2", "| exit alone (LayerSkip) |"),
    "parts": (
        "--model {model} --text {folder}/text.json --data {tasks} --prompts 1 --tokens 8 --exit-layer 2 --ranks 4 4 "
        "--block-size 32 --out {folder}/fitted",
        "| mtp3 |",
    ),
    "heads": ("--copied --repeats 1 --prompts 1 --tokens 8 --files 8 --out {folder}/fitted", "| ε = 0.9 |"),
    "gpu": (
        "--device cpu --shapes tiny --rows 1 --tokens 6 --repeats 1 --dtype float32 --out {folder}/gpu.json",
        "| generate tiny 1 | verification |",
    ),
}
# Those that take longer than a few seconds.
SLOW = {"adapters", "compiled", "exits", "gpu", "heads", "known_answer", "parts", "searches", "stops"}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts find each other, and what they set for the process is taken back."""
    monkeypatch.syspath_prepend(SCRIPTS)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A tiny model with a chat template, and files of prompts."""
    model = tmp_path / "model"
    tiny_llama(vocabulary=4096).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}\n"
    tokenizer.save_pretrained(model)
    prompt = "import os\n\n\n" + "def read(path):\n    return open(path).read()\n\n\n" * 8
    rows = {
        "tasks": [{"prompt": prompt}] * 9,
        "humaneval": [{"prompt": "def add(x):\n", "entry_point": "add", "canonical_solution": "    return x\n"}],
        "spec_bench": [{"category": "summarization", "turns": ["Summarize: a text."]}],
    }
    for name, of_file in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, of_file)))
    (tmp_path / "text.json").write_text(json.dumps({"texts": [list(range(2, 302))]}))
    return {"model": model, "folder": tmp_path, **{name: tmp_path / f"{name}.jsonl" for name in rows}}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script, and processes that it starts of itself, in this process."""

    def run(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / f"{name}.py"), *words])
        runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    def started(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        words, (_, script, *given) = sys.argv, command
        printed = run(Path(script).stem, *given)
        monkeypatch.setattr(sys, "argv", words)
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(subprocess, "run", started)
    return run


def test_every_script_is_a_case() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(CASES) | SHARED


@pytest.mark.filterwarnings("ignore:Passing `generation_config` together")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_the_smallest_setting(name: str, places: dict[str, Path], run: Callable[..., str]) -> None:
    if name == "grammar":
        pytest.importorskip("xgrammar", reason="xgrammar is a test extra that not all platforms have")
    words, expected = CASES[name]
    assert expected in run(name, *(word.format(**places) for word in words.split()))


def test_edits_of_code_and_raw_prompts(places: dict[str, Path], run: Callable[..., str]) -> None:
    printed = run("suites", "humaneval", str(places["humaneval"]))
    (code, edit) = map(json.loads, printed.splitlines())
    assert (code["kind"], edit["kind"]) == ("code", "editing")
    assert "rename the function add to my_add" in edit["prompt"]
    assert json.loads(run("suites", "--raw", "humaneval", str(places["humaneval"]))) == {
        "kind": "code",
        "prompt": "def add(x):\n",
    }
    line = f"In {'old ' * 80}the town of Paris @-@ on @-@ Sea , <unk> had walls ."
    places["tasks"].write_text(f"{line}\n= Title =\n")
    (edited,) = map(json.loads, run("suites", "editing", str(places["tasks"])).splitlines())
    assert "change Paris to Arden" in edited["prompt"]
    assert "Paris-on-Sea, had walls." in edited["prompt"]


def test_interleave_runs_in_turn_and_leaves_the_warmup_out() -> None:
    timing: Any = importlib.import_module("timing")
    calls: list[str] = []

    def variant(name: str, seconds: float) -> Any:
        calls.append(name)
        return timing.Sample(0.0, seconds, 2)

    timings = timing.interleave({"a": lambda: variant("a", 1.0), "b": lambda: variant("b", 4.0)}, repeats=3)
    assert calls == ["a", "b"] * 4
    assert timings["b"].median() / timings["a"].median() == 4.0
    samples = [timing.Sample(0, seconds, 1) for seconds in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert timing.Timings(samples).spread() == pytest.approx(0.5)


def test_a_gpu_run_goes_on_and_keeps_what_failed(
    places: dict[str, Path], run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, began = places["folder"] / "gpu.json", []

    def started(command: list[str], **options: Any) -> Any:
        began.append(command[-1])
        if command[-1] == "damping tiny":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, '{"bytes_per_second": 1e9}\n', "")

    monkeypatch.setattr(subprocess, "run", started)
    words = ["--device", "cpu", "--shapes", "tiny", "--rows", "1", "--out", str(out)]
    first = run("gpu", *words, "--seconds", "0")
    assert began == []
    assert "| bandwidth | no time was left |" in first
    second = run("gpu", *words)
    assert began == ["bandwidth", "damping tiny", "training tiny"], "what needs the damping is left out"
    assert "| damping tiny | it was not done after 300 s |" in second
    run("gpu", *words)
    assert len(began) == 3
    with pytest.raises(SystemExit, match="Give another --out"):
        run("gpu", *words, "--repeats", "5")
