"""Whether a compiled graph or the model's own code serves a forward, by time, and what is told of graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.compiled import QUICK, few_layers, same_ids, specs
from helpers.models import ROW, tiny_llama
from hf_selfspec import Lookup, SelfSpec
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.model.graphs import graphs
from hf_selfspec.model.graphs.graphs import PLACES, FasterWay, Graph, Graphs, graphs_of
from hf_selfspec.model.graphs.runner import GraphRunner
from hf_selfspec.model.graphs.shapes import size_for


class Ways:
    """Two ways whose times are known, and which of them ran."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.now, self.ran = 0.0, ""

    def ways(self) -> tuple[Callable[[], str], Callable[[], str]]:
        return lambda: self._run(0), lambda: self._run(1)

    def _run(self, which: int) -> str:
        self.now += self.seconds[which]
        self.ran += "ge"[which]
        return "ge"[which]


@pytest.mark.parametrize(("seconds", "then"), [((1.0, 2.0), "gg"), ((2.0, 1.0), "ee"), ((1.0, 1.0), "gg")])
def test_the_faster_way_stays(seconds: tuple[float, float], then: str) -> None:
    two = Ways(*seconds)
    graph = FasterWay(lambda: two.now)
    for _ in range(8):
        assert graph.faster_of(5, *two.ways()) == two.ran[-1]
    assert two.ran == "gegege" + then


def test_the_times_of_comparisons_decide() -> None:
    two = Ways(1.0, 2.0)
    graph = FasterWay(lambda: two.now)
    for _ in range(graphs.COMPARISONS):
        assert graph.results(5, *two.ways()) == ("g", "e")
    assert [graph.faster_of(5, *two.ways()) for _ in range(4)] == ["g", "e", "g", "g"]


def test_off_a_cpu_times_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is timed until the device has done its work, and nothing waits any more once one is chosen."""
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for device, waits in (("cpu", 0), ("cuda", 12)):
        graph = FasterWay(graphs.device_clock(torch.device(device)))
        for _ in range(20):
            graph.faster_of(5, lambda: "g", lambda: "e")
        assert len(waited) == waits


def test_no_more_graphs_are_made_where_they_are_slower(caplog: pytest.LogCaptureFixture) -> None:
    known, inputs = Graphs(QUICK, (), "Tiny"), [torch.ones(2)]

    def double(values: torch.Tensor) -> list[torch.Tensor]:
        return [values * 2]

    def made(key: str) -> Graph | None:
        return [known.find(key, double, inputs, lambda: key) for _ in range(graphs._USES)][-1]

    def choose(graph: Graph | None, *seconds: float) -> None:
        two = Ways(*seconds)
        assert graph is not None
        graph.clock = lambda: two.now
        for _ in range(6):
            graph.faster_of(1, *two.ways())

    choose(made("one"), 2.0, 1.0)
    choose(made("two"), 1.0, 2.0)
    choose(made("three"), 2.0, 1.0)
    assert made("four") is not None  # one of them is faster
    assert not known.slower
    known = Graphs(QUICK, (), "Tiny")
    choose(made("one"), 2.0, 1.0)
    choose(made("two"), 3.0, 1.0)
    assert made("three") is None
    assert known.find("one", double, inputs, lambda: "one") is not None  # it is there, and chooses by itself
    assert "two: 3 s to 1 s" in known.slower
    assert "no more graphs are made" in caplog.text


def test_who_waits_for_graphs_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    model, spec = few_layers(), specs()["exit"]
    for _ in range(3):
        same_ids(model, spec)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert sum("making compiled graphs" in message for message in told) == 1
    made = [int(message.split()[1]) for message in told if " made in " in message]
    assert made  # and not in calls that made none
    assert sum(made) == graphs_of(model, QUICK).count


@pytest.mark.parametrize("graph_wins", [True, False])
def test_a_choice_that_was_made_under_load_is_mended(graph_wins: bool) -> None:
    """Each way is timed once more at the 128th use, the 256th, ..., and the shortest times decide."""
    two = Ways(*((3.0, 2.0) if graph_wins else (2.0, 3.0)))
    graph = FasterWay(lambda: two.now)
    for _ in range(100):
        graph.faster_of(5, *two.ways())
    assert graph.is_faster == {5: not graph_wins}
    two.seconds = (1.0, 2.0) if graph_wins else (2.0, 1.0)
    for _ in range(500):
        graph.faster_of(5, *two.ways())
    assert graph.is_faster == {5: graph_wins}
    rare = "ge"[graph_wins]
    assert two.ran[130:].count(rare) == 2  # at 256 and 512


def test_graphs_that_were_slower_are_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """By one forward in sixteen, until one of them is faster; then further ones are made, too."""
    known, graph = Graphs(QUICK, (), "Tiny"), Graph(lambda: 0.0, run=lambda *_: [], name="two numbers")
    known._graphs["one"] = graph
    graph.is_faster, graph.seconds = {1: False, 2: False}, {1: ([2.0], [1.0]), 2: ([2.0], [1.0])}
    assert not known.are_left_out()
    known.report()
    assert known.slower
    assert [known.are_left_out() for _ in range(34)].count(False) == 2
    graph.is_faster[2] = True
    known.report()
    assert not known.slower
    assert not any(known.are_left_out() for _ in range(33))
    assert caplog.text.count("no more graphs are made") == 1


@pytest.mark.times_decide
def test_rounds_without_the_graph_that_is_to_come_price_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they take seven times as long as those with it, and drafts would not seem to pay."""
    model, priced = few_layers(), list[int]()
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    monkeypatch.setattr(CostCurve, "add_plain", lambda *_: priced.append(graphs_of(model, QUICK).count))
    assert not priced
    model.generate(**ROW, max_new_tokens=24, eos_token_id=None, assistant=SelfSpec(Lookup(), compile=QUICK))
    assert priced
    assert all(priced)


def test_few_sizes_where_tokens_cost_next_to_nothing() -> None:
    assert [size_for(count) for count in (1, 2, 3, 9, 33)] == [1, 2, 4, 16, None]
    assert [size_for(count, cheap=8) for count in (1, 2, 9, 17)] == [1, 8, 16, 32]
    assert [size_for(count, cheap=64) for count in (1, 2, 9, 33)] == [1, 8, 32, None]


def test_sizes_are_filled_where_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a forward over a few tokens costs what one over one does, but for experts, which are read one by one."""
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda _: torch.device("cuda", 0)))
    models = [tiny_llama(), *map(build, ("mixtral", "dbrx", "deepseek_v3", "gpt_oss"))]
    assert [graphs_of(model, None).cheap_tokens > 0 for model in models] == [True] + 4 * [False]
    assert [graphs_of(model, QUICK).cheap_tokens for model in models[1:]] == [0] * 4


def test_captures_that_are_not_used_any_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that took long to compile stays."""
    monkeypatch.setattr(graphs, "_MOST", 2)
    monkeypatch.setattr(graphs, "_UNUSED", 8)
    for config in (None, QUICK):
        known, inputs = Graphs(config, (), "Tiny"), [torch.ones(2)]

        def found(key: str, known: Graphs = known, inputs: list[torch.Tensor] = inputs) -> list[bool]:
            uses = graphs._USES if known.config else graphs._USES_CAPTURED
            return [known.find(key, lambda value: [value * 2], inputs, lambda: key) is not None for _ in range(uses)]

        assert any(found("one"))
        assert any(found("two"))
        assert not any(found("three"))
        assert not known.are_awaited("three")  # there is no room
        known.find("four", lambda value: [value * 2], inputs, str)
        assert known.are_awaited("four")
        for _ in range(3):
            found("two")
        assert any(found("three")) is (config is None)
        assert known.find("two", lambda value: [value * 2], inputs, str) is not None


def test_weights_within_weights_are_looked_at() -> None:
    """Of a tensor that is packed, as by torchao, which has no memory of its own."""
    model = tiny_llama()
    weight: Any = TwoTensor(model.lm_head.weight.data, torch.ones_like(model.lm_head.weight))
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    first = graphs_of(model, None)
    assert graphs_of(model, None) is first
    weight = model.lm_head.weight
    weight.b = 2.0 * weight.b
    assert graphs_of(model, None) is not first


def test_as_many_calls_have_graphs_as_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told that it has none. Afterwards places keep their memory as long as all of it is little."""
    known, device = Graphs(None, (), "Tiny"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 10, 1 << 10))  # of which places keep 128 bytes
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    targets: list[Any] = [
        SimpleNamespace(model=SimpleNamespace(device=device), cache=SimpleNamespace(place=None), graphs=known)
        for _ in range(PLACES + 1)
    ]
    with ExitStack() as stack:
        for target in targets[:-1]:
            stack.enter_context(GraphRunner(target, known, False).running())
            target.cache.place.buffer("keys", (16,), torch.ones(1))
        assert len({target.cache.place for target in targets[:-1]}) == PLACES
        with pytest.warns(UserWarning, match=f"without graphs in some calls, .* since they serve {PLACES} at a time"):
            stack.enter_context(GraphRunner(targets[-1], known, False).running())
        assert targets[-1].graphs is None
    assert [place.bytes for place in known.places] == [64, 64, 0, 0]
