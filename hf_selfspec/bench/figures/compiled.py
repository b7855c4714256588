"""Plain generate, eager rounds, and rounds with compiled forwards."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import CompileConfig, LlamaForCausalLM

from ...draft.early_exit import EarlyExit
from ...draft.skip_layers import SkipLayers
from ...selfspec import SelfSpec
from ...stop.rules import ConfidenceThreshold, FixedLength
from ..synthetic import LlamaShape, damp_blocks, exit_blocks, random_prompt
from .figure import Figure, print_head, print_row, print_table_head

_DESCRIPTION = """The ways take turns in one process. Times are medians: of the process's CPU time on a CPU with one
thread, else of wall time. Graphs are compiled in earlier calls, which do not count. The later half of a random Llama's
layers hardly matters, so that drafts are usually right."""
_DAMPED = 0.01
# Calls in which graphs are compiled, each when its shape comes for the eighth time, and timed against eager forwards.
_WARM_UP = 4


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=64, help="hidden size")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=97)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--device", default="cpu")


def _drafts(layers: int) -> dict[str, dict[str, Any]]:
    """Settings of the measured drafts, by name."""
    half = layers // 2
    exit_layer = EarlyExit(half)
    return {
        f"exit {half}, line of 4": {"draft": exit_layer, "stop": FixedLength(4)},
        f"exit {half}, up to 5 by confidence": {"draft": exit_layer, "stop": ConfidenceThreshold(1e-3), "max_draft": 5},
        "skip set, line of 4": {"draft": SkipLayers((half,), (half,)), "stop": FixedLength(4)},
    }


def _run(args: argparse.Namespace) -> None:
    model = LlamaShape(args.width, args.layers, 2 * args.width, args.vocabulary, device=args.device).model()
    damp_blocks(model, exit_blocks(args.layers, args.layers // 2), _DAMPED)
    config = CompileConfig(backend=args.backend, mode="default")
    print_head(args, f"{args.layers} layers of width {args.width}", f"{args.tokens} new tokens, greedy")
    print_table_head(
        "draft", "plain ms/token", "eager", "compiled", "compiled / eager", "tokens a round", "ids of plain"
    )
    for name, settings in _drafts(args.layers).items():
        specs = {"eager": SelfSpec(**settings), "compiled": SelfSpec(**settings, compile=config)}
        ways: dict[str, dict[str, Any]] = {"plain": {}} | {way: {"assistant": spec} for way, spec in specs.items()}
        ms, equal = _times(model, ways, args)
        stats = specs["compiled"].stats
        assert stats is not None
        cells = [*(f"{value:.3f}" for value in ms.values()), f"{ms['compiled'] / ms['eager']:.2f}"]
        print_row(name, *cells, f"{stats.mean_generated_length:.2f}", "yes" if equal else "no")


def _times(
    model: LlamaForCausalLM, ways: Mapping[str, dict[str, Any]], args: argparse.Namespace
) -> tuple[dict[str, float], bool]:
    """Milliseconds per token of each way, and whether all ids are those of the first way."""
    clock = process_time if args.device == "cpu" and torch.get_num_threads() == 1 else perf_counter
    seconds: dict[str, list[float]] = defaultdict(list)
    settings = random_prompt(model, 1, 32) | {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
    expected, equal = None, True
    for turn in range(_WARM_UP + args.repeats):
        for way, arguments in ways.items():
            begun = clock()
            found = model.generate(**settings, **arguments)
            if torch.device(args.device).type != "cpu":
                torch.accelerator.synchronize()
            if turn >= _WARM_UP:
                seconds[way].append(clock() - begun)
            expected = found if expected is None else expected
            equal = equal and torch.equal(found, expected)
    return {way: 1e3 * median(values) / args.tokens for way, values in seconds.items()}, equal


FIGURE = Figure("compiled rounds of a small model compared with eager ones", _add_options, _run, _DESCRIPTION)
