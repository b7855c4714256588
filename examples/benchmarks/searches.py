"""Searches for layers to skip on a stream of prompts, without any training.

A stream is the texts of ``--data`` and held-out files of the standard library in turn, 64 tokens of each, greedy,
float32. Each way of generating sees the whole stream, prompt by prompt in turn with the others, and learns meanwhile.
With ``--change`` the stream is those texts first and others afterwards.
"""

from __future__ import annotations

import argparse
from itertools import chain

import torch
from corpus import held_out_texts
from timing import (
    Speed,
    Way,
    add_trained,
    best_early_exit,
    compare,
    early_exit,
    load,
    print_head,
    print_row,
    print_table_head,
    prompts_of,
)
from transformers import PreTrainedModel

from hf_selfspec import ClosestLayers, ConfidenceThreshold, CostTree, FixedLength, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.data.prompts import read_prompts

LONGEST = 25
# Prompts between two rows of the table of a change.
STAGE = 10


def specs_of_stream() -> dict[str, SelfSpec]:
    """The measured ``SelfSpec``s; the last ones show what each part of SWIFT brings (Table 8)."""
    return {
        "SelfSpec()": SelfSpec(),
        "layers": SelfSpec(SkipLayers(search=ClosestLayers())),
        "layers, CostTree": SelfSpec(SkipLayers(search=ClosestLayers()), tree=CostTree()),
        "swift()": SelfSpec.swift(),
        "swift(), the paper's tree": SelfSpec.swift(tree=TopKTree()),
        "swift(), CostTree": SelfSpec.swift(tree=CostTree()),
        "swift(), no early stop": SelfSpec.swift(stop=FixedLength(LONGEST)),
        "no search": SelfSpec(SkipLayers(), ConfidenceThreshold()),
    }


def after_the_search(speed: Speed, plain: Speed) -> str:
    """Speed-up in the calls that began after the search had ended."""
    phases = ["", *(run.phase for run in speed.runs[:-1])]
    chosen = [index for index, phase in enumerate(phases) if phase == "acceleration"]
    ours, theirs = (sum(one.seconds[index] for index in chosen) for one in (speed, plain))
    return f"{theirs / ours:.2f}" if chosen else "-"


def stream_table(model: PreTrainedModel, prompts: list[torch.Tensor], tokens: int) -> dict[str, SelfSpec]:
    """Prints all ways on one stream; returns the ``SelfSpec``s."""
    options = {"max_new_tokens": tokens, "do_sample": False}
    exit_layer, length = best_early_exit(model, prompts, options)
    specs = specs_of_stream()
    ways: dict[str, Way] = {
        "plain generate": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        f"assistant_early_exit, E = {exit_layer}": early_exit(model, exit_layer, length, options),
        **specs,
    }
    speeds = compare(model, ways, prompts, options, warm_up=False)
    plain = speeds["plain generate"]
    print_table_head("way", "ms per token", "speed-up", "after the search", "α", "M", "search", "same ids", "set")
    for name, speed in speeds.items():
        cells, chosen = [""] * 4, ""
        if speed.runs:
            share = sum(run.search_seconds for run in speed.runs) / sum(run.total_seconds for run in speed.runs)
            cells = [after_the_search(speed, plain), f"{speed.alpha:.2f}", f"{speed.length:.2f}", f"{share:.1%}"]
            chosen = f"`{speed.runs[-1].plan}`"
        same = f"{sum(speed.same)}/{len(prompts)}"
        print_row(name, f"{speed.ms:.2f}", f"{plain.ms / speed.ms:.2f}", *cells, same, chosen)
    choice = specs["layers"].choice(model)
    promised = "" if choice is None else f"{choice.stop}, drafts: {choice.drafts}, promised {choice.expected_speedup}"
    print(f"\nThe search chose {promised or 'nothing yet'}.", flush=True)
    return specs


def change_table(model: PreTrainedModel, before: list[torch.Tensor], after: list[torch.Tensor], tokens: int) -> None:
    """Prints α and speed-up before and after a change of text, with one search and with the set found before it."""
    options = {"max_new_tokens": tokens, "do_sample": False}
    ways: dict[str, Way] = {"plain": {}, "ours": SelfSpec(SkipLayers(search=ClosestLayers()))}
    print_table_head("texts", "speed-up", "α", "M", "tries", "set kept: speed-up", "α")
    for what, texts in (("before", before), ("after", after)):
        if what == "after" and (choice := ways["ours"].choice(model)) is not None:
            draft = SkipLayers(tuple(choice.plan.skipped_attention), tuple(choice.plan.skipped_mlp))
            ways["kept"] = SelfSpec(draft, choice.stop)
        for start in range(0, len(texts), STAGE):
            speeds = compare(model, ways, texts[start : start + STAGE], options, warm_up=False)
            plain, ours = speeds["plain"].ms, speeds["ours"]
            cells = [f"{plain / ours.ms:.2f}", f"{ours.alpha:.2f}", f"{ours.length:.2f}"]
            kept = speeds.get("kept")
            also = ["", ""] if kept is None else [f"{plain / kept.ms:.2f}", f"{kept.alpha:.2f}"]
            print_row(f"{what}, from {start + 1}", *cells, str(len(ours.runs[-1].matchness)), *also)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained(parser, 30)
    parser.add_argument("--change", help="file of other prompts: measure a change of text instead")
    parser.add_argument("--plot", help="file for a plot of the search and its speed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    kinds = [*map(read_prompts, args.data), held_out_texts()]
    prompts = [prompts_of(texts, tokenizer, args.prompts) for texts in kinds]
    print_head("cpu", "float32", f"{args.tokens} new tokens, greedy")
    if args.change is not None:
        change_table(model, prompts[0], prompts_of(read_prompts(args.change), tokenizer, args.prompts), args.tokens)
        return
    specs = stream_table(model, list(chain(*zip(*prompts, strict=True))), args.tokens)
    if args.plot is not None:
        specs["layers"].plot(args.plot)


if __name__ == "__main__":
    main()
