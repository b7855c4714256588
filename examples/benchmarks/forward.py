"""Our forwards over 1 to 32 tokens, in units of transformers' own over one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from synthetic import add_random_models, random_prompt, shapes
from timing import Table, medians, parsed, parser_with, print_head
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import cache_for
from hf_selfspec.model.prompt import cache_name
from hf_selfspec.model.target import Target

COUNTS = (1, 2, 3, 4, 8, 16, 32)


@torch.no_grad()
def forward_seconds(model: PreTrainedModel, context: int, repeats: int) -> dict[tuple[str, int], float]:
    """Median seconds, by whose and over how many tokens, of forwards that continue the same random tokens, in turn."""
    ids, tokens = random_prompt(model, 1, context + COUNTS[-1])["input_ids"].split([context, COUNTS[-1]], dim=1)
    anatomy, cache = Anatomy.of(model), DynamicCache(config=model.config)
    past: dict[str, Any] = {"use_cache": True, cache_name(model): cache}
    model(ids, logits_to_keep=1, **past)
    target = Target(model, anatomy, cache_for(model, anatomy, 1, context + COUNTS[-1]))
    with target.prepared():
        target.prefill(ids, [0], [context])

    def plain(count: int) -> None:
        model(tokens[:, :count], **past)
        cache.crop(-count)

    def ours(count: int) -> None:
        target.step(tokens[:, :count], [context])

    # Each in its context.
    whose: dict[str, Any] = {"transformers": (plain, nullcontext), "ours": (ours, target.prepared)}
    runs = {(name, count): partial(run, count) for name, (run, _) in whose.items() for count in COUNTS}
    return medians(runs, repeats, model.device, lambda name: whose[name[0]][1]())


def models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel]]:
    if args.model is None:
        yield from ((name, shape.model()) for name, shape in shapes(args))
        return
    for dtype in args.dtype:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
        yield f"{args.model}, {dtype}", model.to(args.device)


def main() -> None:
    parser = parser_with(__doc__, prompt=300, repeats=7)
    add_random_models(parser)
    parser.add_argument("--model", help="folder or name of the model; random models by default")
    args = parsed(parser)
    print_head(args.device, f"{args.prompt} tokens before", f"medians of {args.repeats}")
    table = Table("forward, in transformers' over one token", *map(str, COUNTS))
    for name, model in models(args):
        seconds = forward_seconds(model, args.prompt, args.repeats)
        for whose in ("transformers", "ours"):
            shares = (seconds[whose, count] / seconds["transformers", 1] for count in COUNTS)
            table.row(f"{name}, {whose}", *(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
