"""Efficiency of the engine on random models whose early exit agrees at a set rate."""

from __future__ import annotations

import argparse

from transformers import LlamaForCausalLM

from ...draft.early_exit import EarlyExit
from ...draft.skip_layers import SkipLayers
from ...search.on_the_fly import ClosestLayers
from ...selfspec import SelfSpec
from ...stop.rules import FixedLength
from ..engine import EngineFigures, engine_figures
from ..synthetic import LlamaShape, damped_llama, known_skips_llama, random_prompt
from .figure import Figure, add_cases, add_random_models, print_head, print_row, print_table_head, shapes

# How often an early exit, and the known set, should agree with the model.
_EXIT_AGREEMENT, _SET_AGREEMENT = 0.8, 0.95
_SEARCH_PROMPT = 64
_COLUMNS = (
    "case", "plain ms/token", "ours ms/token", "spread", "α", "M", "c", "verify", "speed-up", "expected", "efficiency",
    "outside",
)  # fmt: skip


def add_drafts(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the draft."""
    parser.add_argument(
        "--draft",
        choices=("exit", "skips", "search"),
        default="exit",
        help="an early exit; skipping the known half of the blocks, which hardly matter; or a search for these blocks",
    )
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares all options but the cases."""
    add_random_models(parser)
    add_drafts(parser)
    parser.add_argument(
        "--agreement",
        type=float,
        help=f"how often drafts agree, by default {_EXIT_AGREEMENT} for an exit, {_SET_AGREEMENT} for the known set",
    )
    parser.add_argument("--repeats", type=int, default=7)


def spec_of(args: argparse.Namespace) -> SelfSpec:
    """The draft of the chosen kind, without the model's known set."""
    if args.draft == "exit":
        return SelfSpec(EarlyExit(args.exit_layer), FixedLength(args.num_draft))
    if args.draft == "search":
        return SelfSpec(SkipLayers(search=ClosestLayers()))
    return SelfSpec(SkipLayers(), FixedLength(args.num_draft))


def _model_and_spec(args: argparse.Namespace, shape: LlamaShape) -> tuple[LlamaForCausalLM, SelfSpec]:
    """The model with a set agreement, and the draft; a search ends before anything is timed."""
    if args.draft == "exit":
        agreement = args.agreement or _EXIT_AGREEMENT
        return damped_llama(shape, args.exit_layer, args.num_draft, agreement)[0], spec_of(args)
    agreement = args.agreement or _SET_AGREEMENT
    model, known, _ = known_skips_llama(shape, num_draft=args.num_draft, agreement=agreement)
    if args.draft == "skips":
        return model, SelfSpec(known, FixedLength(args.num_draft))
    spec = spec_of(args)
    while spec.stats is None or spec.stats.phase == "optimization":
        prompt = random_prompt(model, 1, _SEARCH_PROMPT)
        model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False, assistant=spec)
    return model, spec


def _cells(figures: EngineFigures) -> list[str]:
    return [
        f"{figures.plain_ms:.2f}",
        f"{figures.ours_ms:.2f}",
        f"±{figures.spread:.0%}",
        f"{figures.acceptance_rate:.2f}",
        f"{figures.mean_generated_length:.2f}",
        f"{figures.draft_cost:.3f}",
        f"{figures.verify_cost:.3f}",
        f"{figures.speedup:.2f}",
        f"{figures.expected:.2f}",
        f"{figures.efficiency:.2f}",
        f"{figures.outside:.1%}",
    ]


def run(args: argparse.Namespace) -> None:
    """Measures all models and cases."""
    print_head(args, "synthetic acceptance", f"{args.tokens} new tokens, greedy")
    print_table_head(*_COLUMNS)
    for name, shape in shapes(args):
        model, spec = _model_and_spec(args, shape)
        for rows in args.rows:
            for prompt in args.prompt:
                figures = engine_figures(model, spec, rows, prompt, args.tokens, args.repeats)
                print_row(f"{name}, batch {rows}, prompt {prompt}", *_cells(figures))


def figure(help_: str, rows: tuple[int, ...], prompts: tuple[int, ...]) -> Figure:
    """Returns the same measurement with other default cases."""

    def options(parser: argparse.ArgumentParser) -> None:
        add_options(parser)
        add_cases(parser, rows, prompts)

    return Figure(help_, options, run)


FIGURE = figure("efficiency, one prompt at a time", (1,), (64,))
