"""What a round takes beside forwards, by batch size, where drafts are as large as on a GPU: up to 256 tokens of all
rows are taken to cost as much as one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from corpus import held_out_texts
from timing import Table, add_trained, load, parsed, parser_with, print_head, prompts_of

from hf_selfspec import GenerationStats, SelfSpec
from hf_selfspec.drafts.controller import FREE, Controller
from hf_selfspec.drafts.cost_curve import CostCurve
from hf_selfspec.train.loading import read_prompts

TOGETHER, MOST = 256, 31


@contextmanager
def drafts_are_free(rows: int) -> Iterator[None]:
    """Gives rounds of all sizes nearly the cost of a plain one."""
    flat = tuple(1.0 + count / 2000 for count in range(max(1, min(MOST, TOGETHER // rows - 1)) + 1))
    with (
        patch.multiple(CostCurve, _measured=lambda self: flat, pace=property(lambda self: float(rows))),
        patch.object(Controller, "speedup", lambda self, name, promised=None: 2.0 * (name == FREE)),
    ):
        yield


def cells(runs: list[GenerationStats], rows: int) -> list[str]:
    by_run = []
    for run in runs:
        outside = run.total_seconds - run.forward_seconds
        judging = run.verify_seconds + run.prefill_seconds - run.forward_seconds  # in the verification, not its forward
        parts = outside, run.draft_seconds, judging, run.search_seconds, run.other_seconds
        counts = run.drafted / rows, run.accepted / rows
        by_run.append([figure / run.verify_passes for figure in (*(1e3 * part for part in parts), *counts)])
    return [f"{statistics.median(values):.2f}" for values in zip(*by_run, strict=True)]


def main() -> None:
    parser = parser_with(__doc__, rows=[1, 4, 16, 32])
    add_trained(parser, prompts=4)
    args = parsed(parser)
    model, tokenizer = load(args.model)
    texts = [text for path in args.data for text in read_prompts(path)] or held_out_texts()
    print_head("cpu", f"{args.prompts} batches, {args.tokens} new tokens, greedy; medians, milliseconds a round")
    table = Table("rows", "all", "draft", "verify", "learn", "commit", "drafted a row", "accepted")
    for rows in args.rows:
        spec, runs = SelfSpec(), []
        for batch in torch.cat(prompts_of(texts, tokenizer, rows * args.prompts)).split(rows):
            options = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}
            with drafts_are_free(rows):
                model.generate(batch, attention_mask=torch.ones_like(batch), **options, assistant=spec)
            runs.append(spec.stats)
        table.row(str(rows), *cells(runs[1:] or runs, rows))


if __name__ == "__main__":
    main()
