"""From the full model's logits over a draft to the tokens that follow."""

from __future__ import annotations

import torch

from ..types import Draft, Text, Verdict
from .greedy import best_tokens, choose_greedy
from .sampling import choose_sampled
from .scoring import Scorer
from .stopping import Stopper


def verify(
    text: Text,
    draft: Draft,
    logits: torch.Tensor,
    scorer: Scorer,
    stopper: Stopper,
    done: list[bool],
    scores_so_far: list[list[torch.Tensor]] | None,
) -> list[Verdict]:
    """Walks each row from its last token through the draft as far as the full model agrees.

    Args:
        text: the batch; columns after each row's length are used as scratch.
        draft: ``t`` drafted tokens after each row's last one.
        logits: ``[b, t + 1, v]`` the full model's logits at the last token and at each drafted one.
        scorer: logits processors; the tokens are chosen from its scores.
        stopper: stopping criteria, tested after each token; the walk ends where one is met.
        done: rows that have ended; their verdict is empty.
        scores_so_far: for each row the scores of its tokens, if they are recorded: criteria may look at them.

    Returns:
        A verdict for each row.
    """
    # Scores that do not depend on the prefix are computed for all nodes at once, and greedy ones moved at once. A CPU
    # computes those to draw from one by one: top-p sorts the vocabulary for each; none is needed behind a rejection.
    at_once = scorer.prefix_free and not (scorer.do_sample and logits.device.type == "cpu")
    scores = scorer.everywhere(logits) if at_once else None
    best = best_tokens(scores) if scores is not None and not scorer.do_sample else None
    drafted = draft.tokens.tolist()
    choose = choose_sampled if scorer.do_sample else choose_greedy
    verdicts = []
    for row in range(text.batch_size):
        verdict = Verdict([], [], False, [])
        verdicts.append(verdict)
        if done[row]:
            continue
        seen = None if scores_so_far is None else list(scores_so_far[row])
        node: int | None = 0
        while node is not None:
            children = draft.children(row, node)
            candidates = [drafted[row][child - 1] for child in children]
            index: int | None
            if draft.skips_verification and children and seen is None:
                token, index = candidates[0], 0
            elif best is not None and seen is None:
                token = best[row][node]
                index = candidates.index(token) if token in candidates else None
            else:
                if scores is not None:
                    at_node = scores[row, node]
                elif scorer.prefix_free:
                    at_node = scorer.everywhere(logits[row, node])
                else:
                    at_node = scorer.row(row, text.prefix(row, len(verdict.tokens)), logits[row, node])
                if draft.skips_verification and children:
                    token, index = candidates[0], 0
                else:
                    token, index = choose(at_node, candidates, *draft.candidates(row, node, children))
                if seen is not None:
                    # A copy: a view would keep the rejected positions alive as well.
                    verdict.scores.append(at_node.clone())
                    seen.append(verdict.scores[-1])
            text.put_one(row, len(verdict.tokens), token)
            confirmed = -1 if index is None else children[index]
            verdict.add(token, confirmed, node)
            node = None if index is None else confirmed
            verdict.stopped = stopper(text, row, len(verdict.tokens), token, seen)
            if verdict.stopped:
                break
    return verdicts
