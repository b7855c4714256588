"""Compiled rounds of a small model compared with eager ones and with plain ``generate``.

The three take turns in one process; times are medians. Graphs are compiled in earlier calls, which do not count. The
later half of a random Llama's layers hardly matters, so that drafts are usually right.
"""

from __future__ import annotations

from typing import Any

from synthetic import LlamaShape, random_prompt
from timing import Table, Way, compare, parsed, parser_with, print_head
from transformers import CompileConfig

from hf_selfspec import ConfidenceThreshold, EarlyExit, FixedLength, SelfSpec, SkipLayers

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
    parser = parser_with(__doc__, width=64, layers=4, vocabulary=97, tokens=200, repeats=7, threads=1)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--device", default="cpu")
    args = parsed(parser)
    shape = LlamaShape(args.width, args.layers, 2 * args.width, args.vocabulary, device=args.device)
    model = shape.damped(args.layers // 2, DAMPED)
    config = CompileConfig(backend=args.backend, mode="default")
    prompt, options = random_prompt(model, 1, 32)["input_ids"], {"max_new_tokens": args.tokens, "do_sample": False}
    print_head(args.device, f"{args.layers} layers of width {args.width}", f"{args.tokens} new tokens, greedy")
    columns = ("plain ms/token", "eager", "compiled", "compiled / eager", "tokens a round", "ids of plain")
    table = Table("draft", *columns)
    for name, settings in drafts(args.layers).items():
        specs = {"eager": SelfSpec(**settings), "compiled": SelfSpec(**settings, compile=config)}
        ways: dict[str, Way] = {"plain": {}, **specs}
        speeds = compare(model, ways, [prompt], options, args.repeats, warm_up=[prompt] * WARM_UP)
        cells = [*(f"{speed.ms:.3f}" for speed in speeds.values())]
        cells += [f"{speeds['compiled'].ms / speeds['eager'].ms:.2f}", f"{speeds['compiled'].length:.2f}"]
        table.row(name, *cells, "yes" if all(all(speed.same) for speed in speeds.values()) else "no")


if __name__ == "__main__":
    main()
