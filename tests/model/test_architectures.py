"""Greedy identity in float32: the tokens of plain ``generate`` on every architecture, for every kind of draft."""

from __future__ import annotations

from functools import lru_cache

import pytest
from transformers import PreTrainedModel

from helpers.architectures import ARCHITECTURES, STATEFUL, build
from helpers.calls import random_skip_set, same_tokens
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, TopKTree

_WIDE = TopKTree(((0.9999, 3), (1.0, 1)))


@lru_cache(maxsize=1)
def _model(name: str) -> PreTrainedModel:
    return build(name)


def spec_of(kind: str, name: str, model: PreTrainedModel) -> SelfSpec:
    """The settings of one kind of draft."""
    if kind == "skip":
        return SelfSpec(draft=random_skip_set(name, model), stop=FixedLength(3))
    return SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=_WIDE if kind == "tree" else None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_identity(name: str) -> None:
    model = _model(name)
    for kind in ("exit", "skip") if name in STATEFUL else ("exit", "skip", "tree"):
        for rows in (1, 3):
            rate = same_tokens(model, spec_of(kind, name, model), rows)
            assert 0.0 < rate < 1.0, f"{kind}, {rows} rows: acceptance rate {rate} tests one side only"


def test_at_least_forty_architectures() -> None:
    assert len(ARCHITECTURES) >= 40
