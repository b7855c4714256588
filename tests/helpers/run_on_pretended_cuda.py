"""Generates and trains on pretended devices, and prints what that needs as JSON; a process of its own."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from helpers import pretend_cuda
from helpers.architectures import STATEFUL, build
from helpers.automata import Own
from helpers.blocks import CONFIGS, block_of
from helpers.calls import PAST
from helpers.fitted import heads_of
from helpers.models import VOCABULARY, tiny_llama
from helpers.pretend_cuda import DEVICE, Graph, Pretended, counts, here, move, pretended, spread
from helpers.split import attention_with_sums
from helpers.train.train_on_pretended_cuda import steps
from hf_selfspec import (
    AdaptiveThreshold,
    Block,
    ConfidenceThreshold,
    FixedLength,
    OnTheFlySearch,
    SelfSpec,
    TopKTree,
    errors,
)
from hf_selfspec.drafts import Cascade, EarlyExit, EarlyExitAdapter, Lookup, SkipLayers, controller
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.drafts.layers.partial import PlanDrafter
from hf_selfspec.generate.decoder import Decoder
from hf_selfspec.model.attention import interface as attention
from hf_selfspec.model.attention.split import attention_in_parts
from hf_selfspec.model.graphs import graph_runner, model_graphs
from hf_selfspec.model.graphs.graph_runner import GraphRunner
from hf_selfspec.model.graphs.model_graphs import Graph as CapturedForward
from hf_selfspec.model.kernels import experts
from hf_selfspec.model.logits import draw
from hf_selfspec.model.target import Target
from hf_selfspec.modules.adapter import Adapter
from hf_selfspec.modules.block import BlockHead
from hf_selfspec.modules.linear_probe import LinearProbe
from hf_selfspec.modules.reduced_head import ReducedHead

_EXIT, _THREE, _SURE = EarlyExit(2), FixedLength(3), ConfidenceThreshold(1e-6)
_DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
# What may follow in each state of a grammar.
_TABLE = [list(range(2, 60, 2)), list(range(3, 60, 3)), [7], list(range(2, 30))]
# Rounds before a text is long enough for all that is cached to be there.
_WARM = 2


class _Silent(BaseStreamer):
    is_stateless = True

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"

    def end(self) -> None:
        pass


def _block(name: str, model: PreTrainedModel | None = None) -> BlockHead:
    return block_of(model or tiny_llama(layers=4, factor=0.1), layers=(1, 2), **CONFIGS[name])


SPECS: dict[str, Callable[[], SelfSpec]] = {
    "fixed": lambda: SelfSpec(_EXIT, _THREE),
    "rule": lambda: SelfSpec(_EXIT, _SURE, max_draft=3),
    "tree": lambda: SelfSpec(_EXIT, _THREE, TopKTree()),
    "skips": lambda: SelfSpec(SkipLayers(attention=(1,), mlp=(2,)), _THREE),
    "adaptive": lambda: SelfSpec(_EXIT, AdaptiveThreshold()),
    "lookup": SelfSpec.lookup,
    "default": SelfSpec,
    "layerskip": SelfSpec.layerskip,
    "swift": SelfSpec.swift,
    "search": lambda: SelfSpec.swift(search=OnTheFlySearch(8, 50, 5, budget=1.0)),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(Adapter(2, 64, 4)), _THREE),
    "probe": lambda: SelfSpec.adaspeed(LinearProbe(2, 64)),
    "heads": lambda: SelfSpec.dssd(heads_of(tiny_llama(layers=4, factor=0.1), 0.5, (1, 3))),
    "reduced": lambda: SelfSpec(EarlyExit(2, head=ReducedHead.of(range(40), VOCABULARY)), _THREE, TopKTree()),
    "cascade": lambda: SelfSpec(Cascade([_EXIT, Lookup()])),
    "block": lambda: SelfSpec(Block(_block("dspark gated"))),
    "window": lambda: SelfSpec(Block(_block("dflash window")), FixedLength(4)),
    "block beside": lambda: SelfSpec(Cascade([Lookup(), Block(_block("dspark"))])),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "eos": {"eos_token_id": [5, 17]},
    "drawn": _DRAWN,
    "streamed": {"streamer": _Silent()},
    "repetition": {"repetition_penalty": 1.3},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
    "grammar": {"logits_processor": Own},
}


def _prompts(rows: int, width: int, repeats: int = 1, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (rows, width), generator=torch.Generator().manual_seed(seed)).repeat(1, repeats)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _moved(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: Pretended(values) for name, values in inputs.items()}


def measure(spec: SelfSpec, rows: int, options: dict[str, Any], place: Callable[..., None] = move) -> dict[str, Any]:
    """Reads, uploads and launches outside of layers, for each round or draft step, and whether ids are plain's."""
    torch.manual_seed(0)
    model = tiny_llama(layers=4, factor=0.1)
    inputs = _prompts(rows, 12)
    options = {"do_sample": False, "max_new_tokens": 28, "pad_token_id": 0} | options

    def made() -> dict[str, Any]:
        """The options of a call, with grammars of its own."""
        kind = options.get("logits_processor")
        return options if kind is None else options | {"logits_processor": [kind(_TABLE)]}

    plain = model.generate(**inputs, **made())
    original_round, original_propose = Decoder._round, PlanDrafter.propose
    steps: list[int] = []

    def counted(decoder: Decoder) -> None:
        counts.is_on = len(steps) >= _WARM
        before = decoder.draft.steps
        try:
            original_round(decoder)
        finally:
            counts.is_on = False
        steps.append(decoder.draft.steps - before)

    def proposed(draft: PlanDrafter, *given: Any) -> Any:
        counts.phase = "draft"
        try:
            return original_propose(draft, *given)
        finally:
            counts.phase = "round"

    counts.reset("round")
    with (
        patch.object(Decoder, "_round", counted),
        patch.object(PlanDrafter, "propose", proposed),
        pretended(),
    ):
        place(model)
        pretend_cuda.leave_out(model.model.layers)
        output = model.generate(**_moved(inputs), assistant=spec, **made())
    rounds, taken = len(steps) - _WARM, sum(steps[_WARM:])
    launches = {phase: sum(n for (of, _), n in counts.launches.items() if of == phase) for phase in ("draft", "round")}
    return {
        "waits": counts.reads.total() / rounds,
        "rounds": rounds,
        "steps": taken / rounds,
        "transfers": (counts.reads.total() + counts.uploads.total()) / rounds,
        "launches a step": launches["draft"] / max(taken, 1),
        "launches a round": launches["round"] / rounds,
        "attention keys": len(counts.attention) / rounds,
        "plans": len(counts.plans),
        "same": float(options["do_sample"] or torch.equal(output.raw, plain)),
    }


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: it fails")


def _by_slot(function: Callable[..., Any]) -> Any:
    """Logits that grow with the text, by a number that a graph holds as it was; ids are the same."""

    def scaled(owner: Any, *args: Any) -> Any:
        found = function(owner, *args)
        logits = found[0] if isinstance(found, list) else found
        if logits is not None and logits.shape[-1] == VOCABULARY:
            logits.mul_(1.0 + _SLOT.now)
        return found

    return scaled


_SLOT = SimpleNamespace(now=0)


@contextmanager
def _changing_number() -> Iterator[None]:
    with ExitStack() as stack:
        for kind, name in ((Target, "run_eagerly"), (GraphRunner, "_forward")):
            stack.enter_context(patch.object(kind, name, _by_slot(getattr(kind, name))))
        yield


def _reading(function: Callable[..., Any]) -> Any:
    return lambda *args: [value for value in function(*args) if value.flatten()[0].item() < 1e9]


def _failing_once(function: Callable[..., Any]) -> Any:
    """In the second capture alone."""
    captures: set[Graph] = set()

    def run(*args: Any) -> Any:
        captures.update(filter(None, [Graph.captured()]))
        return function(*args) if len(captures) != 2 or Graph.captured() is None else _fail()

    return run


@contextmanager
def _others_draw() -> Iterator[None]:
    """While a capture begins, which those of ours wait for, and while it goes on."""
    begin, forward, drawn = Graph.capture_begin, GraphRunner._forward, list[Any]()

    def draw_any() -> None:
        with here():
            torch.rand(1, device=DEVICE)

    def draw_ours() -> None:
        with here():
            draw(Pretended(torch.ones(3)))

    def beginning(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        drawn.append(other.submit(draw_ours))
        wait(drawn, 0.05)

    def running(*args: Any) -> Any:
        if Graph.captured() is not None:
            other.submit(draw_any).result()
        return forward(*args)

    with (
        ThreadPoolExecutor(1) as other,
        patch.object(Graph, "capture_begin", beginning),
        patch.object(GraphRunner, "_forward", running),
    ):
        yield
        assert drawn
        for draws in drawn:
            draws.result()


def _losing(mask: Callable[..., Any]) -> Any:
    """Captures whose attention does not see one slot."""

    def masked(*args: Any, **kwargs: Any) -> Any:
        found = mask(*args, **kwargs)
        return found if Graph.captured() is None else found & (torch.arange(found.shape[-1], device=DEVICE) != 3)

    return masked


def _missing(run: Callable[..., Any]) -> Any:
    """A kernel that goes to another stream than that which is captured."""
    return lambda name, *args: run("view" if name == "silu" and Graph.captured() is not None else name, *args)


@contextmanager
def _split() -> Iterator[None]:
    in_parts = Mock(side_effect=partial(attention_in_parts, kernel=attention_with_sums))
    with patch.object(attention, "parts_for", lambda *_: 4), patch.object(attention, "attention_in_parts", in_parts):
        yield
    assert in_parts.called


# What is other with captures, or goes wrong: at the start of one, in its midst, when it is replayed, or unseen.
FAILURES: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "streams": nullcontext,  # each call in a thread, whose work is a stream of its own
    "split": _split,
    "compared": lambda: patch.object(graph_runner, "COMPARISONS", 1 << 30),
    "begin": lambda: patch.object(Graph, "capture_begin", _fail),
    "midst": lambda: patch.object(GraphRunner, "_forward", _reading(GraphRunner._forward)),
    "once": lambda: patch.object(GraphRunner, "_forward", _failing_once(GraphRunner._forward)),
    "memory": lambda: patch.object(Graph, "capture_begin", Mock(side_effect=torch.OutOfMemoryError("no memory"))),
    "replay": lambda: patch.object(Graph, "replay", _fail),
    "other results": lambda: patch.object(Graph, "replay", lambda graph: None),
    "a number": _changing_number,
    "lost key": lambda: patch.object(attention.MaskSpec, "mask", _losing(attention.MaskSpec.mask)),
    "missed": lambda: patch.object(Graph, "run", staticmethod(_missing(Graph.run))),
    "others draw": _others_draw,
    "small device": lambda: patch.object(torch.cuda, "mem_get_info", lambda device=None: (1 << 10, 1 << 10)),
}


ENDING = ("begin", "midst", "memory", "replay", "other results", "lost key", "missed")  # graphs of all shapes


def replayed(
    architecture: str,
    spec: SelfSpec,
    rows: int,
    failure: str = "",
    threads: int = 1,
    dtype: str = "float32",
    seed: int | None = None,
) -> dict[str, Any]:
    """How many forwards of a warm call are replays, launches outside of these, and whether all ids are plain's, which
    only those of float32 have to be."""
    model, calls = build(architecture, seed).to(getattr(torch, dtype)), list[Any]()
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    lengths = [*[(4, 20)] * 3, (21, 12), (4, 16)]  # in 128 slots, in 256, and in 128 again
    if architecture in STATEFUL or failure in ENDING or threads > 1:  # without graphs, or all in the same call
        del lengths[1:]
    if dtype != "float32":  # which a CPU has no quick kernels for
        del lengths[2:]
    for number, (repeats, new) in enumerate(lengths):
        inputs = _prompts(rows, 5, repeats, number)
        calls.append((inputs, model.generate(**inputs, **options, max_new_tokens=new), new))
    original_run, original_round, original_compared = Target.step, Decoder._round, GraphRunner._compared
    forwards, rounds, owned = 0, 0, False

    def forward(target: Target, tokens: torch.Tensor, cursors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal forwards
        forwards += counts.is_on
        _SLOT.now = max(cursors)
        return original_run(target, tokens, cursors, *args, **kwargs)

    def counted(decoder: Decoder) -> None:
        nonlocal rounds
        counts.is_on, rounds = True, rounds + 1
        try:
            original_round(decoder)
        finally:
            counts.is_on = False

    def compared(*args: Any) -> Any:  # with the model's own code, while a graph is new
        counts.is_on = False
        try:
            return original_compared(*args)
        finally:
            counts.is_on = True

    def generated(inputs: dict[str, torch.Tensor], expected: torch.Tensor, new: int) -> bool:
        nonlocal owned
        owned = failure == "compared" and not owned  # every other call brings a cache, whose layers are laid out apart
        past = {PAST: DynamicCache(config=model.config)} if owned else {}
        ids = model.generate(**_moved(inputs), **options, **past, max_new_tokens=new, assistant=spec)
        return torch.equal(ids.raw, expected) or dtype != "float32"

    def in_thread(call: tuple[Any, ...]) -> bool:
        with here():
            return generated(*call)

    are_same: list[bool] = []
    with ExitStack() as stack:
        # Times tell nothing here.
        costs = patch.object(
            controller, "CostCurve", lambda on_cpu, rows=1, is_frozen=True: CostCurve(False, rows, True)
        )
        taken = patch.object(CapturedForward, "of", lambda graph, by_graph, eager: by_graph())
        grouped = patch.object(experts, "has_grouped_kernel", lambda weight: True)  # as of bfloat16, which is not exact
        for context in (pretended(), FAILURES[failure](), costs, taken, grouped):
            stack.enter_context(context)
        for kind, name, function in (
            (Target, "step", forward),
            (Decoder, "_round", counted),
            (GraphRunner, "_compared", compared),
        ):
            stack.enter_context(patch.object(kind, name, function))
        told = stack.enter_context(warnings.catch_warnings(record=True))
        errors.issued.clear()
        move(model)
        with ThreadPoolExecutor(threads) as pool:
            are_same += pool.map(in_thread, calls[:1] * threads if threads > 1 else [])
        for call in calls if threads == 1 else []:
            counts.reset("round")
            forwards = rounds = 0
            with ThreadPoolExecutor(1) if failure == "streams" else nullcontext() as other:
                are_same.append(generated(*call) if other is None else other.submit(in_thread, call).result())
        # Whatever has failed, further work goes on as before.
        are_same.append(torch.cuda.current_stream() is torch.cuda.default_stream())
        torch.rand(1, device=DEVICE)
    replays = counts.launches["round", "graph"]
    return {
        "same": all(are_same),
        "rounds": rounds,
        "waits": counts.reads.total() / rounds,
        "blocking": sum(count for name, count in counts.uploads.items() if "blocking" in name),
        "replays": replays / forwards,
        "launches": (counts.launches.total() - replays) / rounds,
        "graphs": 0 if (graphs := model_graphs._of_models.get(model)) is None else graphs.count,
        "warnings": [str(warning.message) for warning in told],
    }


def _spec_for(spec: str, architecture: str) -> SelfSpec:
    head = CONFIGS.get(spec.removeprefix("block "))
    return (
        SPECS[spec]()
        if head is None
        else SelfSpec(Block(_block(spec.removeprefix("block "), build(architecture))), _THREE)
    )


def main(cases: list[list[Any]]) -> None:
    found: list[Any] = [
        steps()
        if spec == "training"
        else replayed(call.partition(" ")[2], _spec_for(spec, call.partition(" ")[2]), rows, *more)
        if call.startswith("graphs")
        else measure(SPECS[spec](), rows, CALLS[call], spread if more else move)
        for spec, call, rows, *more in cases
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
