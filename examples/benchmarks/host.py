"""What a round takes beside forwards, by batch size, where drafts are as large as on a GPU: up to 256 tokens of all
rows are taken to cost as much as one."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from corpus import held_out_texts
from timing import add_trained, load, print_head, print_row, print_table_head, prompts_of

from hf_selfspec import GenerationStats, SelfSpec
from hf_selfspec.control.controller import FREE, Controller
from hf_selfspec.control.cost_curve import CostCurve
from hf_selfspec.data.prompts import read_prompts

TOGETHER, MOST = 256, 31


@contextmanager
def drafts_are_free(rows: int) -> Iterator[None]:
    """Gives rounds of all sizes nearly the cost of a plain one."""
    flat = tuple(1.0 + count / 2000 for count in range(max(1, min(MOST, TOGETHER // rows - 1)) + 1))
    with (
        patch.multiple(CostCurve, _measured=lambda self: flat, pace=property(lambda self: float(rows))),
        patch.object(Controller, "pays", lambda self, name, promised=None: name == FREE),
    ):
        yield


def cells(runs: list[GenerationStats], rows: int) -> list[str]:
    found = []
    for run in runs:
        judged = run.verify_seconds + run.prefill_seconds - run.forward_seconds  # in the verification, not its forward
        parts = (
            run.total_seconds - run.forward_seconds,
            run.draft_seconds,
            judged,
            run.search_seconds,
            run.other_seconds,
        )
        found.append([1e3 * part / run.verify_passes for part in parts])
        found[-1] += [count / run.verify_passes / rows for count in (run.drafted, run.accepted)]
    return [f"{statistics.median(values):.2f}" for values in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_trained(parser, prompts=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32], help="batch sizes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    texts = [text for path in args.data for text in read_prompts(path)] or held_out_texts()
    print_head("cpu", f"{args.prompts} batches, {args.tokens} new tokens, greedy; medians, milliseconds a round")
    print_table_head("rows", "all", "draft", "verify", "learn", "commit", "drafted a row", "accepted")
    for rows in args.rows:
        spec, runs = SelfSpec(), []
        for batch in torch.cat(prompts_of(texts, tokenizer, rows * args.prompts)).split(rows):
            options = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
            with drafts_are_free(rows):
                model.generate(batch, attention_mask=torch.ones_like(batch), **options, assistant=spec)
            runs.append(spec.stats)
        print_row(str(rows), *cells(runs[1:] or runs, rows))


if __name__ == "__main__":
    main()
