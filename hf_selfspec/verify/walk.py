"""From the full model's logits over a draft to the tokens that follow.

A walk starts at the last token of the text and moves to the child that holds the token chosen there, until there is
none (SpecInfer, arXiv:2305.09781, algorithm 2; a line is a tree without siblings). Greedy: the token is the argmax of
the processed logits. Sampling: the token is chosen by rejection sampling, so that it has the full model's distribution
(:mod:`.acceptance`). Either way, the same forward yields one token more than were accepted.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..batch import Draft, Text, Verdict
from ..model.logits import Logits, Tops, best_tokens
from ..model.transfer import read, upload
from .acceptance import accept_line, choose_greedy, choose_sampled, draw
from .scoring import Scorer, check_highest
from .stopping import Stopper

# Where nodes are scored one by one: the host need not wait there, and not all are reached.
_ONE_BY_ONE = "cpu"


@dataclass(frozen=True)
class _Choices:
    """What the full model chooses at each row and node: the next ``tokens``; for a line of drawn tokens, whether the
    next one is ``accepted`` and the one ``instead`` of it."""

    tokens: list[list[int]]
    accepted: list[list[bool]] | None = None
    instead: list[list[int]] | None = None

    def at(self, row: int, node: int, candidates: list[int]) -> tuple[int, int | None]:
        """The token, and its index among the candidates or ``None``."""
        if self.accepted is not None and self.instead is not None and candidates:
            return (candidates[0], 0) if self.accepted[row][node] else (self.instead[row][node], None)
        token = self.tokens[row][node]
        return token, candidates.index(token) if token in candidates else None


def verify(
    text: Text,
    draft: Draft,
    logits: Logits,
    scorer: Scorer,
    stopper: Stopper,
    done: list[bool],
    scores_so_far: list[list[torch.Tensor]] | None,
    whose: str | None = None,
    along: Tops | None = None,
) -> list[Verdict]:
    """Walks each row from its last token through the draft as far as the full model agrees.

    Args:
        text: the batch; columns after each row's length are used as scratch.
        draft: ``t`` drafted tokens after each row's last one.
        logits: the full model's at the last token and at each drafted one.
        scorer: logits processors; the tokens are chosen from its scores.
        stopper: stopping criteria, tested after each token; the walk ends where one is met.
        done: rows that have ended; their verdict is empty.
        scores_so_far: for each row the scores of its tokens, if they are recorded: criteria may look at them.
        whose: the model's name, for the error about NaN or infinite logits; ``None`` for no check.
        along: what the draft needs of the logits, read in the same transfer.

    Returns:
        A verdict for each row.

    Raises:
        NumericalError: a NaN or an infinity among the logits.
    """
    # Scores that do not depend on the prefix are computed for all nodes at once, and greedy ones are moved at once. On
    # a CPU scores to sample from are computed one by one if tokens were drafted: top-p sorts the vocabulary for each,
    # and none is needed after a rejection. Without a draft there is one node, whose prefix is the text.
    device = logits.found.device
    grammar = scorer.grammar if draft.listed is not None and device.type != _ONE_BY_ONE else None
    at_once = scorer.prefix_free and not (scorer.do_sample and draft.size and device.type == _ONE_BY_ONE)
    known = [draft.tokens] if draft.listed is None else []
    scores: torch.Tensor | None = None
    if scorer.is_greedy and scores_so_far is None:
        *found, highest = _greedy(logits, known, along, text.batch_size)
    else:
        if at_once:
            scores = scorer.everywhere(logits.of_all)
        elif grammar is not None:
            allowed = grammar.of_nodes(text, draft, [not ended for ended in done], stopper.eos_tokens)
            scores = scorer.everywhere(logits.of_all, upload(allowed.numpy(), device))
        elif not draft.size:
            scores = scorer.ahead(text, 0, logits.of_all[:, 0], [not ended for ended in done])[:, None]
        chosen = _chosen(scores, draft, scorer.do_sample) if scores_so_far is None and scores is not None else None
        checked = [] if whose is None else [logits.of_all.amax(-1)]
        found = read(*known, *(chosen or ()), *checked, along=along)
        highest = found.pop() if checked else []
    drafted = found.pop(0) if draft.listed is None else draft.listed
    if whose is not None:
        check_highest(chain.from_iterable(highest), whose)
    choices = _Choices(*found) if found else None
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
            elif choices is not None:
                token, index = choices.at(row, node, candidates)
            else:
                if scores is not None:
                    at_node = scores[row, node]
                elif scorer.prefix_free:
                    at_node = scorer.everywhere(logits.of_all[row, node])
                else:
                    at_node = scorer.row(row, text.prefix(row, len(verdict.tokens)), logits.of_all[row, node])
                if draft.skips_verification and children:
                    token, index = candidates[0], 0
                else:
                    token, index = choose(at_node, candidates, *draft.candidates(row, node, children))
                if seen is not None:
                    # A copy: a view would keep the rejected positions alive as well.
                    verdict.scores.append(at_node.clone())
                    seen.append(verdict.scores[-1])
            if stopper.reads_text or not (scorer.prefix_free or grammar is not None):
                text.put_one(row, len(verdict.tokens), token)
            confirmed = -1 if index is None else children[index]
            verdict.add(token, confirmed, node)
            node = None if index is None else confirmed
            verdict.stopped = stopper(text, row, len(verdict.tokens), token, seen)
            if verdict.stopped:
                break
    return verdicts


def _greedy(logits: Logits, known: list[torch.Tensor], along: Tops | None, num_rows: int) -> list[Any]:
    """What is ``known`` as lists, and for all nodes the tokens with the highest logits and these."""
    if along is None:
        return read(*known, *logits.best)
    listed, best = read(*known, along=along), along.best(num_rows)
    return [*listed, *(read(*logits.best) if best is None else best)]


def _chosen(scores: torch.Tensor, draft: Draft, do_sample: bool) -> tuple[torch.Tensor, ...] | None:
    """The fields of :class:`_Choices` from scores ``[b, t + 1, v]``, ``None`` where not found for all nodes at once."""
    if not do_sample:
        return (best_tokens(scores),)
    p = scores.softmax(-1)
    if draft.q is None:
        return (draw(p),)
    if draft.is_tree or draft.q.shape[1] < draft.size or draft.num_drawn is not None:
        return None
    q = draft.q[:, : draft.size].to(p.device)
    accepted, instead = accept_line(p[:, :-1], q, draft.tokens.to(p.device))
    return draw(p), accepted, instead
