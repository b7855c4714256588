"""Processes and libraries that several tests need."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_selfspec

# PEFT reads an attribute of transformers' models that has a new name there.
peft_calls_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
DEMO_MODEL = EXAMPLES / "demo_model"


def library(name: str) -> Any:
    """A library of the test extras; a test that needs it is skipped where it is not installed."""
    return pytest.importorskip(name, reason=f"{name} is a test extra that not all platforms have")


def python(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words, where it finds the package and the helpers; it has to end with this exit code."""
    paths = (str(Path(hf_selfspec.__file__).parents[1]), str(TESTS), os.environ.get("PYTHONPATH", ""))
    places = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=places, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def in_two_processes(script: str | Path, *arguments: str | Path) -> None:
    """Runs a script (of `helpers`, unless the path is whole) with these arguments, as torchrun does."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    python(*torchrun, TESTS / "helpers" / script, *arguments)
