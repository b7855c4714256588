"""Which graphs there are, how many at a time, and what is told of them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from helpers.architectures import build
from helpers.captured import few_layers, same_ids, specs
from helpers.models import ROW, tiny_llama
from hf_selfspec import Lookup, SelfSpec
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.graphs import model_graphs
from hf_selfspec.model.graphs.graph_runner import GraphRunner
from hf_selfspec.model.graphs.model_graphs import POOLS, Graph, ModelGraphs, graphs_of
from hf_selfspec.model.graphs.shapes import BufferPool, size_for


class Known:
    """Graphs that double two numbers, one for each key."""

    def __init__(self) -> None:
        self.graphs, self.pool = ModelGraphs((), "Tiny"), BufferPool()
        self.graphs.pools = (self.pool,)

    def find(self, key: str) -> Graph | None:
        """The graph for a key that has come often enough."""
        for _ in range(model_graphs._USES):
            graph = self.graphs.find(key, self.pool, lambda values: [values * 2], [torch.ones(2)])
        return graph


@pytest.mark.machine("graphs_are_taken")
@pytest.mark.usefixtures("no_warnings_yet")
def test_what_is_made_by_default_is_information(caplog: pytest.LogCaptureFixture) -> None:
    """No warning, and each graph is told of once."""
    model, spec = few_layers(), specs()["exit"]
    with caplog.at_level(logging.INFO, "hf_selfspec"):
        for _ in range(3):
            same_ids(model, spec)
    told = [record for record in caplog.records if record.name.startswith("hf_selfspec")]
    assert {record.levelname for record in told} == {"INFO"}
    assert sum(": graph of a forward over (" in record.message for record in told) == graphs_of(model).count > 0


@pytest.mark.times_decide
@pytest.mark.machine("graphs_are_taken")
def test_rounds_without_the_graph_that_is_to_come_price_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they take seven times as long as those with it, and drafts would not seem to pay."""
    model, priced = few_layers(), list[int]()
    monkeypatch.setattr(CostCurve, "add_plain", lambda *_: priced.append(graphs_of(model).count))
    assert not priced
    model.generate(**ROW, max_new_tokens=24, eos_token_id=None, assistant=SelfSpec(Lookup()))
    assert priced
    assert all(priced)


def test_few_sizes_where_tokens_cost_next_to_nothing() -> None:
    """On a GPU a forward over a few tokens costs what one over one does, but for experts, which are read one by one."""
    models = [tiny_llama(), *map(build, ("mixtral", "gpt_oss"))]
    assert [graphs_of(model).cheap_tokens > 0 for model in models] == [True, False, False]
    assert [size_for(count) for count in (1, 2, 3, 9, 33)] == [1, 2, 4, 16, None]
    assert [size_for(count, cheap=8) for count in (1, 2, 9, 17)] == [1, 8, 16, 32]
    assert [size_for(count, cheap=64) for count in (1, 2, 9, 33)] == [1, 8, 32, None]


@pytest.mark.machine("graphs_are_taken")
def test_graphs_begin_anew_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_graphs, "_MOST", 2)
    known = Known()
    for count, key in enumerate(("one", "two", "three", "one"), start=1):
        assert known.find(key) is not None
        assert known.graphs.count == (count - 1) % 2 + 1


def test_weights_within_weights_are_looked_at() -> None:
    """Of a tensor that is packed, as by torchao, which has no memory of its own."""
    model = tiny_llama()
    weight: Any = TwoTensor(model.lm_head.weight.data, torch.ones_like(model.lm_head.weight))
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    first = graphs_of(model)
    assert graphs_of(model) is first
    weight = model.lm_head.weight
    weight.b = 2.0 * weight.b
    assert graphs_of(model) is not first


def test_as_many_calls_have_graphs_as_there_are_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told that it has none, and is as if there were none. Afterwards pools keep their memory as long as
    all of it is little."""
    known, device = ModelGraphs((), "Tiny"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 10, 1 << 10))  # of which pools keep 128 bytes
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    targets: list[Any] = [
        SimpleNamespace(model=SimpleNamespace(device=device), cache=SpeculativeCache(1, 1, 2000), graphs=known)
        for _ in range(POOLS + 1)
    ]
    with ExitStack() as stack:
        for target in targets[:-1]:
            stack.enter_context(GraphRunner(target, known, False).running())
            target.cache.pool.buffer("keys", (16,), torch.ones(1))
        assert len({target.cache.pool for target in targets[:-1]}) == POOLS
        with pytest.warns(UserWarning, match=f"without graphs in some calls, .* since they serve {POOLS} at a time"):
            stack.enter_context(GraphRunner(targets[-1], known, False).running())
        assert targets[-1].graphs is None
        for target in targets:
            target.cache.seek([2100], 1)
        assert [target.cache.capacity for target in targets] == [4096] * POOLS + [2560]
    assert [pool.bytes for pool in known.free] == [64, 64, 0, 0]
