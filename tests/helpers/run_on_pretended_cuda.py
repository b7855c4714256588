"""Generates and trains on pretended devices, and prints what that needs as JSON; a process of its own."""

import json
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from helpers.architectures import STATEFUL, build
from helpers.automata import Own
from helpers.blocks import CONFIGS, block_of
from helpers.calls import PAST
from helpers.fitted import heads_of
from helpers.models import VOCABULARY, tiny_llama
from helpers.pretend_cuda import Pretended, counts, here, leave_out, move, pretended, spread
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
    model, inputs = tiny_llama(layers=4, factor=0.1), _prompts(rows, 12)
    options = {"do_sample": False, "max_new_tokens": 28, "pad_token_id": 0} | options

    def made() -> dict[str, Any]:
        """The options of a call, with grammars of its own."""
        kind = options.get("logits_processor")
        return options if kind is None else options | {"logits_processor": [kind(_TABLE)]}

    plain = model.generate(**inputs, **made())
    original_round, original_propose, steps = Decoder._round, PlanDrafter.propose, list[int]()

    def counted(decoder: Decoder) -> None:
        counts.is_on, before = len(steps) >= _WARM, decoder.draft.steps
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
    with patch.object(Decoder, "_round", counted), patch.object(PlanDrafter, "propose", proposed), pretended():
        place(model)
        leave_out(model.model.layers)
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
        "plans": counts.plans,
        "same": float(options["do_sample"] or torch.equal(output.raw, plain)),
    }


def replayed(
    architecture: str,
    spec: SelfSpec,
    rows: int,
    mode: str = "",
    threads: int = 1,
    dtype: str = "float32",
    seed: int = 0,
) -> dict[str, Any]:
    """How many forwards of a warm call are replays, launches outside of these, and whether all ids are plain's, which
    only those of float32 have to be. With the ``mode`` "compared" each replay is compared with the model's own code,
    with "streams" each call is in a thread, whose work is a stream of its own; several ``threads`` call at once."""
    model, calls = build(architecture, seed or None).to(getattr(torch, dtype)), list[Any]()
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    lengths = [*[(4, 20)] * 3, (21, 12), (4, 16)]  # in 128 slots, in 256, and in 128 again
    if architecture in STATEFUL or threads > 1:  # without graphs, or all in the same call
        del lengths[1:]
    if dtype != "float32":  # which a CPU has no quick kernels for
        del lengths[2:]
    for number, (repeats, new) in enumerate(lengths):
        inputs = _prompts(rows, 5, repeats, number)
        calls.append((inputs, model.generate(**inputs, **options, max_new_tokens=new), new))
    forwards, rounds, owned = 0, 0, False

    def counting(function: Callable[..., Any], is_on: bool, forward: int = 0) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal forwards, rounds
            forwards, rounds = forwards + (forward and counts.is_on), rounds + (is_on and not forward)
            before, counts.is_on = counts.is_on, counts.is_on if forward else is_on
            try:
                return function(*args, **kwargs)
            finally:
                counts.is_on = before

        return counted

    def generated(inputs: dict[str, torch.Tensor], expected: torch.Tensor, new: int) -> bool:
        nonlocal owned
        owned = mode == "compared" and not owned  # every other call brings a cache, whose layers are laid out apart
        past = {PAST: DynamicCache(config=model.config)} if owned else {}
        ids = model.generate(**_moved(inputs), **options, **past, max_new_tokens=new, assistant=spec)
        return torch.equal(ids.raw, expected) or dtype != "float32"

    def in_thread(call: tuple[Any, ...]) -> bool:
        with here():
            return generated(*call)

    are_same, curve = list[bool](), partial(CostCurve, False, is_frozen=True)
    with ExitStack() as stack:
        for owner, name, value in (
            (controller, "CostCurve", lambda on_cpu, rows=1, is_frozen=True: curve(rows=rows)),  # times tell nothing
            (experts, "has_grouped_kernel", lambda weight: True),  # as of bfloat16, which is not exact
            (graph_runner, "COMPARISONS", 1 << 30 if mode == "compared" else graph_runner.COMPARISONS),
            (Target, "step", counting(Target.step, True, forward=1)),
            (Decoder, "_round", counting(Decoder._round, True)),
            (GraphRunner, "_compared", counting(GraphRunner._compared, False)),  # while a graph is new
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(pretended())
        told = stack.enter_context(warnings.catch_warnings(record=True))
        errors.issued.clear()
        move(model)
        with ThreadPoolExecutor(threads) as pool:
            are_same += pool.map(in_thread, calls[:1] * threads if threads > 1 else [])
        for call in calls if threads == 1 else []:
            counts.reset("round")
            forwards = rounds = 0
            with ThreadPoolExecutor(1) as other:
                are_same.append(other.submit(in_thread, call).result() if mode == "streams" else generated(*call))
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
            found.append(measure(SPECS[spec](), rows, CALLS[call], spread if more else move))
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
