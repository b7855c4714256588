"""A trained model's early exits: speed compared with transformers' own ways.

Prompts are the first 64 tokens of each text of ``--data`` and of held-out files of the standard library. Everything is
timed in turn, prompt by prompt, in float32. The exit and draft length of each way are chosen on prompts other than the
timed ones. ``--by-exit`` prints speed and acceptance of each exit instead.
"""

from __future__ import annotations

from typing import Any

import torch
from corpus import held_out_texts
from timing import (
    PROMPT,
    Table,
    Way,
    add_trained,
    compare,
    load,
    parsed,
    parser_with,
    print_head,
    prompts_of,
)
from transformers import PreTrainedModel

from hf_selfspec import SelfSpec
from hf_selfspec.train.loading import read_prompts

CHOOSING = 8
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0},
}


def early_exit(model: PreTrainedModel, layer: int, num_draft: int, options: dict[str, Any]) -> Way:
    """Transformers' ``assistant_early_exit`` with drafts of one length."""
    config: Any = model.generation_config
    config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0

    def run(ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        config.num_assistant_tokens = num_draft
        return model.generate(ids, attention_mask=torch.ones_like(ids), assistant_early_exit=layer, **options), None

    return run


def best_early_exit(model: PreTrainedModel, prompts: list[torch.Tensor], options: dict[str, Any]) -> tuple[int, int]:
    """The exit and the draft length with which transformers' early exit is fastest on two prompts."""
    layers = model.config.num_hidden_layers
    exits = sorted({min(3, layers - 1), min(4, layers - 1), -(-layers // 4), -(-layers // 3)})
    grid = {f"{layer} {length}": (layer, length) for layer in exits for length in (1, 2, 4)}
    ways = {name: early_exit(model, *case, options) for name, case in grid.items()}
    speeds = compare(model, ways, prompts[:2], options)
    return grid[min(grid, key=lambda name: speeds[name].ms)]


def print_ways(model: PreTrainedModel, prompts: list[torch.Tensor], options: dict[str, Any], repeats: int) -> None:
    choosing, timed = prompts[:CHOOSING], prompts[CHOOSING:]
    spec = SelfSpec.layerskip()
    for ids in choosing:  # on which exits are compared
        model.generate(ids, attention_mask=torch.ones_like(ids), assistant=spec, **options)
    choice = spec.choice(model)
    exit_layer, length = best_early_exit(model, choosing, options)
    ways: dict[str, Way] = {
        "plain generate": {},
        f"assistant_early_exit, E = {exit_layer}, {length} tokens": early_exit(model, exit_layer, length, options),
        "prompt lookup, 4 tokens": {"prompt_lookup_num_tokens": 4},
        f"SelfSpec.layerskip(), E = {choice and choice.layer}": spec,
    }
    speeds = compare(model, ways, timed, options, repeats)
    table = Table("way", "ms per token", "speed-up", "α", "M", "same ids")
    plain = speeds["plain generate"].ms
    for name, speed in speeds.items():
        rates = (f"{speed.alpha:.2f}", f"{speed.length:.2f}") if speed.runs else ("", "")
        table.row(name, f"{speed.ms:.2f}", f"{plain / speed.ms:.2f}", *rates, f"{sum(speed.same)}/{len(timed)}")
    if choice is not None:
        print(f"\nIn rounds of the prompts before the exit had {choice.speedup:.2f}.", flush=True)


def print_exits(model: PreTrainedModel, prompts: list[torch.Tensor], options: dict[str, Any], repeats: int) -> None:
    """The speed of plain generate, and of exits at several depths with drafts of three tokens."""
    layers = model.config.num_hidden_layers
    depths = {1, 2, 3, 4, layers // 4, layers // 3, layers // 2, 2 * layers // 3, 5 * layers // 6}
    exits = sorted(layer for layer in depths if 1 <= layer < layers)
    ways: dict[str, Way] = {"plain": {}, **{str(layer): SelfSpec.layerskip(layer) for layer in exits}}
    speeds = compare(model, ways, prompts[CHOOSING:], options, repeats, warm_up=prompts[:CHOOSING])
    table = Table("exit", "ms per token", "speed-up", "α", "M")
    for name, speed in speeds.items():
        rates = (f"{speed.alpha:.3f}", f"{speed.length:.2f}") if speed.runs else ("", "")
        table.row(name, f"{speed.ms:.2f}", f"{speeds['plain'].ms / speed.ms:.2f}", *rates)


def main() -> None:
    parser = parser_with(__doc__, repeats=3)
    add_trained(parser, 20)
    parser.add_argument("--by-exit", action="store_true", help="print the speed of each exit instead, greedy")
    args = parsed(parser)
    model, tokenizer = load(args.model)
    texts = {path: read_prompts(path) for path in args.data} | {"standard library": held_out_texts()}
    prompts = {name: prompts_of(of_kind, tokenizer, CHOOSING + args.prompts) for name, of_kind in texts.items()}
    about = f"{args.prompts} prompts of {PROMPT} tokens", f"{args.tokens} new tokens", f"medians of {args.repeats}"
    print_head("cpu", "float32", *about)
    for name, of_kind in prompts.items():
        if args.by_exit:
            print(f"\n### {name}\n")
            print_exits(model, of_kind, {"max_new_tokens": args.tokens, "do_sample": False}, args.repeats)
            continue
        for mode, options in MODES.items():
            print(f"\n### {name}, {mode}\n")
            print_ways(model, of_kind, {"max_new_tokens": args.tokens, **options}, args.repeats)


if __name__ == "__main__":
    main()
