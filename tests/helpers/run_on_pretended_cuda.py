"""Generates and trains on pretended devices, and prints what that needs as JSON; a process of its own."""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache, PreTrainedModel

from helpers.architectures import STATEFUL, build
from helpers.automata import Own
from helpers.blocks import CONFIGS, block_of
from helpers.calls import PAST
from helpers.fitted import heads_of
from helpers.models import VOCABULARY, tiny_llama
from helpers.pretend_cuda import Pretended, counts, here, move, pretended, spread
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
# Rounds before a text is long enough for all that is cached to be there.
_WARM = 2


def _on_host(value: torch.Tensor) -> None:
    assert value.device.type == "cpu"


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
    "streamed": {"streamer": SimpleNamespace(is_stateless=True, put=_on_host, end=lambda: None)},
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


def measure(spec: SelfSpec, rows: int, options: dict[str, Any], is_spread: bool = False) -> dict[str, Any]:
    """Reads, uploads and draft steps of each round, and whether ids are plain's."""
    torch.manual_seed(0)
    model, inputs = tiny_llama(layers=4, factor=0.1), _prompts(rows, 12)
    options = {"do_sample": False, "max_new_tokens": 28, "pad_token_id": 0} | options

    def generated(inputs: dict[str, Any], **assistant: Any) -> torch.Tensor:
        """With grammars of its own."""
        grammars = {name: [kind(_TABLE)] for name, kind in options.items() if name == "logits_processor"}
        return model.generate(**inputs, **options | grammars, **assistant)

    plain, original_round, steps = generated(inputs), Decoder._round, list[int]()

    def counted(decoder: Decoder) -> None:
        counts.is_on, before = len(steps) >= _WARM, decoder.draft.steps
        try:
            original_round(decoder)
        finally:
            counts.is_on = False
        steps.append(decoder.draft.steps - before)

    counts.reset()
    with patch.object(Decoder, "_round", counted), pretended():
        spread(model) if is_spread else move(model)
        output = generated(_moved(inputs), assistant=replace(spec, graphs=False))
    rounds = len(steps) - _WARM
    return {
        "waits": counts.reads.total() / rounds,
        "rounds": rounds,
        "steps": sum(steps[_WARM:]) / rounds,
        "transfers": (counts.reads.total() + counts.uploads.total()) / rounds,
        "plans": counts.plans,
        "same": float(options["do_sample"] or torch.equal(output.raw, plain)),
    }


def replayed(
    architecture: str, spec: SelfSpec, rows: int, is_compared: bool = False, threads: int = 0, dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """How many forwards of a warm call are replays, launches outside of these, and whether all ids are plain's, which
    only those of float32 have to be. Each replay may be compared with the model's own code. With ``threads`` calls are
    in threads, whose work is a stream of its own, so many at once."""
    model, calls = build(architecture, seed or None).to(getattr(torch, dtype)), list[Any]()
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    lengths = [*[(4, 20)] * 3, (21, 12), (4, 16)]  # in 128 slots, in 256, and in 128 again
    if architecture in STATEFUL or threads > 1:  # without graphs, or all in the same call
        del lengths[1:]
    if dtype != "float32":  # which a CPU has no quick kernels for
        del lengths[2:]
    for number, (repeats, new) in enumerate(lengths):
        inputs = _prompts(rows, 5, repeats, number)
        calls.append((number, inputs, model.generate(**inputs, **options, max_new_tokens=new), new))
    seen = Counter[str]()

    def counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = counts.is_on
            counts.is_on = name == "rounds" or (before and name != "compared")
            seen[name] += counts.is_on
            try:
                return function(*args, **kwargs)
            finally:
                counts.is_on = before

        return counted

    def generated(call: tuple[int, dict[str, torch.Tensor], torch.Tensor, int]) -> bool:
        number, inputs, expected, new = call
        # Some calls bring a cache, whose layers are laid out apart.
        past = {PAST: DynamicCache(config=model.config)} if is_compared and not number % 2 else {}
        ids = model.generate(**_moved(inputs), **options, **past, max_new_tokens=new, assistant=spec)
        return torch.equal(ids.raw, expected) or dtype != "float32"

    def in_thread(call: Any) -> bool:
        with here():
            return generated(call)

    are_same, curve = list[bool](), partial(CostCurve, False, is_frozen=True)
    with ExitStack() as stack:
        for owner, name, value in (
            (controller, "CostCurve", lambda on_cpu, rows=1, is_frozen=True: curve(rows=rows)),  # times tell nothing
            (experts, "has_grouped_kernel", lambda weight: True),  # as of bfloat16, which is not exact
            (graph_runner, "COMPARISONS", 1 << 30 if is_compared else graph_runner.COMPARISONS),
            (Target, "step", counting(Target.step, "forwards")),
            (Decoder, "_round", counting(Decoder._round, "rounds")),
            (GraphRunner, "_compared", counting(GraphRunner._compared, "compared")),  # while a graph is new
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(pretended())
        told = stack.enter_context(warnings.catch_warnings(record=True))
        errors.issued.clear()
        move(model)
        for call in calls:
            counts.reset()
            seen.clear()
            with ThreadPoolExecutor(max(threads, 1)) as pool:
                are_same += pool.map(in_thread, [call] * threads) if threads else [generated(call)]
    replays, rounds = counts.launches["graph"], seen["rounds"]
    return {
        "same": all(are_same),
        "rounds": rounds,
        "waits": counts.reads.total() / rounds,
        "blocking": sum(count for name, count in counts.uploads.items() if "blocking" in name),
        "replays": replays / seen["forwards"],
        "launches": (counts.launches.total() - replays) / rounds,
        "graphs": 0 if (graphs := model_graphs._of_models.get(model)) is None else graphs.count,
        "warnings": [str(warning.message) for warning in told],
    }


def _spec_for(spec: str, architecture: str) -> SelfSpec:
    block = spec.removeprefix("block ")
    return SelfSpec(Block(_block(block, build(architecture))), _THREE) if block in CONFIGS else SPECS[spec]()


def main(cases: list[list[Any]]) -> None:
    found: list[Any] = []
    for spec, call, rows, *more in cases:
        kind, _, architecture = call.partition(" ")
        if spec == "training":
            found.append(steps())
        elif kind == "graphs":
            found.append(replayed(architecture, _spec_for(spec, architecture), rows, *more))
        else:
            found.append(measure(SPECS[spec](), rows, CALLS[call], bool(more)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
