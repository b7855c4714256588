"""Efficiency of the engine on random models whose drafts agree at a set rate: what speculation costs beside forwards.

By batch size: ``--rows 1 4 8``; by context: ``--prompt 512 8192``.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from synthetic import LlamaShape, add_random_models, exit_damping, known_skips_llama, random_prompt, shapes
from timing import Sample, Timings, interleave, print_head, print_row, print_table_head, timed_generate
from transformers import LlamaForCausalLM

from hf_selfspec import ClosestLayers, EarlyExit, FixedLength, SelfSpec, SkipLayers

# How often an early exit, and the known set, should agree with the model.
EXIT_AGREEMENT, SET_AGREEMENT = 0.8, 0.95
SEARCH_PROMPT = 64
COLUMNS = (
    "case", "plain ms/token", "ours ms/token", "spread", "α", "M", "c", "verify", "speed-up", "expected", "efficiency",
    "outside",
)  # fmt: skip


def add_drafts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        choices=("exit", "skips", "search"),
        default="exit",
        help="an early exit; skipping the known half of the blocks, which hardly matter; or a search for these blocks",
    )
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens")


def spec_of(args: argparse.Namespace) -> SelfSpec:
    """The draft of the chosen kind, without the model's known set."""
    if args.draft == "exit":
        return SelfSpec(EarlyExit(args.exit_layer), FixedLength(args.num_draft))
    if args.draft == "search":
        return SelfSpec(SkipLayers(search=ClosestLayers()))
    return SelfSpec(SkipLayers(), FixedLength(args.num_draft))


def model_and_spec(args: argparse.Namespace, shape: LlamaShape) -> tuple[LlamaForCausalLM, SelfSpec]:
    """The model with a set agreement, and the draft; a search ends before anything is timed."""
    if args.draft == "exit":
        factor = exit_damping(shape, args.exit_layer, args.num_draft, args.agreement or EXIT_AGREEMENT)
        return shape.damped(args.exit_layer, factor), spec_of(args)
    model, known = known_skips_llama(shape, num_draft=args.num_draft, agreement=args.agreement or SET_AGREEMENT)
    if args.draft == "skips":
        return model, SelfSpec(known, FixedLength(args.num_draft))
    spec = spec_of(args)
    while spec.stats is None or spec.stats.phase == "optimization":
        prompt = random_prompt(model, 1, SEARCH_PROMPT)
        model.generate(**prompt, max_new_tokens=args.tokens, do_sample=False, assistant=spec)
    return model, spec


def figures(plain: Timings, ours: Timings) -> list[str]:
    """The cells of a row: decoding only, medians; drafting and verifying in one-token steps of plain ``generate``."""
    runs = [sample.result for sample in ours.samples]
    step, m, alpha = plain.median(), runs[-1].mean_generated_length, runs[-1].acceptance_rate
    draft = statistics.median(run.draft_seconds / run.draft_steps for run in runs) / step
    verify = statistics.median(run.verify_seconds / run.verify_passes for run in runs) / step
    # SWIFT's equation 6 with this c.
    expected, speedup = m * alpha / ((m - 1) * draft + alpha), step / ours.median()
    outside = statistics.median(1 - run.forward_seconds / run.total_seconds for run in runs)
    milliseconds = [f"{1e3 * one.median():.2f}" for one in (plain, ours)]
    cells = [*milliseconds, f"±{max(plain.spread(), ours.spread()):.0%}", f"{alpha:.2f}", f"{m:.2f}", f"{draft:.3f}"]
    cells += [f"{verify:.3f}", f"{speedup:.2f}", f"{expected:.2f}", f"{speedup / expected:.2f}", f"{outside:.1%}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_random_models(parser)
    add_drafts(parser)
    agreements = f"by default {EXIT_AGREEMENT} for an exit, {SET_AGREEMENT} for the known set"
    parser.add_argument("--agreement", type=float, help=f"how often drafts agree, {agreements}")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="batch sizes")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64], help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print_head(args.device, "synthetic acceptance", f"{args.tokens} new tokens, greedy")
    print_table_head(*COLUMNS)
    options = {"max_new_tokens": args.tokens, "do_sample": False}
    for name, shape in shapes(args):
        model, spec = model_and_spec(args, shape)
        for rows in args.rows:
            for prompt in args.prompt:
                inputs = random_prompt(model, rows, prompt)

                def ours(model: LlamaForCausalLM = model, inputs: dict = inputs, spec: SelfSpec = spec) -> Sample:
                    sample = timed_generate(model, inputs, assistant=spec, **options)
                    sample.result = spec.stats
                    return sample

                def plain(model: LlamaForCausalLM = model, inputs: dict = inputs) -> Sample:
                    return timed_generate(model, inputs, **options)

                timings = interleave({"plain": plain, "ours": ours}, args.repeats)
                print_row(f"{name}, batch {rows}, prompt {prompt}", *figures(*timings.values()))


if __name__ == "__main__":
    main()
