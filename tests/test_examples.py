"""The example scripts, as a user starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_quickstart_shows_marked_text_and_equal_tokens() -> None:
    printed = run("quickstart.py", "--tokens", "16", "--no-color")
    assert "tokens equal to plain generate: yes" in printed
    assert "‹" in printed
    assert printed.count("tokens/s   α") == 2


def test_training_script_makes_a_model_in_two_steps(tmp_path: Path) -> None:
    run(
        "train_demo_model.py",
        "--steps",
        "2",
        "--held-out-blocks",
        "2",
        "--threads",
        "1",
        "--output",
        str(tmp_path / "model"),
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers >= 12
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"


def test_lora_script_trains_adapters_in_two_steps(tmp_path: Path) -> None:
    settings = ["--steps", "2", "--held-out-blocks", "1", "--threads", "1", "--rank", "2"]
    printed = run("lora_layerskip.py", "--model", str(EXAMPLES / "demo_model"), "--output", str(tmp_path), *settings)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert "| 24 |" in (tmp_path / "exits.md").read_text()
    assert "| 24 |" in printed


def test_measuring_script_prints_all_ways(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    prompt = "import os\n\n\n" + "def read(path):\n    return open(path).read()\n\n\n" * 8
    tasks.write_text("\n".join([json.dumps({"prompt": prompt})] * 9))
    model = tiny_llama(vocabulary=4096)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(EXAMPLES / "demo_model").save_pretrained(tmp_path / "model")
    settings = ["--model", str(tmp_path / "model"), "--humaneval", str(tasks)]
    settings += ["--prompts", "1", "--repeats", "1", "--tokens", "12"]
    printed = run("measure_demo_model.py", *settings, "--output", str(tmp_path / "figures.md"))
    written = (tmp_path / "figures.md").read_text()
    for way in ("plain generate", "assistant_early_exit", "prompt lookup", "ours", "early exit only", "Attainable"):
        assert written.count(f"{way}") >= 4
        assert way in printed
    run("measure_demo_model.py", *settings, "--plot", str(tmp_path / "exits.png"))
    assert (tmp_path / "exits.png").stat().st_size > 1000


def test_grammar_script_prints_all_ways(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is a test extra that not all platforms have")
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo_model")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(vocabulary=4096).save_pretrained(tmp_path)
    printed = run("measure_grammar.py", "--model", str(tmp_path), "--prompts", "2", "--max-new-tokens", "24")
    assert [line.split()[1] for line in printed.splitlines()[-3:]] == ["plain", "kept", "fresh"]


def test_script_about_whole_drafts_prints_all_kinds() -> None:
    printed = run("measure_whole_drafts.py", "--tokens", "40", "--repeats", "1", "--backend", "eager")
    assert [line.split("|")[-2].strip() for line in printed.splitlines()[-3:]] == ["yes"] * 3
