"""Kernels in the place of norms, rotations and activations: that they round as transformers' code does."""

import json
from typing import Any

import pytest

from helpers.leaves import check_differences
from helpers.processes import TESTS, library, python


def found(what: str) -> Any:
    library("triton")
    return json.loads(python(TESTS / "helpers" / "triton_kernels.py", what).stdout.splitlines()[-1])


def test_kernels_round_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_differences(found("interpret"))


def test_kernels_compile_for_a_device() -> None:
    """As launched: one for all numbers of tokens and kinds of norms, which rounds no product and sum in one."""
    kernels = found("compile").values()
    assert {name for name, _ in kernels} == {"_norm", "_rotate", "_activate"}
    assert len(kernels) == 3 * (1 + 2 + 2)
    assert not any(rounds_once for _, rounds_once in kernels)
