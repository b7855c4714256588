"""Efficiency of the engine on random models whose drafts agree at a set rate: what speculation costs beside forwards.

By batch size: ``--rows 1 4 8``; by context: ``--prompt 512 8192``.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from synthetic import LlamaShape, add_random_models, exit_damping, known_skips_llama, random_prompt, shapes
from timing import Table, Timings, interleave, parsed, parser_with, print_head, timed_generate
from transformers import LlamaForCausalLM

from hf_selfspec import EarlyExit, FixedLength, SelfSpec

# How often an early exit, and drafts that skip the half of the blocks which hardly matters, agree with the model.
AGREEMENT = {"exit": 0.8, "skips": 0.95}
COLUMNS = (
    "case", "plain ms/token", "ours ms/token", "α", "M", "c", "verify", "speed-up", "expected", "efficiency", "outside",
)  # fmt: skip


def model_and_spec(args: argparse.Namespace, shape: LlamaShape) -> tuple[LlamaForCausalLM, SelfSpec]:
    """The model with a set agreement, and the draft."""
    agreement, stop = AGREEMENT[args.draft], FixedLength(args.num_draft)
    if args.draft == "exit":
        factor = exit_damping(shape, args.exit_layer, args.num_draft, agreement)
        return shape.damped(args.exit_layer, factor), SelfSpec(EarlyExit(args.exit_layer), stop)
    model, skips = known_skips_llama(shape, num_draft=args.num_draft, agreement=agreement)
    return model, SelfSpec(skips, stop)


def figures(plain: Timings, ours: Timings) -> list[str]:
    """The cells of a row: decoding only, medians; drafting and verifying in one-token steps of plain ``generate``."""
    runs = [sample.stats for sample in ours.samples]
    step, m, alpha = plain.median(), runs[-1].mean_generated_length, runs[-1].acceptance_rate
    draft = statistics.median(run.draft_seconds / run.draft_steps for run in runs) / step
    verify = statistics.median(run.verify_seconds / run.verify_passes for run in runs) / step
    # SWIFT's equation 6 with this c.
    expected, speedup = m * alpha / ((m - 1) * draft + alpha), step / ours.median()
    outside = statistics.median(1 - run.forward_seconds / run.total_seconds for run in runs)
    cells = [f"{1e3 * step:.2f}", f"{1e3 * ours.median():.2f}", f"{alpha:.2f}", f"{m:.2f}", f"{draft:.3f}"]
    return [*cells, f"{verify:.3f}", f"{speedup:.2f}", f"{expected:.2f}", f"{speedup / expected:.2f}", f"{outside:.1%}"]


def main() -> None:
    parser = parser_with(__doc__, rows=[1], prompt=[64], exit_layer=4, num_draft=4, tokens=96, repeats=7)
    add_random_models(parser)
    parser.add_argument("--draft", choices=AGREEMENT, default="exit", help="an early exit, or skipped blocks")
    args = parsed(parser)
    print_head(args.device, "synthetic acceptance", f"{args.tokens} new tokens, greedy")
    table = Table(*COLUMNS)
    options = {"max_new_tokens": args.tokens, "do_sample": False}
    for name, shape in shapes(args):
        model, spec = model_and_spec(args, shape)
        for rows in args.rows:
            for prompt in args.prompt:
                call = partial(timed_generate, model, random_prompt(model, rows, prompt), **options)
                timings = interleave({"plain": call, "ours": partial(call, assistant=spec)}, args.repeats)
                table.row(f"{name}, batch {rows}, prompt {prompt}", *figures(*timings.values()))


if __name__ == "__main__":
    main()
