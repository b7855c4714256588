"""What a training step makes the host of a GPU wait for, counted on a device in pure Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from helpers.processes import TESTS


def test_waits_of_a_batch() -> None:
    """One for the number of targets, before the layers run; the rows that layers drop go to the device together."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    script, env = TESTS / "helpers" / "train" / "train_on_pretended_gpu.py", os.environ | {"PYTHONPATH": paths}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert all(case["loss"] == pytest.approx(case["expected"], rel=1e-5) for case in found.values())
    plain = found["plain"]
    more = {name: (case["reads"] - plain["reads"], case["uploads"] - plain["uploads"]) for name, case in found.items()}
    assert more == {
        "plain": (0, 0),
        "exits": (1, 0),
        "distilled": (1, 0),
        "last exit alone": (0, 0),
        "dropout": (0, 1),
    }
