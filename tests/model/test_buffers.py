"""The memory of keys and values: graphs find it where they were recorded, whatever other calls need."""

from __future__ import annotations

import gc
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers.compiled import QUICK, few_layers, same_ids, specs
from helpers.machine import Machine
from helpers.models import ragged_batch
from hf_selfspec.model.cache.layer_buffers import Bank
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.graphs import graphs, runner
from hf_selfspec.model.graphs import shapes as traceable
from hf_selfspec.model.graphs.graphs import graphs_of

Recorded = list[set[tuple[int, ...]]]


@pytest.fixture
def recorded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """For each graph the addresses of keys and values that it ran with, as if it were a CUDA graph."""
    machine.graphs_are_taken()
    monkeypatch.setattr(runner, "_needs_addresses", lambda device: True)
    found: Recorded = []

    def compiled(graph: torch.nn.Module, **_: Any) -> Any:
        if not isinstance(graph, torch.fx.GraphModule):
            return graph
        addresses: set[tuple[int, ...]] = set()
        found.append(addresses)

        def run(*inputs: torch.Tensor) -> Any:
            addresses.add(tuple(value.data_ptr() for value in inputs if value.dim() == 4))
            return graph(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    return found


def test_buffers_of_all_layers_grow_with_the_text() -> None:
    cache, states = SpeculativeCache(2, 1, 256), torch.ones(1, 1, 4, 8)
    for start, wanted in ((0, 256), (4, 256), (300, 512)):
        cache.seek([start], 4)
        for layer in (0, 1):
            cache.update(states, states, layer)
        assert [buffer.shape[2] for buffer in cache.buffers()] == [wanted] * 4
        assert all(bool((buffer[:, :, start : start + 4] == 1).all()) for buffer in cache.buffers())


def test_memory_is_at_most_twice_that_of_the_largest_buffer() -> None:
    place, found, largest = traceable.Place(), defaultdict[int, set[int]](set), 0
    for slots in (128, 256, 128, 512, 256, 10, 400, 128, 500, 600, 512, 256, 600, 128):
        found[slots].add(place.buffer("keys", (2, slots, 3), torch.ones(1)).data_ptr())
        largest = max(largest, slots)
        assert sum(len(piece) for pieces in place._pieces.values() for piece in pieces) <= 2 * largest * 6
    # Those of 128 and 256 slots moved once, when memory for a larger one replaced theirs.
    assert all(len(addresses) <= 2 for addresses in found.values())


def test_each_graph_is_recorded_once(recorded: Recorded) -> None:
    model, spec = few_layers(), specs()["exit"]
    for length in (140, 9, 140):  # 256, 128 and 256 slots
        options: dict[str, Any] = {**ragged_batch((length,)), "max_new_tokens": 16, "do_sample": False}
        assert torch.equal(model.generate(**options, assistant=spec), model.generate(**options))
        gc.collect()
        keep = torch.ones(1000)  # what others allocate meanwhile
    assert len(recorded) > 4
    assert graphs_of(model, QUICK).count == len(recorded), "none was made again"
    assert {len(addresses) for addresses in recorded} == {1}
    del keep


@pytest.mark.usefixtures("no_warnings_yet")
def test_calls_at_the_same_time(recorded: Recorded) -> None:
    """Each graph is recorded once for each of them; one more call runs without graphs, and its memory is its own."""
    model, spec = few_layers(), specs()["exit"]
    same_ids(model, spec)
    options: dict[str, Any] = {**ragged_batch((9,)), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected, places = model.generate(**options), graphs_of(model, QUICK).places
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: torch.equal(model.generate(**options, assistant=spec), expected), range(2)))
    assert found == [True, True]
    assert max(len(addresses) for addresses in recorded) <= 2
    assert len(places) == graphs.PLACES
    places.clear()
    with pytest.warns(UserWarning, match="without graphs in some calls, .* since they serve 4 at a time"):
        same_ids(model, spec)


def test_an_error_leaves_the_memory_to_the_next_call(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = few_layers(), specs()["exit"]
    for _ in range(3):  # there is memory for two
        with monkeypatch.context() as patch:
            patch.setattr(type(model.model.norm), "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("stopped")))
            with pytest.raises(RuntimeError, match="stopped"):
                model.generate(**ragged_batch((9,)), max_new_tokens=9, assistant=spec)
    same_ids(model, spec)
    assert recorded


@pytest.mark.every_run("making")
@pytest.mark.usefixtures("no_warnings_yet")
@pytest.mark.parametrize("at", ["making", "running"])
def test_assertions_of_torchs_graph_trees(at: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go on without graphs."""
    left = [0 if at == "making" else 5]

    def compiled(graph: Any, **_: Any) -> Any:
        def run(*inputs: torch.Tensor) -> Any:
            left[0] -= 1
            assert left[0] >= 0, "the tree has no such node"
            return graph(*inputs)

        return run

    model, spec = few_layers(), specs()["exit"]
    graphs_of(model, QUICK)
    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.warns(UserWarning, match="runs some forwards without graphs, since .*the tree has no such node"):
        same_ids(model, spec, new=20)
    for _ in range(2):
        same_ids(model, spec, new=20)
    assert left[0] < 0
    if at == "making":  # none of them works
        assert left[0] == -graphs._FAILURES
        for place in graphs_of(model, QUICK).places:
            assert not place._pieces  # no memory is kept for nothing


def test_long_texts_attend_over_few_empty_slots() -> None:
    assert [traceable.step_above(slots) for slots in (1, 128, 129, 3000, 4097)] == [128, 128, 256, 4096, 8192]
    for slots in range(4096, 1 << 18, 777):
        assert slots <= traceable.step_above(slots) < slots + max(4096, slots / 8)
    assert len({traceable.step_above(slots) for slots in range(1, 1 << 17, 100)}) < 32


def test_no_more_room_is_wanted_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After there was no memory to have more for a look, what needs no more goes on."""
    cache, states = SpeculativeCache(2, 1, 256), torch.ones(1, 2, 4, 8)
    cache.seek([0], 4)
    for layer in range(2):
        cache.update(states, states, layer)

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Bank, "_allocate", exhausted)
    cache.seek([4], 400)
    with pytest.raises(torch.OutOfMemoryError):
        cache.update(torch.ones(1, 2, 400, 8), torch.ones(1, 2, 400, 8), 0)
    cache.stay()
    cache.seek([4], 4)
    keys, _ = cache.update(2 * states, states, 0)
    assert keys[0, 0, :, 0].tolist() == [1.0] * 4 + [2.0] * 4
