"""The memory of keys and values: graphs find it where they were recorded, whatever other calls need."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers.captured import Traced, few_layers, same_ids, specs
from helpers.machine import Machine
from helpers.models import ragged_batch
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.graphs import model_graphs, shapes
from hf_selfspec.model.graphs.model_graphs import graphs_of

Recorded = dict[Traced, set[tuple[int, ...]]]


@pytest.fixture
def recorded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """For each graph the addresses of keys and values in calls of it."""
    machine.graphs_are_taken()
    found: defaultdict[Traced, set[tuple[int, ...]]] = defaultdict(set)
    of_thread, addresses, run = threading.local(), SpeculativeCache.addresses, Traced.__call__

    def noted(cache: SpeculativeCache) -> tuple[int, ...]:
        of_thread.addresses = addresses(cache)
        return of_thread.addresses

    def called(graph: Traced, *inputs: torch.Tensor) -> Any:
        found[graph].add(of_thread.addresses)
        return run(graph, *inputs)

    monkeypatch.setattr(SpeculativeCache, "addresses", noted)
    monkeypatch.setattr(Traced, "__call__", called)
    return found


def test_memory_is_at_most_twice_that_of_the_largest_buffer() -> None:
    pool, found, largest = shapes.BufferPool(), defaultdict[int, set[int]](set), 0
    for slots in (128, 256, 128, 512, 256, 10, 400, 128, 500, 600, 512, 256, 600, 128):
        found[slots].add(pool.buffer("keys", (2, slots, 3), torch.ones(1)).data_ptr())
        largest = max(largest, slots)
        assert sum(len(piece) for pieces in pool._pieces.values() for piece in pieces) <= 2 * largest * 6
    # Those of 128 and 256 slots moved once, when memory for a larger one replaced theirs.
    assert all(len(addresses) <= 2 for addresses in found.values())


def test_each_graph_is_recorded_once(recorded: Recorded) -> None:
    model, spec = few_layers(), specs()["exit"]
    for length in (140, 9, 140):  # 256, 128 and 256 slots
        options: dict[str, Any] = {**ragged_batch((length,)), "max_new_tokens": 16, "do_sample": False}
        assert torch.equal(model.generate(**options, assistant=spec), model.generate(**options))
        gc.collect()
        keep = torch.ones(1000)  # what others allocate meanwhile
    assert len(recorded) > 2
    assert graphs_of(model).count == len(Traced.made), "none was made again"
    assert {len(addresses) for addresses in recorded.values()} == {1}
    del keep


def test_calls_at_the_same_time(recorded: Recorded) -> None:
    """Each graph is recorded once for each of them."""
    model, spec = few_layers(), specs()["exit"]
    same_ids(model, spec)
    options: dict[str, Any] = {**ragged_batch((9,)), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected, free = model.generate(**options), graphs_of(model).free
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: torch.equal(model.generate(**options, assistant=spec), expected), range(2)))
    assert found == [True, True]
    assert {len(addresses) for addresses in recorded.values()} == {1}
    assert len(free) == model_graphs.POOLS


def test_an_error_leaves_the_memory_to_the_next_call(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = few_layers(), specs()["exit"]
    for _ in range(3):  # there is memory for two
        with monkeypatch.context() as patch:
            patch.setattr(type(model.model.norm), "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("stopped")))
            with pytest.raises(RuntimeError, match="stopped"):
                model.generate(**ragged_batch((9,)), max_new_tokens=9, assistant=spec)
    same_ids(model, spec)
    assert recorded


def test_long_texts_attend_over_few_empty_slots() -> None:
    assert [shapes.step_above(slots) for slots in (1, 128, 129, 3000, 4097)] == [128, 128, 256, 4096, 8192]
    for slots in range(4096, 1 << 18, 777):
        assert slots <= shapes.step_above(slots) < slots + max(4096, slots / 8)
    assert len({shapes.step_above(slots) for slots in range(1, 1 << 17, 100)}) < 32


def test_no_more_room_is_wanted_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """After there was no memory to have more for a look, what needs no more goes on."""
    cache, states = SpeculativeCache(2, 1, 256), torch.ones(1, 2, 4, 8)
    cache.seek([0], 4)
    for layer in range(2):
        cache.update(states, states, layer)

    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.Tensor, "new_empty", exhausted)
    cache.seek([4], 400)
    with pytest.raises(torch.OutOfMemoryError):
        cache.update(torch.ones(1, 2, 400, 8), torch.ones(1, 2, 400, 8), 0)
    cache.stay()
    cache.seek([4], 4)
    keys, _ = cache.update(2 * states, states, 0)
    assert keys[0, 0, :, 0].tolist() == [1.0] * 4 + [2.0] * 4
