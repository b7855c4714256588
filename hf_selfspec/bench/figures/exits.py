"""Speed of a trained model with drafts of its early layers, compared with transformers' ways and the attainable."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from ...errors import SettingError
from ...files import path_of, reported
from ...loading import NamedModel
from ...pictures import new_figure, save
from ...search.choice import ExitChoice
from ...selfspec import SelfSpec
from ..trained import Asked, Speed, Way, attainable, compare, without_reuse
from .figure import Figure, print_head
from .prompts import PROMPT, add_prompts, best_early_exit, column, held_out_texts, load, prompts_of

CHOOSING = 8
TEMPERATURE, TOP_P = 0.6, 0.9
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-p": {"do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0},
}
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopPLogitsWarper(TOP_P)])


def choose(asked: Asked, prompts: Sequence[torch.Tensor]) -> SelfSpec:
    """Returns a ``SelfSpec`` that has probed the model on ``prompts``."""
    spec = SelfSpec.layerskip()
    run = asked.plain(assistant=spec)
    for ids in prompts:
        run(ids)
    return spec


def row(name: str, speed: Speed, plain: Speed, notes: str = "") -> str:
    """Returns a row of the table."""
    rate = f"{speed.acceptance_rate:.2f} | {speed.mean_generated_length:.2f}" if speed.runs else " | "
    same = f"{sum(speed.same)}/{len(speed.same)}"
    ratio = plain.ms_per_token / speed.ms_per_token
    return f"| {name} | {speed.ms_per_token:.2f} | {ratio:.2f} | {rate} | {same} | {notes} |"


def tables(
    model: PreTrainedModel, sets: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]], tokens: int, repeats: int
) -> str:
    """Returns the figures of all modes and prompt sets as Markdown."""
    found = []
    for mode, options in MODES.items():
        asked = Asked(model, {"max_new_tokens": tokens, **options})
        for name, (choosing, timed) in sets.items():
            lines = [f"\n### {name}, {mode}\n", *_table(asked, choosing, timed, repeats)]
            print("\n".join(lines), flush=True)
            found += lines
    return "\n".join(found)


def _table(asked: Asked, choosing: list[torch.Tensor], timed: list[torch.Tensor], repeats: int) -> list[str]:
    model, tokens = asked.model, asked.options["max_new_tokens"]
    layers = model.config.num_hidden_layers
    spec = choose(asked, choosing)
    choice = spec.choice(model)
    if not isinstance(choice, ExitChoice):
        raise SettingError(f"--tokens {tokens} is too short for the probe; give at least 40.")
    layer = choice.layer or layers // 4
    exit_layer, length = best_early_exit(asked, choosing, layers)
    ways, specs = _ways(asked, spec, SelfSpec.layerskip(layer, stop=choice.stop), layer, (exit_layer, length))
    speeds = compare(ways, timed, repeats, specs)
    plain = speeds["plain generate"]
    notes = {
        "assistant_early_exit": f"E = {exit_layer}, {length} tokens",
        "prompt lookup": "4 tokens",
        "ours": f"E = {choice.layer}, {choice.stop}",
        "early exit only": f"E = {layer}",
    }
    head = "| way | ms per token | speed-up | α | M | same ids | |\n|---|---|---|---|---|---|---|"
    rows = [row(name, speed, plain, notes.get(name, "")) for name, speed in speeds.items()]
    texts = [asked.plain()(ids) for ids in timed]
    best = attainable(model, texts, PROMPT, WARPERS if asked.options["do_sample"] else None)
    ours = plain.ms_per_token / speeds["ours"].ms_per_token
    over = speeds["assistant_early_exit"].ms_per_token / speeds["ours"].ms_per_token
    return [
        head,
        *rows,
        f"\nAttainable (forwards alone): {best.expected_speedup:.2f} at E = {best.layer}, {best.stop}, "
        f"α {best.acceptance_rate:.2f}; ours reaches {ours / best.expected_speedup:.2f} of it, and {over:.2f}x "
        "transformers' early exit.",
    ]


def _ways(
    asked: Asked, spec: SelfSpec, given: SelfSpec, layer: int, theirs: tuple[int, int]
) -> tuple[dict[str, Way], dict[str, SelfSpec]]:
    """All ways, and the ``SelfSpec`` of those that have one."""
    only, with_reuse = SelfSpec.early_exit_only(layer), asked.plain(assistant=given)

    def without(ids: torch.Tensor) -> torch.Tensor:
        with without_reuse(asked.model):
            return with_reuse(ids)

    always, never = (f"the same exit and rule, KVQ reuse {how}" for how in ("always", "never"))
    ways = {
        "plain generate": asked.plain(),
        "assistant_early_exit": asked.early_exit(*theirs),
        "prompt lookup": asked.plain(prompt_lookup_num_tokens=4),
        "ours": asked.plain(assistant=spec),
        always: with_reuse,
        never: without,
        "early exit only": asked.plain(assistant=only),
    }
    return ways, {"ours": spec, always: given, never: given, "early exit only": only}


def by_exit(
    model: PreTrainedModel, prompts: list[torch.Tensor], exits: Sequence[int], tokens: int
) -> tuple[float, list[Speed]]:
    """Tokens per second of plain generate, and the speed of each exit with the draft length that a probe finds."""
    asked = Asked(model, {"max_new_tokens": tokens, "do_sample": False})
    specs = {str(layer): SelfSpec.layerskip(layer) for layer in exits}
    for spec in specs.values():
        for ids in prompts[:CHOOSING]:
            asked.plain(assistant=spec)(ids)
    ways = {"plain": asked.plain(), **{name: asked.plain(assistant=spec) for name, spec in specs.items()}}
    speeds = compare(ways, prompts[CHOOSING:], 1, specs)
    return 1e3 / speeds["plain"].ms_per_token, [speeds[name] for name in specs]


def drafted_rate(speed: Speed) -> float:
    """α, NaN where the probe found that no draft pays."""
    return speed.acceptance_rate if any(run.drafted for run in speed.runs) else math.nan


def plot(found: dict[str, tuple[float, list[Speed]]], exits: Sequence[int], path: str) -> None:
    """Draws tokens per second and acceptance rate by exit layer."""
    figure = new_figure("measure exits", 9, 3.5)
    speed, rate = figure.subplots(1, 2)
    for name, (plain, speeds) in found.items():
        (line,) = speed.plot(exits, [1e3 / s.ms_per_token for s in speeds], marker="o", label=name)
        speed.axhline(plain, color=line.get_color(), linestyle=":", label=f"{name}, plain generate")
        rate.plot(exits, [drafted_rate(s) for s in speeds], marker="o", label=name)
    speed.set(xlabel="exit layer", ylabel="tokens per second", ylim=(0, None))
    rate.set(xlabel="exit layer", ylabel="acceptance rate α", ylim=(0, 1))
    for axes in (speed, rate):
        axes.set_xticks(exits)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save("measure exits --plot", figure, path)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, 20)
    parser.add_argument("--output", type=path_of, help="Markdown file for the tables")
    parser.add_argument("--twin", help="a second model to compare with; needs --plot")
    parser.add_argument("--plot", help="file for a plot of speed by exit layer, instead of the tables")
    parser.add_argument("--repeats", type=int, default=3)


def _run(args: argparse.Namespace) -> None:
    tokenizer = NamedModel.find(args.model).tokenizer()
    count = CHOOSING + args.prompts
    prompts = {
        "HumanEval": prompts_of(column(args.humaneval, "prompt"), tokenizer, count),
        "standard library": prompts_of(held_out_texts(), tokenizer, count),
    }
    about = f"{args.prompts} prompts of {PROMPT} tokens", f"{args.tokens} new tokens", f"medians of {args.repeats}"
    print_head(args, "float32", *about)
    model = load(args.model)
    if args.plot is not None:
        _by_exit(args, model, prompts["standard library"])
        return
    sets = {name: (ids[:CHOOSING], ids[CHOOSING:]) for name, ids in prompts.items()}
    text = tables(model, sets, args.tokens, args.repeats)
    if args.output is not None:
        with reported(args.output):
            args.output.write_text(f"`{args.command}`\n{text}\n", encoding="utf-8")


def _by_exit(args: argparse.Namespace, model: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    layers = model.config.num_hidden_layers
    some = {1, 2, 3, 4, layers // 4, layers // 3, layers // 2, 2 * layers // 3, 5 * layers // 6}
    exits = sorted(layer for layer in some if 1 <= layer < layers)
    models = {"LayerSkip": model} | ({} if args.twin is None else {"twin": load(args.twin)})
    found = {name: by_exit(one, prompts, exits, args.tokens) for name, one in models.items()}
    for name, (plain, speeds) in found.items():
        print(f"{name}: plain {plain:.1f} tokens/s")
        for layer, speed in zip(exits, speeds, strict=True):
            print(f"  exit {layer}: {1e3 / speed.ms_per_token:.1f} tokens/s, α {drafted_rate(speed):.2f}")
    plot(found, exits, args.plot)


_DESCRIPTION = (
    "Prompts are the first 64 tokens of HumanEval tasks and of held-out files of the standard library. Everything is "
    "timed in turn, prompt by prompt, in float32. The exit and draft length of each way are chosen on "
    "prompts other than the timed ones."
)
FIGURE = Figure("a trained model's early exits, transformers' and what is attainable", _add_options, _run, _DESCRIPTION)
