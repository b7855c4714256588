"""Models that take more than text: prompts of text alone have plain generate's tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.models import ragged_batch
from helpers.multimodal import IMAGE, MODELS, QWEN, build, prompt_of
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
BATCH = ragged_batch((4, 9, 6), vocabulary=IMAGE)
SPECS = {
    "exit": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
    "skip": SelfSpec(draft=SkipLayers(attention=[1], mlp=[2]), stop=FixedLength(3)),
    "tree": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3), tree=TopKTree(((0.9999, 3), (1.0, 1)))),
}
SPEC = SPECS["exit"]


@cache
def _model(name: str) -> PreTrainedModel:
    return build(name)


# Text alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.every_run(".*-3")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_text_alone(name: str, rows: int) -> None:
    model = _model(name)
    batch = {key: value[3 - rows :] if rows == 3 else value[1:2] for key, value in BATCH.items()}
    expected = model.generate(**batch, **OPTIONS)
    drafted = accepted = 0
    for spec in SPECS.values():
        assert torch.equal(model.generate(**batch, **OPTIONS, assistant=spec), expected)
        assert spec.stats is not None
        drafted, accepted = drafted + spec.stats.drafted, accepted + spec.stats.accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl", "qwen3_vl"])
def test_marks_of_text_are_no_input_beside_it(name: str) -> None:
    """Processors give them with prompts that have no image."""
    marks = {"token_type_ids" if name == "gemma3" else "mm_token_type_ids": torch.zeros_like(BATCH["input_ids"])}
    expected = _model(name).generate(**BATCH, **marks, **OPTIONS)
    assert torch.equal(_model(name).generate(**BATCH, **marks, **OPTIONS, assistant=SPEC), expected)


@pytest.mark.parametrize("name", QWEN)
def test_images_before_and_after(name: str) -> None:
    """What an image call leaves on the model (``rope_deltas``) disturbs no call of text, and the other way round."""
    model, picture = _model(name), prompt_of(name)
    expected = model.generate(**BATCH, **OPTIONS)
    with_picture = model.generate(**picture, **OPTIONS)
    assert torch.equal(model.generate(**BATCH, **OPTIONS, assistant=SPEC), expected)
    assert torch.equal(model.generate(**picture, **OPTIONS), with_picture)
    assert torch.equal(model.generate(**BATCH, **OPTIONS), expected)


def test_usual_positions_in_several_dimensions() -> None:
    model = _model("qwen2_vl")
    positions = torch.arange(9)[None, None].expand(3, 1, -1)
    row = {name: value[1:2] for name, value in BATCH.items()}
    expected = model.generate(**row, **OPTIONS)
    assert torch.equal(model.generate(**row, **OPTIONS, position_ids=positions, assistant=SPEC), expected)
