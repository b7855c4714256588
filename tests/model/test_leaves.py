"""Kernels in the place of norms, rotations and activations: that they round as transformers' code does."""

import json
from typing import Any

import pytest

from helpers.processes import TESTS, library, python


def found(what: str) -> Any:
    library("triton")
    return json.loads(python(TESTS / "helpers" / "triton_without_gpu.py", what).stdout.splitlines()[-1])


def test_kernels_round_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations are the same bit for bit; the order of a sum, or an exponential, decides ties. A norm has one form."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cases = found("interpret")
    assert len(cases) == 3 * (9 + 18 + 2)
    for name, (share, roundings) in cases.items():
        kind, *of, dtype = name.split()
        if kind == "rotation":
            assert share == 0, name
        elif kind == "norm" and of[0] != of[2].strip(",") and (dtype != "torch.float32" or "2" in name[:12]):
            assert share > 0.2, name
        else:
            assert roundings <= (4 if dtype == "torch.float32" else 1), name
            assert share <= 0.01 or dtype == "torch.float32", name


def test_kernels_compile_for_a_device() -> None:
    """As they are launched: one for all numbers of tokens, in which no product and sum are rounded at once."""
    kernels = found("compile").values()
    assert {name for name, _ in kernels} == {"_norm", "_rotate", "_activate"}
    assert len(kernels) == 3 * (3 + 1 + 2)
    assert not any(rounds_once for _, rounds_once in kernels)
