"""Peak memory of processes, and what is kept where it could not be measured."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import DEMO
from conftest import tiny_llama
from transformers import AutoTokenizer

from hf_selfspec.bench import resident
from hf_selfspec.bench.comparison import memory
from hf_selfspec.bench.comparison.compare import Asked
from hf_selfspec.bench.comparison.memory import peaks
from hf_selfspec.bench.comparison.prompts import Batch, Prompt
from hf_selfspec.bench.comparison.settings import Settings
from hf_selfspec.bench.comparison.ways import KNOWN, PLAIN
from hf_selfspec.draft.source import Session

MIB = 2**20


def test_peak_is_the_processs_own_and_not_that_of_its_parent() -> None:
    told = (
        f"import runpy; held = b'x' * {32 * MIB}; print(runpy.run_path({resident.__file__!r})['peak_resident_bytes']())"
    )
    parent = f"import os, sys; held = b'x' * {256 * MIB}; os.execv(sys.executable, [sys.executable, '-c', {told!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 32 * MIB < int(done.stdout) < 128 * MIB


@pytest.mark.usefixtures("no_warnings_yet")
def test_a_failed_measurement_is_told(tmp_path: Path) -> None:
    batch = Batch.of([Prompt("a", [1, 2])], 0, torch.device("cpu"))
    with pytest.warns(UserWarning, match=r"peak memory of plain was not measured \(.*such folder"):
        assert peaks(str(tmp_path / "nothing"), "auto")(KNOWN[PLAIN], batch, {"max_new_tokens": 2}) is None


def test_memory_is_that_of_the_parts_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of its own leaves out what this one does."""
    takes_trees: list[Any] = []

    def run(command: list[str], input: str, **options: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        monkeypatch.setattr("sys.stdout", io.StringIO())
        memory._main()
        return subprocess.CompletedProcess(command, 0, stdout=f"{5 * MIB}\n", stderr="")

    monkeypatch.setattr(memory.subprocess, "run", run)
    monkeypatch.setattr(memory.Caller, "call", lambda *args: takes_trees.append(Session.takes_trees))
    batch = Batch.of([Prompt("a", [1, 2])], 0, torch.device("cpu"))
    for without in ((), ("trees",)):
        assert peaks(str(DEMO), "auto", without)(KNOWN[PLAIN], batch, {"max_new_tokens": 2}) == 5 * MIB
    whole, left = takes_trees
    assert whole is not False
    assert left is False


def test_a_failed_measurement_is_made_again(tmp_path: Path) -> None:
    given: list[int | None] = [None, 5 * MIB]

    def peak(*_: Any) -> int | None:
        return given.pop(0)

    prompts = [Prompt("a", [1, 2]), Prompt("a", [3, 4])]
    asked: dict[str, Any] = {"out": tmp_path, "measures_costs": False, "peaks": peak}
    for expected in (None, 5 * MIB, 5 * MIB):
        model, tokenizer = tiny_llama(vocabulary=4096), AutoTokenizer.from_pretrained(DEMO)
        found = Asked(model, tokenizer, prompts, Settings(4), [], **asked).measured(progress=False)
        assert found.results["conditions"][0]["ways"][0]["peak_memory_bytes"] == expected
    assert given == []
