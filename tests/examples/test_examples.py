"""The example scripts, as a user starts them."""

import hashlib
import importlib
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.processes import EXAMPLES, in_two_processes
from hf_selfspec import SelfSpec

sys.path.append(str(EXAMPLES))


@pytest.fixture(scope="session")
def small_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard library of few files, six of which are held out."""
    from benchmarks.corpus import corpus_files, is_held_out

    folder, whole = tmp_path_factory.mktemp("library"), Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in corpus_files(whole) if 10_000 < (whole / path).stat().st_size < 50_000]
    for held_out, count in ((True, 6), (False, 12)):
        for path in [path for path in files if is_held_out(path) == held_out][:count]:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(whole / path, folder / path)
    return folder


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, small_library: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a script in this process, with few files of the standard library and these constants."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(small_library)})

    def run(script: str, *arguments: str, **constants: int) -> str:
        module = importlib.import_module(script.removesuffix(".py"))
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        module.main()
        return capsys.readouterr().out

    return run


def test_quickstart_shows_marked_text_and_equal_tokens(run_here: Callable[..., str]) -> None:
    printed = run_here("quickstart.py", "--tokens", "12", "--no-color")
    assert "tokens equal to plain generate: yes" in printed
    assert "‹" in printed
    assert printed.count("tokens/s   α") == 2


@pytest.mark.slow
def test_processes_answer_their_share_and_draft_from_all_answers(tmp_path: Path) -> None:
    prompts = [f"def {name}(path):\n" for name in ("read_text", "write_lines", "remove", "copy_file", "size_of")]
    data, output, cache = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "cache"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    places = ("--data", data, "--output", output, "--cache-dir", cache)
    # In bfloat16, as it is saved, next tokens are equally likely at times, and any of them may be taken.
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "demo_model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_model")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    script, options = EXAMPLES / "batch_inference.py", ("--model", tmp_path / "model", "--max-new-tokens", "24")
    in_two_processes(script, *options, *places)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert not list(tmp_path.glob("answers.jsonl.*"))
    for answer in (answers[0], answers[-1]):  # of the first process, and of the second
        inputs, rounds = tokenizer(answer["prompt"], return_tensors="pt"), []
        for folder in (None, cache):
            spec = SelfSpec(cache_dir=folder)
            ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant=spec)
            rounds.append(spec.stats.rounds)
        assert tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == answer["answer"]
        assert rounds[1] < rounds[0]  # by how much depends on times, too
    data.write_text(json.dumps({"prompt": prompts[0]}) + "\n")  # none for the second process
    output = tmp_path / "one.jsonl"
    in_two_processes(script, *options, "--data", data, "--output", output)
    assert len(output.read_text().splitlines()) == 1


def test_answers_of_a_stopped_run_are_kept(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """A line that was cut short is written again."""
    data, output = tmp_path / "prompts.jsonl", tmp_path / "new" / "answers.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"def {name}(x):"}) + "\n" for name in "ab"))
    script = [
        "batch_inference.py",
        "--model",
        str(EXAMPLES / "demo_model"),
        "--data",
        str(data),
        "--output",
        str(output),
    ]
    output.parent.mkdir()
    digest = hashlib.sha256(json.dumps(["def a(x):", "def b(x):"]).encode()).hexdigest()
    about = {"model": str(EXAMPLES / "demo_model"), "max_new_tokens": 4, "processes": 1, "prompts": digest}
    kept = json.dumps({"prompt": "def a(x):", "answer": "of before"}) + "\n"
    stopped = json.dumps(about) + "\n" + kept + '{"prompt": "def'
    (part := output.with_name("answers.jsonl.part-0")).write_text(stopped)
    with pytest.raises(SystemExit, match=re.escape(f"{part} was written by another run: {json.dumps(about)}. Repeat")):
        run_here(*script, "--max-new-tokens", "5")
    assert part.read_text() == stopped
    run_here(*script, "--max-new-tokens", "4")
    first, second = output.read_text().splitlines(keepends=True)
    assert first == kept
    assert json.loads(second)["prompt"] == "def b(x):"
    assert [path.name for path in output.parent.iterdir()] == ["answers.jsonl"]
    data.write_text('{"prompt": "x"}\n\n{"question": "y"}\n')
    with pytest.raises(SystemExit, match=r"line 3: KeyError\('prompt'\); a line is"):
        run_here(*script)


def test_training_script_makes_a_model_in_two_steps(tmp_path: Path, run_here: Callable[..., str]) -> None:
    words = ["--steps", "2", "--held-out-blocks", "2", "--threads", "1", "--output", str(tmp_path / "model")]
    run_here("train_demo_model.py", *words)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers >= 12
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
