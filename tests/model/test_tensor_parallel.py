"""Layers that are spread over two processes, which draft alike and have the ids of one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.distributed import DRAWN, SPECS
from helpers.models import ragged_batch, tiny_llama
from helpers.processes import in_two_processes

pytestmark = pytest.mark.slow

FREE = ("lookup", "default")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_llama(layers=4, factor=0.1).save_pretrained(folder / "model")
    in_two_processes("distributed.py", "tensor_parallel", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", SPECS)
def test_ids_are_those_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    model = tiny_llama(layers=4, factor=0.1)
    for rows, (ids, _) in zip(((9, 5), (9,)), ranks[0][f"{name}, False"], strict=True):
        assert ids == model.generate(**ragged_batch(rows), **DRAWN, do_sample=False).tolist()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_processes_draft_alike(name: str, do_sample: bool, ranks: list[dict[str, Any]]) -> None:
    one, other = (found[f"{name}, {do_sample}"] for found in ranks)
    assert one == other
    if not (do_sample and name in FREE):
        assert any(stats[1] for _, stats in one), "nothing was accepted"


def test_drawn_tokens_follow_the_seed(ranks: list[dict[str, Any]]) -> None:
    one, other = ranks
    assert one["seed 4"] == other["seed 4"]
    assert one["seed 5"] == other["seed 5"] != one["seed 4"]


def test_what_goes_by_other_clocks_or_whole_weights_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("tensor-parallel model" in found[name] for found in ranks for name in ("tune", "layerskip", "swift"))
    assert all("leave `head` out" in found["head"] for found in ranks)
