"""A trained model's early exits: speed compared with transformers' own ways, and what the probe promised.

Prompts are the first 64 tokens of each text of ``--data`` and of held-out files of the standard library. Everything is
timed in turn, prompt by prompt, in float32. The exit and draft length of each way are chosen on prompts other than the
timed ones. ``--plot`` draws speed and acceptance by exit layer instead.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from corpus import held_out_texts
from timing import (
    PROMPT,
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

from hf_selfspec import SelfSpec
from hf_selfspec.data.prompts import read_prompts

CHOOSING = 8
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0},
}


def probed(model: PreTrainedModel, spec: SelfSpec, prompts: list[torch.Tensor], options: dict[str, Any]) -> SelfSpec:
    """The ``SelfSpec`` after it has probed the model on ``prompts``."""
    for ids in prompts:
        model.generate(ids, attention_mask=torch.ones_like(ids), assistant=spec, **options)
    return spec


def table(model: PreTrainedModel, prompts: list[torch.Tensor], options: dict[str, Any], repeats: int) -> None:
    choosing, timed = prompts[:CHOOSING], prompts[CHOOSING:]
    spec = probed(model, SelfSpec.layerskip(), choosing, options)
    choice = spec.choice(model)
    layer = choice.layer or model.config.num_hidden_layers // 4
    exit_layer, length = best_early_exit(model, choosing, options)
    ways: dict[str, Way] = {
        "plain generate": {},
        f"assistant_early_exit, E = {exit_layer}, {length} tokens": early_exit(model, exit_layer, length, options),
        "prompt lookup, 4 tokens": {"prompt_lookup_num_tokens": 4},
        f"SelfSpec.layerskip(), E = {choice.layer}, {choice.stop}": spec,
        f"early exit only, E = {layer}": SelfSpec.early_exit_only(layer),
    }
    speeds = compare(model, ways, timed, options, repeats)
    print_table_head("way", "ms per token", "speed-up", "α", "M", "same ids")
    plain = speeds["plain generate"].ms
    for name, speed in speeds.items():
        rates = (f"{speed.alpha:.2f}", f"{speed.length:.2f}") if speed.runs else ("", "")
        print_row(name, f"{speed.ms:.2f}", f"{plain / speed.ms:.2f}", *rates, f"{sum(speed.same)}/{len(timed)}")
    print(f"\nThe probe promised {choice.expected_speedup or 1:.2f} on the prompts before.", flush=True)


def by_exit(model: PreTrainedModel, prompts: list[torch.Tensor], exits: list[int], tokens: int) -> dict[str, Speed]:
    """The speed of plain generate, and of each exit with the draft length that a probe finds."""
    options = {"max_new_tokens": tokens, "do_sample": False}
    specs = {str(layer): SelfSpec.layerskip(layer) for layer in exits}
    for spec in specs.values():
        probed(model, spec, prompts[:CHOOSING], options)
    return compare(model, {"plain": {}, **specs}, prompts[CHOOSING:], options)


def plot(found: dict[str, dict[str, Speed]], exits: list[int], path: str) -> None:
    """Draws tokens per second and acceptance rate by exit layer; no α where the probe found that no draft pays."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (speed, rate) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, speeds in found.items():
        plain, *others = speeds.values()
        (line,) = speed.plot(exits, [1e3 / one.ms for one in others], marker="o", label=name)
        speed.axhline(1e3 / plain.ms, color=line.get_color(), linestyle=":", label=f"{name}, plain generate")
        drafted = [any(run.drafted for run in one.runs) for one in others]
        rates = [one.alpha if drafts else math.nan for one, drafts in zip(others, drafted, strict=True)]
        rate.plot(exits, rates, marker="o", label=name)
    speed.set(xlabel="exit layer", ylabel="tokens per second", ylim=(0, None))
    rate.set(xlabel="exit layer", ylabel="acceptance rate α", ylim=(0, 1))
    for axes in (speed, rate):
        axes.set_xticks(exits)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained(parser, 20)
    parser.add_argument("--twin", help="a second model to compare with in the plot")
    parser.add_argument("--plot", help="file for a plot of speed by exit layer, instead of the tables")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    texts = {path: read_prompts(path) for path in args.data} | {"standard library": held_out_texts()}
    prompts = {name: prompts_of(of_kind, tokenizer, CHOOSING + args.prompts) for name, of_kind in texts.items()}
    about = f"{args.prompts} prompts of {PROMPT} tokens", f"{args.tokens} new tokens", f"medians of {args.repeats}"
    print_head("cpu", "float32", *about)
    if args.plot is None:
        for name, of_kind in prompts.items():
            for mode, options in MODES.items():
                print(f"\n### {name}, {mode}\n")
                table(model, of_kind, {"max_new_tokens": args.tokens, **options}, args.repeats)
        return
    layers = model.config.num_hidden_layers
    some = {1, 2, 3, 4, layers // 4, layers // 3, layers // 2, 2 * layers // 3, 5 * layers // 6}
    exits = sorted(layer for layer in some if 1 <= layer < layers)
    models = {"LayerSkip": model} | ({} if args.twin is None else {"twin": load(args.twin)[0]})
    library = prompts["standard library"]
    plot({name: by_exit(one, library, exits, args.tokens) for name, one in models.items()}, exits, args.plot)


if __name__ == "__main__":
    main()
