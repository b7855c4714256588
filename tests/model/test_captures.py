"""Captured forwards: the ids of plain generate, one graph for each shape, eager forwards where there is none, and which
graphs there are at a time."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from peft import IA3Config, get_peft_model
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.two_tensor import TwoTensor
from transformers import CompileConfig
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm

from helpers.architectures import ARCHITECTURES, STATEFUL, build
from helpers.calls import check_lossless, random_skip_set
from helpers.captured import THREE, Traced, attention_with_sums, few_layers, same_ids, specs
from helpers.machine import Machine
from helpers.models import BATCH, ROW, ragged_batch, tiny_llama
from helpers.processes import peft_calls_old_name
from helpers.searches import an_end
from hf_selfspec import EarlyExit, Lookup, OnTheFlySearch, SelfSpec, SkipLayers
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.model.attention import interface as attention
from hf_selfspec.model.attention.split import attention_in_parts
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.graphs.captures import BufferPool, size_for, step_above
from hf_selfspec.model.graphs.graph_runner import GraphRunner
from hf_selfspec.model.graphs.model_graphs import POOLS, ModelGraphs, graphs_of

pytestmark = [pytest.mark.machine("graphs_are_taken"), pytest.mark.usefixtures("no_warnings_yet")]

# Types that run as they are: they build masks of their own, count tokens or choose experts on the host.
EAGER = ("biogpt", "bloom", "dbrx", "falcon-alibi", "gpt_neo", "mpt", "opt", "opt-350m", "xglm")
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4")  # and these write keys of their own


@pytest.mark.every_run("gpt_oss")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in STATEFUL])
def test_forwards_of_any_type_are_exact(name: str) -> None:
    model = build(name)
    exits, skips = SelfSpec(EarlyExit(2), THREE), random_skip_set(name, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what some models cannot do is said once
        for spec, prompt in ((exits, BATCH), (SelfSpec(skips, THREE), ROW)):
            check_lossless(model, spec, 16, [prompt])
    assert bool(Traced.made) == (name not in EAGER + INDEXED), graphs_of(model).refused


def test_a_hook_that_is_there_for_some_tokens() -> None:
    model, handles = few_layers(), list[Any]()

    def change(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 17:
            handles.append(model.model.layers[0].register_forward_hook(lambda layer, args, states: states.flip(-1)))
        elif ids.shape[1] == 23:
            handles.pop().remove()
        return scores

    same_ids(model, specs()["exit"], new=24, logits_processor=[change])
    assert Traced.made


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, {1: 1, 2: 8, 9: 32}), (4, {2: 8, 9: 32}), (8, {2: 8, 9: 16, 17: 32}), (16, {3: 8, 9: 16}), (32, {2: 4, 5: 8})],
)
def test_tokens_are_padded_only_as_far_as_that_costs_nothing(rows: int, sizes: dict[int, int]) -> None:
    """Where 128 tokens of all rows cost as much as one."""
    assert {count: size_for(count, 128 // rows) for count in sizes} == sizes


@pytest.mark.every_run("exit")
@pytest.mark.parametrize("kind", specs())
def test_captured_forwards_are_exact(kind: str) -> None:
    """Nothing is captured a second time as texts grow, and each shape has one graph."""
    model, spec = few_layers(3 if kind == "skips" else 2), specs()[kind]
    for rows in (1, 3) * 2:  # what came once, at the end of a text, comes again
        same_ids(model, spec, rows, new=28)
    known = graphs_of(model)
    assert not known.refused
    made = known.count
    assert len(Traced.made) == made > 1
    for rows in (1, 3):
        same_ids(model, spec, rows, new=28)
    assert len(Traced.made) == known.count == made
    same_ids(model, spec, new=28, repetition_penalty=1.2)  # what a graph chooses is not what is chosen


def test_a_log_of_another_size_has_another_graph() -> None:
    """A search looks back, so that logs of states are longer; in later calls shorter ones are in the same memory."""
    model, skips = build("falcon_h1"), SkipLayers([1], [2])
    for search in (OnTheFlySearch(50, budget=1e-9), None):
        same_ids(model, SelfSpec(replace(skips, search=search), THREE), new=40, is_mixed=False)
    assert Traced.made


def test_static_cache_of_a_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever it says of compiling: its forwards are those of other calls."""
    monkeypatch.setattr(torch, "compile", Mock(side_effect=AssertionError("nothing is compiled")))
    model, config = few_layers(), CompileConfig(mode="default")
    config._compile_all_devices = True
    for static in ({"cache_implementation": "static"}, {"cache_implementation": "static", "compile_config": config}):
        same_ids(model, specs()["exit"], new=24, plain={}, **static)
    assert Traced.made


def test_no_graphs_where_none_are_wanted() -> None:
    model = few_layers()
    same_ids(model, replace(specs()["exit"], graphs=False), new=24)
    assert not Traced.made
    same_ids(model, specs()["exit"], new=24)
    assert Traced.made


def reading(norm: Any) -> Callable[..., Any]:
    return lambda self, states: norm(self, states) if states.sum().item() < 1e9 else -states


def losing(mask: Any) -> Callable[..., Any]:
    """A capture whose attention does not see one slot."""

    def masked(*args: Any, **kwargs: Any) -> Any:
        found = mask(*args, **kwargs)
        is_traced = isinstance(found, FakeTensor)
        return found & (torch.arange(found.shape[-1]) != 3) if is_traced else found

    return masked


def counting(decoder: Any) -> Callable[..., Any]:
    """Scales logits by a number that changes from forward to forward, which a graph holds as it was."""
    calls = itertools.count(1)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = decoder(*args, **kwargs)
        output.last_hidden_state *= next(calls)
        return output

    return scaled


# What goes wrong with captures: where, and how.
FAILURES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "making": (Traced, "__init__", lambda _: Mock(side_effect=RuntimeError("the device has no such node"))),
    "running": (Traced, "__call__", lambda _: Mock(side_effect=RuntimeError("the device has no such node"))),
    "value": (LlamaRMSNorm, "forward", reading),
    "lost key": (attention.MaskSpec, "mask", losing),
    "number": (LlamaModel, "forward", counting),
}


@pytest.mark.every_run("value|lost key")
@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_in_captures_ends_no_call(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code serves, and a warning is given once."""
    model, spec, (owner, name, how) = few_layers(), specs()["exit"], FAILURES[failure]
    monkeypatch.setattr(owner, name, how(getattr(owner, name)))
    with pytest.warns(UserWarning, match="LlamaForCausalLM runs some forwards without graphs, since torch could not"):
        same_ids(model, spec, new=24)
    assert not graphs_of(model).count


def test_hooks_run() -> None:
    """Those of a user; transformers leaves some of its own, which wait for other calls."""
    model, spec, strength = few_layers(), specs()["exit"], [1.0]
    model(**ragged_batch((9,)), output_hidden_states=True)
    for _ in range(2):
        same_ids(model, spec)
    made = len(Traced.made)
    assert made
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output * strength[0])
    with pytest.warns(UserWarning, match="without graphs on a GPU, .* since its modules have hooks"):
        same_ids(model, spec)
    strength[0] = -1.0
    same_ids(model, spec, is_mixed=False)
    handle.remove()
    same_ids(model, spec)
    assert len(Traced.made) == made


@peft_calls_old_name
def test_adapters_can_be_switched_off() -> None:
    targets = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    adapter, spec = IA3Config(task_type="CAUSAL_LM", **targets), specs()["exit"]
    model = get_peft_model(few_layers(), adapter).eval()
    for name, values in model.named_parameters():
        if "ia3" in name:
            values.data = -torch.ones_like(values)
    made = list[int]()
    for _ in range(2):
        same_ids(model, spec, is_mixed=False)
        with model.disable_adapter():
            same_ids(model, spec)
        made.append(len(Traced.made))
    assert 0 < made[0] == made[1]


# What is around a model, and why it then has no graphs.
AROUND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compiled": (lambda model: model.model.layers[1].compile(backend="eager"), ""),
    "one device": (lambda model: add_hook_to_module(model.model.layers[1], AlignDevicesHook("cpu")), ""),
    "quantized": (lambda model: setattr(model, "hf_quantizer", SimpleNamespace(is_compileable=True)), ""),
    "other kernels": (
        lambda model: setattr(model, "hf_quantizer", SimpleNamespace(is_compileable=False)),
        "does not say that it can be compiled",
    ),
    "other hook": (lambda model: add_hook_to_module(model.model.layers[1], ModelHook()), "its modules have hooks"),
    "spread": (lambda model: setattr(model, "hf_device_map", {"model": 0, "lm_head": 1}), "over several devices"),
}


@pytest.mark.parametrize("case", AROUND)
@torch._dynamo.config.patch(error_on_nested_fx_trace=False)  # of `Traced`, which is no capture
def test_what_is_around_a_model(case: str) -> None:
    model, spec, (change, why) = few_layers(), specs()["exit"], AROUND[case]
    change(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            same_ids(model, spec)
    messages = [str(warning.message) for warning in told]
    assert [why in message for message in messages if "without graphs" in message] == [True] * bool(why), messages
    assert bool(Traced.made) == (not why)


# What changes a norm, of whose modules graphs hold the values.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights": lambda norm: setattr(norm, "weight", torch.nn.Parameter(-norm.weight.detach())),
    "number": lambda norm: setattr(norm, "sign", -1.0),
    "tensor": lambda norm: setattr(norm, "factor", -torch.ones(1)),
    "entry": lambda norm: setattr(norm, "options", {"factor": -1.0}),
    "mode": lambda norm: norm.train(),
    "forward": lambda norm: setattr(norm, "forward", lambda states: -type(norm).forward(norm, states)),
}


@pytest.mark.every_run("weights")
@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_other_graphs(change: str) -> None:
    model, spec = few_layers(), specs()["exit"]
    norm: Any = model.model.norm
    usual, norm.sign, norm.factor, norm.options = norm.forward, 1.0, torch.ones(1), {"factor": 1.0}
    norm.forward = lambda states: usual(states) * norm.sign * norm.factor * norm.options["factor"]
    same_ids(model, spec)
    assert Traced.made
    first = graphs_of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # the same tensor
    assert graphs_of(model) is first
    CHANGES[change](norm)
    same_ids(model, spec, is_mixed=False)
    assert graphs_of(model) is not first


def test_a_batch_that_ends_unevenly() -> None:
    """And hands its cache back, which takes a forward for the last tokens of rows that ended early."""
    model, inputs, spec = few_layers(), ragged_batch((9, 5, 7)), specs()["exit"]
    end, _ = an_end(model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)[:, 9:])
    for _ in range(3):
        same_ids(model, spec, 3, new=24, is_mixed=False, eos_token_id=end, return_dict_in_generate=True)
    assert Traced.made


def test_a_capture_that_was_interrupted_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, pool, inputs = ModelGraphs((), "Tiny"), BufferPool(), [torch.ones(2)]

    def made() -> Any:
        graph = known.find("one", pool, inputs[0].device)
        assert graph is not None
        if graph.run is None:
            known.make(graph, lambda values: [values * 2], inputs)
        return graph

    with monkeypatch.context() as patch:
        patch.setattr(Traced, "__init__", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made()
    graph = made()
    assert graph.run(*inputs)[0].tolist() == [2.0, 2.0]
    assert made() is graph


def test_what_graphs_hold() -> None:
    """One additive mask, not one in each layer; and they go with their model."""
    model = few_layers(3)
    same_ids(model, specs()["exit"])
    assert {sum("masked_fill" in str(node.target) for node in made.graph.graph.nodes) for made in Traced.made} == {1}
    gone = weakref.ref(model), weakref.ref(graphs_of(model).pools.all[0])
    Traced.made.clear()
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.every_run("tree-.*")
@pytest.mark.parametrize(("name", "rows"), [("exit", 1), ("tree", 3)])
def test_split_forwards_are_exact(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs, which attend to all slots that there are."""
    in_parts = Mock(side_effect=partial(attention_in_parts, kernel=attention_with_sums))
    monkeypatch.setattr(attention, "parts_for", lambda query, key: 4)
    monkeypatch.setattr(attention, "attention_in_parts", in_parts)
    same_ids(few_layers(), specs()[name], rows, new=16)
    assert Traced.made
    assert in_parts.called


@pytest.mark.times_decide
def test_rounds_without_the_graph_that_is_to_come_price_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they take seven times as long as those with it, and drafts would not seem to pay."""
    model, priced = few_layers(), list[int]()
    monkeypatch.setattr(CostCurve, "add_plain", lambda *_: priced.append(graphs_of(model).count))
    assert not priced
    model.generate(**ROW, max_new_tokens=24, eos_token_id=None, assistant=SelfSpec(Lookup()))
    assert priced
    assert all(priced)


def test_the_graph_that_was_not_used_for_longest_goes_when_there_are_too_many(machine: Machine) -> None:
    machine.graphs_are_few(2)
    known, inputs = ModelGraphs((), "Tiny"), [torch.ones(2)]
    new = list[str]()
    for key in "abacabc":
        graph = known.find(key, known.pools.all[0], inputs[0].device)
        assert graph is not None
        if graph.run is None:
            new.append(key)
            known.make(graph, lambda values: [values * 2], inputs)
    assert "".join(new) == "abcbc"
    assert known.count == 2


def test_graphs_of_four_settings_are_kept() -> None:
    """As of adapters between which calls switch; all have the same memory for keys and values."""
    model, spec = few_layers(), specs()["exit"]
    norm: Any = model.model.norm
    made = list[int]()
    for norm.setting in (1, 2, 3, 4, 1, 4, 5, 2):
        same_ids(model, spec)
        made.append(len(Traced.made))
    first = made[0]
    assert [after - before for before, after in itertools.pairwise(made)] == [first] * 3 + [0, 0, first, first]
    assert sum(pool.bytes > 0 for pool in graphs_of(model).pools.all) == 1


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
    all of it is little, or much is free."""
    known, device, free = ModelGraphs((), "Tiny"), torch.device("cuda", 0), [1 << 7]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 10))  # of which pools keep 128 bytes
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
        with pytest.warns(UserWarning, match=f"some calls without graphs, .* since at most {POOLS} calls"):
            stack.enter_context(GraphRunner(targets[-1], known, False).running())
        assert targets[-1].graphs is None
        for target in targets:
            target.cache.seek([2100], 1)
        assert [target.cache.capacity for target in targets] == [4096] * POOLS + [2560]
    assert [pool.bytes for pool in known.pools.free] == [64, 64, 0, 0]
    free[0] = 1 << 9
    with GraphRunner(targets[0], known, False).running():
        targets[0].cache.pool.buffer("keys", (100,), torch.ones(1))
    assert [pool.bytes for pool in known.pools.free] == [64, 64, 0, 400]


def test_an_error_leaves_the_memory_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = few_layers(), specs()["exit"]
    for _ in range(3):  # there is memory for two
        with monkeypatch.context() as patch:
            patch.setattr(type(model.model.norm), "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("stopped")))
            with pytest.raises(RuntimeError, match="stopped"):
                model.generate(**ragged_batch((9,)), max_new_tokens=9, assistant=spec)
    same_ids(model, spec)
    assert Traced.made


def test_memory_is_at_most_twice_that_of_the_largest_buffer() -> None:
    pool, found, largest = BufferPool(), defaultdict[int, set[int]](set), 0
    for slots in (128, 256, 128, 512, 256, 10, 400, 128, 500, 600, 512, 256, 600, 128):
        found[slots].add(pool.buffer("keys", (2, slots, 3), torch.ones(1)).data_ptr())
        largest = max(largest, slots)
        assert pool.bytes <= 2 * largest * 6 * 4
    # Those of 128 and 256 slots moved once, when memory for a larger one replaced theirs.
    assert all(len(addresses) <= 2 for addresses in found.values())


def test_long_texts_attend_over_few_empty_slots() -> None:
    assert [step_above(slots) for slots in (1, 128, 129, 3000, 4097)] == [128, 128, 256, 4096, 8192]
    for slots in range(4096, 1 << 18, 777):
        assert slots <= step_above(slots) < slots + max(4096, slots / 8)
    assert len({step_above(slots) for slots in range(1, 1 << 17, 100)}) < 32
