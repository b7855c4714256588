"""The example scripts, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
