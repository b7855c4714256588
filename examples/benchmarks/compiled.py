"""Compiled rounds of a small model compared with eager ones and with plain ``generate``.

The three take turns in one process. Times are medians: of the process's CPU time on a CPU with one thread, else of wall
time. Graphs are compiled in earlier calls, which do not count. The later half of a random Llama's layers hardly
matters, so that drafts are usually right.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from synthetic import LlamaShape, random_prompt
from timing import print_head, print_row, print_table_head
from transformers import CompileConfig

from hf_selfspec import ConfidenceThreshold, EarlyExit, FixedLength, SelfSpec, SkipLayers
from hf_selfspec.model.transfer import wait_for

DAMPED = 0.01
# Calls in which graphs are compiled, each when its shape comes for the eighth time, and timed against eager forwards.
WARM_UP = 4


def drafts(layers: int) -> dict[str, dict[str, Any]]:
    half = layers // 2
    confident = {"draft": EarlyExit(half), "stop": ConfidenceThreshold(1e-3), "max_draft": 5}
    return {
        f"exit {half}, line of 4": {"draft": EarlyExit(half), "stop": FixedLength(4)},
        f"exit {half}, up to 5 by confidence": confident,
        "skip set, line of 4": {"draft": SkipLayers((half,), (half,)), "stop": FixedLength(4)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64, help="hidden size")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=97)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    shape = LlamaShape(args.width, args.layers, 2 * args.width, args.vocabulary, device=args.device)
    model = shape.damped(args.layers // 2, DAMPED)
    config = CompileConfig(backend=args.backend, mode="default")
    settings = random_prompt(model, 1, 32) | {"max_new_tokens": args.tokens, "do_sample": False}
    print_head(args.device, f"{args.layers} layers of width {args.width}", f"{args.tokens} new tokens, greedy")
    print_table_head(
        "draft", "plain ms/token", "eager", "compiled", "compiled / eager", "tokens a round", "ids of plain"
    )
    for name, given in drafts(args.layers).items():
        ways = {"plain": None, "eager": SelfSpec(**given), "compiled": SelfSpec(**given, compile=config)}
        seconds, texts = defaultdict(list), {}
        for turn in range(WARM_UP + args.repeats):
            for way, spec in ways.items():
                begun = clock()
                texts[way, turn] = model.generate(**settings, assistant=spec).tolist()
                wait_for(model.device)
                if turn >= WARM_UP:
                    seconds[way].append(clock() - begun)
        ms = {way: 1e3 * median(values) / args.tokens for way, values in seconds.items()}
        cells = [*(f"{value:.3f}" for value in ms.values()), f"{ms['compiled'] / ms['eager']:.2f}"]
        equal = all(text == texts["plain", 0] for text in texts.values())
        print_row(name, *cells, f"{ways['compiled'].stats.mean_generated_length:.2f}", "yes" if equal else "no")


if __name__ == "__main__":
    main()
