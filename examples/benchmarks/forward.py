"""Our forwards over 1 to 32 tokens, in units of transformers' own over one."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from synthetic import add_random_models, shapes
from timing import print_head, print_row, print_table_head
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import cache_for
from hf_selfspec.model.prompt import cache_name
from hf_selfspec.model.target import Target
from hf_selfspec.search.forward_costs import seconds_of

COUNTS = (1, 2, 3, 4, 8, 16, 32)


@torch.inference_mode()
def forward_seconds(model: PreTrainedModel, context: int, repeats: int) -> dict[str, dict[int, float]]:
    """Median seconds by number of tokens of forwards that continue the same random tokens, in turn."""
    shape = 1, context + max(COUNTS)
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)
    found: dict[str, dict[int, list[float]]] = {
        whose: {count: [] for count in COUNTS} for whose in ("transformers", "ours")
    }
    cache = DynamicCache(config=model.config)
    past: dict[str, Any] = {"use_cache": True, cache_name(model): cache}
    model(ids[:, :context], logits_to_keep=1, **past)
    anatomy = Anatomy.of(model)
    target = Target(model, anatomy, cache_for(model, anatomy, 1, ids.shape[1]))
    with target.prepared():
        target.prefill(ids[:, :context], [0], [context])
    for _ in range(1 + repeats):
        for count in COUNTS:
            tokens = ids[:, context : context + count]
            plain = seconds_of(lambda: model(tokens, **past), ids.device)  # noqa: B023
            found["transformers"][count].append(plain)
            cache.crop(-count)
            with target.prepared():
                found["ours"][count].append(seconds_of(lambda: target.step(tokens, [context]), ids.device))  # noqa: B023
    return {whose: {count: statistics.median(times[1:]) for count, times in of.items()} for whose, of in found.items()}


def models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel]]:
    if args.model is None:
        for name, shape in shapes(args):
            yield name, shape.model()
        return
    for dtype in args.dtype:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).eval()
        yield f"{args.model}, {dtype}", model.to(args.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_random_models(parser)
    parser.add_argument("--model", help="folder or name of the model; random models by default")
    parser.add_argument("--prompt", type=int, default=300, help="number of tokens before")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print_head(args.device, f"{args.prompt} tokens before", f"medians of {args.repeats}")
    print_table_head("forward, in transformers' over one token", *map(str, COUNTS))
    for name, model in models(args):
        found = forward_seconds(model, args.prompt, args.repeats)
        for whose, seconds in found.items():
            print_row(f"{name}, {whose}", *(f"{seconds[count] / found['transformers'][1]:.2f}" for count in COUNTS))


if __name__ == "__main__":
    main()
