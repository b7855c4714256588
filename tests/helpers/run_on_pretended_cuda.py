"""Generates on pretended devices, and prints what that needs as JSON; a process of its own."""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache, PreTrainedModel

from helpers import leaves
from helpers.architectures import STATEFUL, build
from helpers.automata import Ending, Own
from helpers.blocks import CONFIGS, block_of
from helpers.calls import PAST
from helpers.fitted import heads_of, mtp_of, peagle_of
from helpers.models import VOCABULARY, tiny_llama
from helpers.pretend_cuda import Graph, Pretended, counts, here, move, pretended, spread
from hf_selfspec import (
    MTP,
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
from hf_selfspec.generate.decoder import Decoder
from hf_selfspec.model.graphs import graph_runner, model_graphs
from hf_selfspec.model.graphs.graph_runner import GraphRunner
from hf_selfspec.model.kernels import experts
from hf_selfspec.model.target import Target
from hf_selfspec.modules.adapter import Adapter
from hf_selfspec.modules.block import BlockHead
from hf_selfspec.modules.linear_probe import LinearProbe
from hf_selfspec.modules.reduced_head import ReducedHead

_EXIT, _THREE, _SURE = EarlyExit(2), FixedLength(3), ConfidenceThreshold(1e-6)
_DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
# What may follow in each state of a grammar.
_TABLE = [list(range(2, 60, 2)), list(range(3, 60, 3)), [7], list(range(2, 30))]


def _on_host(value: torch.Tensor) -> None:
    assert value.device.type == "cpu"


def _block(name: str, model: PreTrainedModel | None = None) -> BlockHead:
    return block_of(model or tiny_llama(layers=4, factor=0.1), layers=(1, 2), **CONFIGS[name])


SPECS: dict[str, Callable[[], SelfSpec]] = {
    "fixed": lambda: SelfSpec(_EXIT, _THREE),
    "rule": lambda: SelfSpec(_EXIT, _SURE, max_draft=3),
    "unsure": lambda: SelfSpec(_EXIT, ConfidenceThreshold(0.999)),
    "tree": lambda: SelfSpec(_EXIT, _THREE, TopKTree()),
    "quantized": SelfSpec.quantized,
    "kangaroo": lambda: SelfSpec.kangaroo(Adapter(2, 64, 4)),
    "adaspeed": lambda: SelfSpec.adaspeed(2),
    "skips": lambda: SelfSpec(SkipLayers(attention=(1,), mlp=(2,)), _THREE),
    "adaptive": lambda: SelfSpec(_EXIT, AdaptiveThreshold()),
    "lookup": SelfSpec.lookup,
    "default": SelfSpec,
    "layerskip": SelfSpec.layerskip,
    "swift": SelfSpec.swift,
    "search": lambda: SelfSpec.swift(search=OnTheFlySearch(8, 50, 5, budget=1.0)),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(Adapter(2, 64, 4)), _THREE),
    "probe": lambda: SelfSpec.adaspeed(probe=LinearProbe(2, 64)),
    "heads": lambda: SelfSpec.dssd(heads_of(tiny_llama(layers=4, factor=0.1), 0.5, (1, 3))),
    "reduced": lambda: SelfSpec(EarlyExit(2, head=ReducedHead.of(range(40), VOCABULARY)), _THREE, TopKTree()),
    "cascade": lambda: SelfSpec(Cascade([_EXIT, Lookup()])),
    "block": lambda: SelfSpec(Block(_block("dspark gated"))),
    "peagle": lambda: SelfSpec(MTP(peagle_of(tiny_llama(layers=4, factor=0.1)))),
    "mtp": lambda: SelfSpec(MTP(mtp_of(tiny_llama(layers=4, factor=0.1)))),
    "window": lambda: SelfSpec(Block(_block("dflash window")), FixedLength(4)),
    "block beside": lambda: SelfSpec(Cascade([Lookup(), Block(_block("dspark"))])),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "eos": {"eos_token_id": [5, 17]},
    "drawn": _DRAWN,
    "streamed": {"streamer": SimpleNamespace(is_stateless=True, put=_on_host, end=lambda: None)},
    "repetition": {"repetition_penalty": 1.3},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
    "grammar": {"logits_processor": Own},
    "ending": {"logits_processor": lambda table: Own(table, Ending), "eos_token_id": 7},
}


def _prompts(rows: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 60, (rows, 5), generator=torch.Generator().manual_seed(seed)).repeat(1, width // 5)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids).triu()}


def measure(
    spec: SelfSpec, rows: int, options: dict[str, Any], architecture: str = "", is_compared: bool = False,
    threads: int = 0, dtype: str = "float32", seed: int = 0, is_spread: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What the rounds of the last call need, how many of its forwards are replays, and whether the ids of all calls are
    plain's, which only those of float32 have to be. Each replay may be compared with the model's own code. With
    ``threads`` calls are in threads, whose work is a stream of its own, so many at once."""
    model = build(architecture, seed or None) if architecture else tiny_llama(layers=4, factor=0.1)
    model.to(getattr(torch, dtype))
    options = {"do_sample": False, "pad_token_id": 0} | options
    lengths = [*[(20, 20)] * 3, (105, 12), (20, 16)]  # in 128 slots, in 256, and in 128 again
    if not architecture or threads > 1:  # without graphs, or all in the same call
        lengths = [(20, 20) if architecture else (10, 28)]
    if architecture in STATEFUL:  # of as many operations
        del lengths[:2]
    if dtype != "float32":  # which a CPU has no quick kernels for
        del lengths[2:]
    # Rounds before a text is long enough for all that is cached to be there.
    seen, skipped = Counter[str](), 0 if architecture else 2

    def generated(inputs: dict[str, Any], new: int, **more: Any) -> Any:
        """With grammars of its own."""
        grammars = {name: [kind(_TABLE)] for name, kind in options.items() if name == "logits_processor"}
        return model.generate(**inputs, **options | grammars, **more, max_new_tokens=new)

    def counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            before, steps = counts.is_on, args[0].draft.steps if name == "rounds" else 0
            seen["all"] += name == "rounds"
            counts.is_on = is_on = seen["all"] > skipped if name == "rounds" else before and name != "compared"
            seen[name] += is_on
            try:
                return function(*args, **kwargs)
            finally:
                counts.is_on = before
                seen["steps"] += args[0].draft.steps - steps if name == "rounds" and is_on else 0

        return counted

    def is_plain(call: tuple[int, dict[str, torch.Tensor], int, torch.Tensor]) -> bool:
        number, inputs, new, expected = call
        # Some calls bring a cache, whose layers are laid out apart.
        past = {PAST: DynamicCache(config=model.config)} if is_compared and not number % 2 else {}
        ids = generated({name: Pretended(values) for name, values in inputs.items()}, new, **past, assistant=spec)
        return torch.equal(ids.raw, expected) or options["do_sample"] or dtype != "float32"

    def in_thread(call: Any) -> bool:
        with here():
            return is_plain(call)

    calls, are_same, made, curve = list[Any](), list[bool](), list[int](), partial(CostCurve, False, is_frozen=True)
    for number, (width, new) in enumerate(lengths):
        inputs = _prompts(rows, width, number)
        calls.append((number, inputs, new, generated(inputs, new)))
    with ExitStack() as stack:
        for owner, name, value in (
            (controller, "CostCurve", lambda rows=1, **_: curve(rows=rows)),  # times tell nothing
            (controller.Controller, "width", lambda self, name, length: 2),
            # As of bfloat16, which is not exact.
            (experts, "has_grouped_kernel", lambda weight: True),
            (model_graphs, "has_grouped_kernel", lambda weight: True),
            (graph_runner, "COMPARISONS", 1 << 30 if is_compared else graph_runner.COMPARISONS),
            (Target, "step", counting(Target.step, "forwards")),
            (Decoder, "_round", counting(Decoder._round, "rounds")),
            (GraphRunner, "_compared", counting(GraphRunner._compared, "compared")),  # while a graph is new
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(pretended())
        told = stack.enter_context(warnings.catch_warnings(record=True))
        errors.issued.clear()
        Graph.kernels.clear()
        spread(model) if is_spread else move(model)
        for call in calls:
            counts.reset()
            seen.clear()
            with ThreadPoolExecutor(max(threads, 1)) as pool:
                are_same += pool.map(in_thread, [call] * threads) if threads else [is_plain(call)]
            made.append(model_graphs.graphs_of(model).count)
    replays, rounds, reads = counts.launches["graph"], seen["rounds"] or 1, counts.reads.total()
    return {
        "same": all(are_same),
        "rounds": rounds,
        "steps": seen["steps"] / rounds,
        "waits": reads / rounds,
        "transfers": (reads + counts.uploads.total()) / rounds,
        "plans": counts.plans,
        "blocking": sum(count for name, count in counts.uploads.items() if "blocking" in name),
        "replays": replays / (seen["forwards"] or 1),
        "launches": (counts.launches.total() - replays) / rounds,
        "graphs": made[-1],
        "first": made[0],  # graphs of the first call
        "kernels": min(Graph.kernels, default=0),
        "warnings": [str(warning.message) for warning in told],
    }


def _wrong(kernel: Callable[..., Any], factor: float, after: int) -> Callable[..., Any]:
    @wraps(kernel)
    def changed(*args: Any) -> Any:
        results, by = kernel(*args), factor if len(Graph.kernels) >= after else 1.0
        return tuple(by * x for x in results) if isinstance(results, tuple) else by * results

    return changed


# Kernels of leaves that are wrong by less than comparisons of whole forwards show, and those that are wrong, and by
# more, after a graph was made with them.
WRONG = {
    kind: {name: _wrong(getattr(leaves, name), *how) for name in ("norm", "rotate", "activate")}
    for kind, how in {"wrong": (1.001, 0), "late": (1.5, 1)}.items()
}


def _spec_for(spec: str, architecture: str) -> SelfSpec:
    block = spec.removeprefix("block ")
    return SelfSpec(Block(_block(block, build(architecture))), _THREE) if block in CONFIGS else SPECS[spec]()


def main(cases: list[list[Any]]) -> None:
    found: list[Any] = []
    for spec, call, rows, *more in cases:
        kind, _, architecture = call.partition(" ")
        if kind in ("graphs", *WRONG):
            with patch.multiple(leaves, **WRONG[kind]) if kind in WRONG else nullcontext():
                found.append(measure(_spec_for(spec, architecture), rows, {"eos_token_id": None}, architecture, *more))
        else:
            found.append(measure(replace(SPECS[spec](), graphs=False), rows, CALLS[call], is_spread=bool(more)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
