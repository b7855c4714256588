"""What a round makes the host of a GPU wait for, counted on a device in pure Python, where all drafts run, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from helpers.processes import TESTS

# (spec, call, rows), and what a draft step and the rest of a round may transfer at most: reads and uploads.
BOUNDS: dict[tuple[str, str, int], tuple[int, int]] = {
    ("fixed", "greedy", 1): (0, 2),
    ("fixed", "greedy", 4): (0, 2),
    ("fixed", "drawn", 4): (0, 2),
    ("fixed", "eos", 1): (1, 2),
    ("fixed", "streamed", 4): (0, 2),
    ("rule", "greedy", 1): (1, 2),
    ("rule", "drawn", 1): (1, 2),
    ("rule", "eos", 1): (1, 2),
    ("rule", "eos", 4): (1, 2),
    ("adaptive", "greedy", 1): (1, 2),
    ("adaptive", "eos", 1): (1, 2),
    ("adaptive", "drawn", 4): (1, 3),  # with the thresholds of all rows
    ("tree", "greedy", 1): (2, 4),
    ("tree", "greedy", 4): (2, 4),
    ("skips", "greedy", 1): (0, 2),
    ("lookup", "greedy", 4): (0, 4),
    ("lookup", "drawn", 4): (0, 4),
    ("lookup", "streamed", 1): (0, 4),
}
# Whatever they need, they run there; spread over two devices, too.
SPECS = (
    "fixed", "rule", "tree", "skips", "lookup", "default", "layerskip", "swift", "closest", "adapter", "lora", "probe",
    "heads", "reduced", "cascade",
)  # fmt: skip
FEW = [(spec, "greedy", 3, "two devices") for spec in ("tree", "skips", "layerskip", "swift", "adapter", "probe")] + [
    ("tree", "drawn", 3),
    ("cascade", "drawn", 3),
    ("closest", "greedy", 1),
    ("rule", "penalty", 3),
]
MORE = [
    (spec, call, rows, *devices)
    for spec in SPECS
    for call, rows in (("greedy", 1), ("greedy", 3), ("drawn", 1), ("drawn", 3))
    for devices in ((), ("two devices",))
]


@cache
def _measured(cases: tuple[tuple[Any, ...], ...]) -> dict[tuple[Any, ...], dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "run_on_pretended_gpu.py"), json.dumps(cases)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(cases, json.loads(run.stdout.splitlines()[-1]), strict=True))


def measured(case: tuple[Any, ...]) -> dict[str, Any]:
    return _measured(next(tuple(group) for group in (BOUNDS, FEW, MORE) if case in group))[case]


@pytest.mark.parametrize("case", BOUNDS, ids=str)
def test_transfers(case: tuple[str, str, int]) -> None:
    found, (step, rest) = measured(case), BOUNDS[case]
    assert found["same"]
    # Rows that end leave the forwards, which takes two further uploads, now and then.
    few = 0.0 if case[2] == 1 else 4 * case[2] / found["rounds"]
    assert found["transfers"] <= step * found["steps"] + rest + few


@pytest.mark.parametrize(
    "case", [case for case in BOUNDS if case[0] in ("fixed", "lookup") and case[1] in ("greedy", "streamed")], ids=str
)
def test_a_round_waits_once(case: tuple[str, str, int]) -> None:
    """What judges and what free drafts learn from is one read, and a streamer gets what the host knows already."""
    assert measured(case)["waits"] == 1


@pytest.mark.parametrize("case", [("fixed", "greedy", 1), ("tree", "greedy", 4), ("lookup", "streamed", 1)], ids=str)
def test_phases_take_the_time_of_the_device(case: tuple[str, str, int]) -> None:
    """Each launch takes a millisecond of the device, however long the host needs for it."""
    assert measured(case)["seconds"] == pytest.approx(measured(case)["of the device"])


@pytest.mark.parametrize("case", [case for case in BOUNDS if case[1] == "greedy"], ids=str)
def test_attention_gets_new_shapes_once_a_forward(case: tuple[str, str, int]) -> None:
    """All layers of a forward have the same ones, so that a kernel makes one plan."""
    found = measured(case)
    # What was drafted last goes through the exact prefix in a forward of its own.
    most = found["steps"] + (1 if case[0] == "lookup" else 2)
    assert found["attention keys"] <= most + 1e-9


@pytest.mark.parametrize("spec", ["fixed", "rule", "adaptive"])
@pytest.mark.parametrize("call", ["greedy", "eos"])
def test_launches_outside_of_layers(spec: str, call: str) -> None:
    found = measured((spec, call, 1))
    assert found["launches a step"] <= 22
    assert found["launches a round"] <= 45


@pytest.mark.parametrize("case", [*FEW, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_all_drafts_run_on_a_device(case: tuple[str, str, int]) -> None:
    """Nothing mixes tensors of two devices, and greedy ids are plain's."""
    assert measured(case)["same"]
