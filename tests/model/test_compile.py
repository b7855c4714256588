"""Compiled forwards: the ids of plain generate, one graph for each shape, and eager forwards where there is none."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import IA3Config, get_peft_model
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaForCausalLM

from helpers.architectures import ARCHITECTURES, STATEFUL, build
from helpers.calls import check_lossless, random_skip_set
from helpers.compiled import QUICK, THREE, few_layers, same_ids, specs
from helpers.models import BATCH, ROW, ragged_batch
from helpers.processes import peft_calls_old_name
from helpers.searches import an_end
from helpers.split import attention_with_sums
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SettingError
from hf_selfspec.generate import decoder
from hf_selfspec.model.attention import interface as attention
from hf_selfspec.model.attention.split import attention_in_parts
from hf_selfspec.model.graphs import graphs, runner
from hf_selfspec.model.graphs.graphs import Graphs, graphs_of
from hf_selfspec.model.graphs.shapes import tracing

pytestmark = [pytest.mark.machine("graphs_are_taken"), pytest.mark.usefixtures("no_warnings_yet")]

# Types that run as they are: they build masks of their own, count tokens or choose experts on the host.
EAGER = ("biogpt", "bloom", "dbrx", "falcon-alibi", "gpt_neo", "mpt", "opt", "opt-350m", "xglm")
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4")  # and these write keys of their own


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Graphs run as they were traced, without a compiler."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.nn.Module, **_: Any) -> torch.nn.Module:
        if isinstance(graph, torch.fx.GraphModule):
            found.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", keep)
    return found


@pytest.mark.every_run("gpt_oss")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in STATEFUL])
def test_traced_forwards_are_exact(name: str, traced: list[torch.fx.GraphModule]) -> None:
    model = build(name)
    exits, skips = SelfSpec(EarlyExit(2), THREE, compile=QUICK), random_skip_set(name, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what some models cannot do is said once
        for spec, prompt in ((exits, BATCH), (SelfSpec(skips, THREE, compile=QUICK), ROW)):
            check_lossless(model, spec, 16, [prompt])
    assert bool(traced) == (name not in EAGER + INDEXED), graphs_of(model, QUICK).refused


def test_a_hook_that_is_there_for_some_tokens(traced: list[torch.fx.GraphModule]) -> None:
    found = []
    for assistant in (None, specs()["exit"]):
        layer = (model := few_layers()).model.layers[0]

        def change(ids: torch.Tensor, scores: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            if ids.shape[1] == 20:
                layer.register_forward_hook(lambda layer, args, states: states.flip(-1))
            elif ids.shape[1] == 26:
                layer._forward_hooks.clear()
            return scores

        options = {"max_new_tokens": 24, "do_sample": False, "logits_processor": [change]}
        found.append(model.generate(**ROW, **options, assistant=assistant).tolist())
    assert found[0] == found[1]
    assert traced


@pytest.mark.every_run("exit-batch")
@pytest.mark.parametrize("sizes", [(3,), (1, 3)], ids=["batch", "both"])
@pytest.mark.parametrize("kind", specs())
def test_compiled_forwards_are_exact(kind: str, sizes: tuple[int, ...]) -> None:
    """No graph breaks, nothing is compiled a second time as texts grow, and each shape has one graph."""
    model = few_layers(3 if kind == "skips" else 2)
    spec = specs()[kind]
    counters.clear()
    for rows in sizes * 2:  # what came once, at the end of a text, comes again
        same_ids(model, spec, rows, new=28)
    known = graphs_of(model, QUICK)
    assert not known.refused
    assert not counters["graph_break"]
    made = known.count
    assert counters["stats"]["unique_graphs"] == made > 1
    for rows in sizes:
        same_ids(model, spec, rows, new=28)
    assert counters["stats"]["unique_graphs"] == known.count == made


@pytest.mark.slow
def test_inductor() -> None:
    same_ids(few_layers(), SelfSpec(EarlyExit(1), FixedLength(1), compile=True), new=24)


@pytest.mark.usefixtures("traced")
def test_graphs_find_what_the_full_model_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off a CPU, where a host would wait for them; not where processors change the scores."""
    monkeypatch.setattr(decoder, "SLOW_CHOICES", ())
    model, spec = few_layers(), specs()["rule"]
    for _ in range(2):
        same_ids(model, spec, 3)
    same_ids(model, spec, new=12, repetition_penalty=1.2)


def test_static_cache_of_a_call_is_served(traced: list[torch.fx.GraphModule]) -> None:
    """As in transformers, a CPU compiles only where it is told to."""
    model, spec = few_layers(), SelfSpec(EarlyExit(1), THREE)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    ids = ragged_batch((9,))["input_ids"]
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static", assistant=spec), expected)
    assert not traced
    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    options |= {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(model.generate(ids, **options, assistant=spec), expected)
    assert traced


def test_settings() -> None:
    assert {SelfSpec(EarlyExit(1), compile=CompileConfig()): 1}  # a key


@pytest.mark.parametrize("wrong", [CompileConfig(backend="none-such"), CompileConfig(options={"max_autotune": False})])
def test_options_that_torch_does_not_know(wrong: CompileConfig) -> None:
    with pytest.raises(SettingError, match=r"torch\.compile does not take CompileConfig"):
        same_ids(few_layers(), SelfSpec(EarlyExit(1), THREE, compile=wrong))


def test_recurrent_models_run_as_they_are(traced: list[torch.fx.GraphModule]) -> None:
    with pytest.warns(UserWarning, match="without compiled graphs here, since it has recurrent states"):
        same_ids(build("qwen3_next"), specs()["exit"])
    assert not traced


def test_forwards_reading_values_are_eager(traced: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    model = few_layers()
    original = type(model.model.norm).forward

    def reading(self: Any, states: torch.Tensor) -> torch.Tensor:
        found = original(self, states)
        return found if states.sum().item() < 1e9 else -found

    monkeypatch.setattr(type(model.model.norm), "forward", reading)
    with pytest.warns(UserWarning, match="LlamaForCausalLM runs some forwards without graphs, since torch could not"):
        same_ids(model, specs()["exit"])
    assert not traced


def test_too_little_memory_ends_no_call(traced: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(graph: torch.fx.GraphModule, **_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    model = few_layers()
    graphs_of(model, QUICK)
    monkeypatch.setattr(torch, "compile", exhausted)
    with pytest.warns(UserWarning, match="runs some forwards without graphs, since .*no memory"):
        same_ids(model, specs()["exit"])


def test_hooks_run(traced: list[torch.fx.GraphModule]) -> None:
    """Those of a user; transformers leaves some of its own, which wait for other calls."""
    model, spec, strength = few_layers(), specs()["exit"], [1.0]
    model(**ragged_batch((9,)), output_hidden_states=True)
    for _ in range(2):
        same_ids(model, spec)
    made = len(traced)
    assert made
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output * strength[0])
    with pytest.warns(UserWarning, match="since its modules have hooks"):
        same_ids(model, spec)
    strength[0] = -1.0
    same_ids(model, spec, is_mixed=False)
    handle.remove()
    same_ids(model, spec)
    assert len(traced) == made


@peft_calls_old_name
def test_adapters_can_be_switched_off(traced: list[torch.fx.GraphModule]) -> None:
    targets = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    adapter, spec = IA3Config(task_type="CAUSAL_LM", **targets), specs()["exit"]
    model = get_peft_model(few_layers(), adapter).eval()
    for name, values in model.named_parameters():
        if "ia3" in name:
            values.data = -torch.ones_like(values)
    with pytest.warns(UserWarning, match="since its adapters can be switched"):
        same_ids(model, spec, is_mixed=False)
    with model.disable_adapter():
        same_ids(model, spec)
    assert not traced


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
def test_another_model_has_other_graphs(change: str, traced: list[torch.fx.GraphModule]) -> None:
    model, spec = few_layers(), specs()["exit"]
    norm: Any = model.model.norm
    usual, norm.sign, norm.factor, norm.options = norm.forward, 1.0, torch.ones(1), {"factor": 1.0}
    norm.forward = lambda states: usual(states) * norm.sign * norm.factor * norm.options["factor"]
    same_ids(model, spec)
    assert traced
    first = graphs_of(model, QUICK)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # the same tensor
    assert graphs_of(model, QUICK) is first
    CHANGES[change](norm)
    same_ids(model, spec, is_mixed=False)
    assert graphs_of(model, QUICK) is not first


@pytest.mark.usefixtures("traced")
def test_inference_mode_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call leaves buffers, as for CUDA graphs, that the next one writes."""
    monkeypatch.setattr(runner, "_needs_addresses", lambda device: True)
    model, spec = few_layers(), specs()["exit"]
    with torch.inference_mode():
        same_ids(model, spec)
    same_ids(model, spec)
    with torch.inference_mode():
        same_ids(model, spec)


def test_a_batch_that_ends_unevenly(traced: list[torch.fx.GraphModule]) -> None:
    """And hands its cache back, which takes a forward for the last tokens of rows that ended early."""
    model, inputs, spec = few_layers(), ragged_batch((9, 5)), specs()["exit"]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    end, _ = an_end(model.generate(**inputs, **options)[:, 9:])
    options |= {"eos_token_id": end, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options).sequences
    for _ in range(3):
        assert torch.equal(model.generate(**inputs, **options, assistant=spec).sequences, expected)
    assert traced


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_precision_by_its_newer_name(traced: list[torch.fx.GraphModule]) -> None:
    """Torch does not tell the older one any more then; another precision is another graph."""
    model, spec, flags = few_layers(), specs()["exit"], torch.backends.mkldnn.matmul
    same_ids(model, spec)
    made, before = len(traced), flags.fp32_precision
    flags.fp32_precision = "tf32"
    try:
        same_ids(model, spec)
    finally:
        flags.fp32_precision = before
    assert len(traced) == 2 * made


def test_graphs_do_not_run_while_one_is_made() -> None:
    """Torch's tracer sets a flag of the whole process, with which compiled functions of other threads fail."""
    inputs, found = [torch.ones(2)], []

    def double(values: torch.Tensor) -> list[torch.Tensor]:
        return [values * 2]

    known, other = Graphs(QUICK, (), "Tiny"), Graphs(QUICK, (), "Tiny")
    known.find("one", double, inputs, lambda: "two numbers")
    graph = known.find("one", double, inputs, lambda: "two numbers")
    assert graph is not None
    thread = threading.Thread(target=lambda: found.append(graph.run(*inputs)[0].tolist()))

    def slow(values: torch.Tensor) -> list[torch.Tensor]:
        if tracing.now:
            thread.start()
            thread.join(0.2)
        return [values * 3]

    warm_up = other.find("two", slow, inputs, lambda: "two numbers")
    assert warm_up is None
    assert other.find("two", slow, inputs, lambda: "two numbers") is not None
    thread.join()
    assert found == [[2.0, 2.0]]


def test_what_graphs_hold(traced: list[torch.fx.GraphModule]) -> None:
    """One additive mask, not one in each layer; and they go with their model."""
    gc.collect()
    others = len(graphs._of_models)
    model: LlamaForCausalLM | None = few_layers(3)
    assert model is not None
    same_ids(model, specs()["exit"])
    assert {sum("masked_fill" in str(node.target) for node in graph.graph.nodes) for graph in traced} == {1}
    traced.clear()
    gone = weakref.ref(model)
    model = None
    gc.collect()
    assert gone() is None
    assert len(graphs._of_models) == others


@pytest.mark.every_run("tree-.*")
@pytest.mark.parametrize(("name", "rows"), [("exit", 1), ("tree", 3)])
def test_split_forwards_are_exact(
    name: str, rows: int, traced: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs, which attend to all slots that there are."""
    in_parts = Mock(side_effect=partial(attention_in_parts, kernel=attention_with_sums))
    monkeypatch.setattr(attention, "parts_for", lambda query, key: 4)
    monkeypatch.setattr(attention, "attention_in_parts", in_parts)
    same_ids(few_layers(), specs()[name], rows, new=16)
    assert traced
    assert in_parts.called
