"""Greedy identity in float32: the tokens of plain ``generate`` on every architecture, for every kind of draft."""

from __future__ import annotations

import random
import warnings
from functools import lru_cache

import pytest
import torch
from architectures import ARCHITECTURES, STATEFUL, build
from conftest import ragged_batch
from transformers import PreTrainedModel

from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.model.anatomy import Anatomy

_WIDE = TopKTree(((0.9999, 3), (1.0, 1)))


@lru_cache(maxsize=1)
def _model(name: str) -> PreTrainedModel:
    return build(name)


def random_skip_set(name: str, model: PreTrainedModel) -> SkipLayers:
    """A set of blocks drawn for this architecture, always the same one."""
    draw = random.Random(name)
    anatomy = Anatomy.of(model)
    middle = range(1, anatomy.num_layers - 1)
    attention = [index for index in middle if index not in anatomy.kv_sources and draw.random() < 0.5]
    mlp = [index for index in middle if draw.random() < 0.5]
    # Some hybrids have layers without one of the blocks.
    attention = [index for index in attention if anatomy.attention[index] is not None]
    mlp = [index for index in mlp if anatomy.mlp[index]]
    if not attention and not mlp:
        return SkipLayers([], [1]) if anatomy.mlp[1] else SkipLayers([1], [])
    return SkipLayers(attention, mlp)


def spec_of(kind: str, name: str, model: PreTrainedModel) -> SelfSpec:
    """The settings of one kind of draft."""
    if kind == "skip":
        return SelfSpec(draft=random_skip_set(name, model), stop=FixedLength(3))
    return SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=_WIDE if kind == "tree" else None)


def same_tokens(model: PreTrainedModel, spec: SelfSpec, rows: int) -> float:
    """Checks identity for one row or a ragged batch of three, and returns the acceptance rate."""
    inputs = ragged_batch() if rows == 3 else {name: value[1:2] for name, value in ragged_batch().items()}
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot take")
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant=spec)
    assert torch.equal(tokens, expected)
    assert spec.stats is not None
    return spec.stats.acceptance_rate


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_identity(name: str) -> None:
    model = _model(name)
    for kind in ("exit", "skip") if name in STATEFUL else ("exit", "skip", "tree"):
        for rows in (1, 3):
            rate = same_tokens(model, spec_of(kind, name, model), rows)
            assert 0.0 < rate < 1.0, f"{kind}, {rows} rows: acceptance rate {rate} tests one side only"


def test_at_least_forty_architectures() -> None:
    assert len(ARCHITECTURES) >= 40
