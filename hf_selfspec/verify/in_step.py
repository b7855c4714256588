"""Verification for logits processors and stopping criteria that keep a state: all rows advance together."""

from itertools import count

import torch

from ..batch import Draft, Text, Verdict
from .acceptance import choose_greedy, choose_sampled
from .scoring import Scorer
from .stopping import Stopper


def verify_in_step(
    text: Text,
    draft: Draft,
    logits: torch.Tensor,
    scorer: Scorer,
    stopper: Stopper,
    done: list[bool],
    steps: list[torch.Tensor] | None,
    pad_token: int,
) -> list[Verdict]:
    """Walks all rows through their drafts together until one disagrees, so all get the same number of tokens;
    processors and criteria are called for the whole batch as by plain ``generate``."""
    choose = choose_sampled if scorer.do_sample else choose_greedy
    drafted, rows = draft.tokens.tolist(), range(text.batch_size)
    verdicts = [Verdict([], [], False, []) for _ in rows]
    nodes = [0 for _ in rows]
    for ahead in count():
        at_nodes = logits[torch.arange(len(nodes), device=logits.device), nodes]
        scores = scorer.in_step(text.with_draft(ahead).clone(), at_nodes)
        if steps is not None:
            steps.append(scores)
        goes_on = True
        for row in rows:
            if done[row]:
                text.put_one(row, ahead, pad_token)
                continue
            children = draft.children(row, nodes[row])
            q = draft.candidates(row, nodes[row], children)
            token, index = choose(scores[row], [drafted[row][child - 1] for child in children], *q)
            text.put_one(row, ahead, token)
            node = -1 if index is None else children[index]
            verdicts[row].add(token, node, nodes[row])
            goes_on &= node >= 0
            nodes[row] = max(node, 0)
        ended = stopper.in_step(text.with_draft(ahead + 1).clone(), steps)
        for verdict, end, was_done in zip(verdicts, ended, done, strict=True):
            verdict.stopped = end and not was_done
            goes_on &= not verdict.stopped
        if not goes_on:
            return verdicts
    raise AssertionError("a draft ends")
