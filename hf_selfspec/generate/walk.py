"""From the full model's logits over a draft to the tokens that follow.

A walk starts at the last token of the text and moves to the child that holds the token chosen there, until there is
none (SpecInfer, arXiv:2305.09781, algorithm 2; a line is a tree without siblings). Greedy: the token is the argmax of
the processed logits. Sampling: the token is chosen by rejection sampling, so that it has the full model's distribution
(:func:`choose_sampled`). Either way, the same forward yields one token more than were accepted.

Rows walk one after another (:func:`verify`), or all together where logits processors or stopping criteria keep a state
(:func:`verify_in_step`).
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import pad

from ..batch import Draft, Text, Verdict
from ..drafts.scoring import Scorer, check_highest
from ..model.graphs.captures import drawing
from ..model.logits import Logits, Tops, best_tokens, draw
from ..model.transfer import read, upload
from .output import Stopper

# The token that follows a row's node, by its children and their tokens, and its index among these or ``None``.
_Choose = Callable[[int, int, list[int], list[int]], tuple[int, int | None]]

# Where nodes are scored one by one: the host need not wait there, and not all are reached.
_ONE_BY_ONE = "cpu"
# Nodes times columns of text for which a CPU applies a repetition penalty at once. 31 drafted tokens after 500, of
# which none to all are accepted, take 0.9 to 1.3 ms at once, and 0.24 to 4.5 one by one; after 8,000 tokens 6.3 to 7.3
# and 0.26 to 6.1 (a vocabulary of 49,152, one thread of an AMD EPYC).
_MOST_AT_ONCE = 2**14


def _step(draft: Draft, drafted: list[list[int]], row: int, node: int, choose: _Choose, verdict: Verdict) -> int:
    """Adds the token after a row's node to its verdict; returns the child that holds the token, -1 if there is none."""
    children = draft.children(row, node)
    token, index = choose(row, node, children, [drafted[row][child - 1] for child in children])
    child = -1 if index is None else children[index]
    verdict.add(token, child, node)
    return child


def verify(
    text: Text,
    draft: Draft,
    logits: Logits,
    scorer: Scorer,
    stopper: Stopper,
    done: list[bool],
    scores_so_far: list[list[torch.Tensor]] | None,
    model_name: str | None = None,
    along: Tops | None = None,
) -> list[Verdict]:
    """Walks each row from its last token through the draft as far as the full model agrees.

    Args:
        text: the batch; columns after each row's length are used as scratch.
        draft: ``t`` drafted tokens after each row's last one.
        logits: the full model's at the last token and at each drafted one.
        scorer: logits processors; the tokens are chosen from its scores.
        stopper: stopping criteria; a row ends with the first token after which one is met.
        done: rows that have ended; their verdict is empty.
        scores_so_far: for each row the scores of its tokens, if they are recorded: criteria may look at them.
        model_name: the model's name, for the error about NaN or infinite logits; ``None`` for no check.
        along: what the draft needs of the logits, read in the same transfer.

    Returns:
        A verdict for each row.

    Raises:
        NumericalError: a NaN or an infinity among the logits.
    """
    # Scores are computed for all nodes at once where processors allow it, and greedy ones are moved at once. On a CPU
    # those of drafts are computed one by one, since none is needed after a rejection, where they are drawn from (top-p
    # sorts the vocabulary for each) or depend on much text. Without a draft there is one node after the text.
    device = text.device
    grammar = scorer.grammar if draft.listed is not None and device.type != _ONE_BY_ONE else None
    at_once = scorer.at_once
    if device.type == _ONE_BY_ONE:
        at_once &= not (scorer.do_sample and draft.size)
        at_once &= scorer.prefix_free or draft.size < _MOST_AT_ONCE // max(*text.lengths, 1)
    unlisted = [draft.tokens] if draft.listed is None else []
    scores: torch.Tensor | None = None
    if scorer.is_greedy and scores_so_far is None:
        *fetched, highest = _greedy(logits, unlisted, along, text.batch_size)
    else:
        if at_once:
            scores = scorer.of_nodes(text, draft, logits.of_all)
        elif grammar is not None:
            allowed = grammar.of_nodes(text, draft, [not ended for ended in done], stopper.eos_tokens)
            scores = scorer.of_nodes(text, draft, logits.of_all, upload(allowed.numpy(), device))
        elif not draft.size:
            scores = scorer.ahead(text, 0, logits.of_all[:, 0], [not ended for ended in done])[:, None]
        chosen = _chosen(scores, draft, scorer.do_sample) if scores_so_far is None and scores is not None else None
        checked = [] if model_name is None else [logits.of_all.amax(-1)]
        fetched = read(*unlisted, *(chosen or ()), *checked, along=None if along is None else along.pending)
        highest = fetched.pop() if checked else []
    drafted = fetched.pop(0) if draft.listed is None else draft.listed
    if model_name is not None:
        check_highest(chain.from_iterable(highest), model_name)
    # What the full model chooses at each row and node, if that could be computed for all at once. Of drawn tokens also
    # which child of a node is accepted, and the token that takes its place if none is.
    tokens, accepted, instead = (*fetched, None, None, None)[:3]
    verdicts = [Verdict([], [], False, []) for _ in done]
    pick = choose_sampled if scorer.do_sample else choose_greedy

    def choose(row: int, node: int, children: list[int], candidates: list[int]) -> tuple[int, int | None]:
        if accepted is not None and candidates and node < len(accepted[row]):
            index = accepted[row][node]
            return (candidates[index], index) if index >= 0 else (instead[row][node], None)
        if tokens is not None:
            token = tokens[row][node]
            return token, candidates.index(token) if token in candidates else None
        if scores is not None:
            at_node = scores[row, node]
        elif scorer.prefix_free:
            at_node = scorer.everywhere(logits.of_all[row, node])
        else:
            at_node = scorer.row(row, text.prefix(row, len(verdicts[row].tokens)), logits.of_all[row, node])
        if scores_so_far is not None:
            # A copy: a view would keep the rejected positions alive as well.
            verdicts[row].scores.append(at_node.clone())
        return pick(at_node, candidates, draft.drawn_from(row, node))

    reads_text = stopper.reads_text or not (scorer.prefix_free or scores is not None)
    for row, verdict in enumerate(verdicts):
        node = -1 if done[row] else 0
        while node >= 0 and not verdict.stopped:
            node = _step(draft, drafted, row, node, choose, verdict)
            count, token = len(verdict.tokens), verdict.tokens[-1]
            if reads_text:
                text.put_one(row, count - 1, token)
            scores_of_row = None if scores_so_far is None else [*scores_so_far[row], *verdict.scores]
            verdict.stopped = stopper(text, row, count, token, scores_of_row)
    stopper.end(text, verdicts)
    return verdicts


def verify_in_step(
    text: Text,
    draft: Draft,
    logits: torch.Tensor,
    scorer: Scorer,
    stopper: Stopper,
    done: list[bool],
    steps: list[torch.Tensor] | None,
    pad_token: int,
    show: Callable[[list[int], list[bool]], bool],
) -> tuple[list[Verdict], torch.Tensor]:
    """Walks all rows through their drafts together until one disagrees, so all get the same number of tokens;
    processors and criteria are called for the whole batch as by plain ``generate``. They may write to the ids
    ``[b, s]``, which are returned, too; the draft after a token that they replace is dropped. ``show`` gets the new
    tokens, and whether each was drafted; it returns whether the next ones can come from the same forward."""
    pick, scores = choose_sampled if scorer.do_sample else choose_greedy, logits[:, 0]

    def choose(row: int, node: int, children: list[int], candidates: list[int]) -> tuple[int, int | None]:
        return pick(scores[row], candidates, draft.drawn_from(row, node))

    drafted, nodes = draft.tokens.tolist(), [0 for _ in done]
    verdicts, ids = [Verdict([], [], False, []) for _ in done], text.with_draft(0).clone()
    for _ in range(draft.size + 1):
        at_nodes = logits[torch.arange(len(nodes), device=logits.device), nodes]
        scores = scorer.processors(ids, at_nodes)
        if steps is not None:
            steps.append(scores)
        for row, verdict in enumerate(verdicts):
            if not done[row]:
                nodes[row] = _step(draft, drafted, row, nodes[row], choose, verdict)
        tokens = [pad_token if ended else verdict.tokens[-1] for verdict, ended in zip(verdicts, done, strict=True)]
        ids = torch.cat([ids, upload(tokens, ids.device)[:, None]], dim=1)
        ends, written = read(stopper.criteria(ids, None if steps is None else tuple(steps)), ids[:, -1])
        from_draft = [False for _ in done]
        for row, verdict in enumerate(verdicts):
            if not done[row]:
                verdict.stopped = bool(ends[row])
                if written[row] != tokens[row]:
                    nodes[row] = verdict.nodes[-1] = -1
                from_draft[row] = verdict.nodes[-1] >= 0
        goes_on = show(tokens, from_draft)
        if not goes_on or min(nodes) < 0 or any(verdict.stopped for verdict in verdicts):
            break
    for verdict, ended, chosen in zip(verdicts, done, ids[:, max(text.lengths) :].tolist(), strict=True):
        verdict.tokens = [] if ended else chosen
    return verdicts, ids


def _greedy(logits: Logits, unlisted: list[torch.Tensor], along: Tops | None, num_rows: int) -> list[Any]:
    """The drafted tokens if they are ``unlisted``, and for all nodes the tokens with the highest logits and these."""
    if logits.told is not None:
        return [*read(*unlisted), *logits.best_on_host()]
    if along is None:
        return read(*unlisted, *logits.best)
    listed, best = read(*unlisted, along=along.pending), along.best(num_rows)
    return [*listed, *(logits.best_on_host() if best is None else best)]


def _chosen(scores: torch.Tensor, draft: Draft, do_sample: bool) -> tuple[torch.Tensor, ...]:
    """What the full model chooses from scores ``[b, t + 1, v]``, see :func:`verify`."""
    if not do_sample:
        return (best_tokens(scores),)
    p = scores.softmax(-1)
    q = draft.tokens[:, :0] if draft.q is None else draft.q[:, : draft.size].to(p.device)
    if not q.numel():
        return (draw(p),)
    n, drafted = q.shape[1], draft.tokens[..., None]  # of n nodes the children were drawn, of others named
    if draft.parents is not None:
        children = [[draft.children(row, node) for node in range(n)] for row in range(len(p))]
        most = max(1, *map(len, chain.from_iterable(children)))
        places = upload([[[*at, *[0] * (most - len(at))] for at in of_row] for of_row in children], p.device)
        drafted = pad(draft.tokens, (1, 0), value=-1).to(p.device).gather(1, places.flatten(1)).view_as(places)
    return draw(p), *accept_drawn(p[:, :n], q, drafted[:, :n].to(p.device))


def choose_greedy(scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None) -> tuple[int, int | None]:
    """Returns the full model's token at one position, and the index of the drafted token it confirms, or ``None``."""
    token = int(best_tokens(scores))
    return token, drafted.index(token) if token in drafted else None


def choose_sampled(scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None) -> tuple[int, int | None]:
    """Accepts one of the drafted tokens or draws another, so that the result is distributed as ``softmax(scores)``.

    One token ``x`` drawn from ``q`` (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1) is accepted with
    probability ``min(1, p(x) / q(x))``; after a rejection the token is drawn from ``p' = norm(max(0, p - q))``. A token
    ``x`` is then the result with probability ``min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x)`` (appendix A.1 there).

    Several drawn tokens (a tree) are tried in the order in which they were drawn without replacement: a rejection
    replaces ``p`` by ``p'`` and ``q`` by ``norm(q`` without the token ``)``, from which the next one was drawn, so that
    the same argument holds for each of them. With replacement this is multi-step speculative sampling (SpecInfer,
    arXiv:2305.09781, algorithm 2), without it recursive rejection sampling (Jeon et al. 2024, arXiv:2402.14160).

    Other tokens were named without drawing (as from earlier text): their ``q`` is 1 at each in turn, so that ``x`` is
    accepted with probability ``p(x)``, and ``p'`` is ``p`` without ``x``. That is the same as drawing from ``p`` and
    testing whether the token is among them.

    Args:
        scores: ``[v]`` processed scores of the full model.
        drafted: distinct tokens proposed for this position, in the order in which they were drawn.
        q: ``[v]`` the distribution from which they were drawn without replacement; ``None`` if they were named,
            whatever ``p`` is.

    Returns:
        The token, and its index in ``drafted`` or ``None``.
    """
    p = scores.float().softmax(-1)
    for index, token in enumerate(drafted):
        # A token that could not have been drawn is rejected, and so are those after it.
        if q is None or not q[token] > 0.0:
            break
        with drawing:
            uniform = torch.rand((), device=p.device, dtype=p.dtype)
        if uniform * q[token] < p[token]:
            return token, index
        residual = (p - q).clamp_(min=0.0)
        # Without a residual p and q are equal but for rounding, so any draw from p will do.
        if not (mass := residual.sum()) > 0.0:
            break
        p, q = residual / mass, q.index_fill(0, torch.full((1,), token, device=q.device), 0.0)
        q /= q.sum().clamp_(min=torch.finfo(q.dtype).tiny)
    token = int(draw(p))
    return token, drafted.index(token) if q is None and token in drafted else None


def accept_drawn(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the decisions of :func:`choose_sampled` at many positions at once: given ``p``, ``q`` ``[..., v]`` and
    drafted tokens ``[..., n]``, with -1 behind short lists, returns ``[...]`` the place of the one that is accepted, -1
    for none, and ``[...]`` tokens drawn in their place."""
    index = torch.full_like(drafted[..., 0], -1)
    could = index < 0
    for place, token in enumerate(drafted.unbind(-1)):
        at_token = token.clamp(min=0)[..., None]
        p_token, q_token = p.gather(-1, at_token)[..., 0], q.gather(-1, at_token)[..., 0]
        could = could & (token >= 0) & (q_token > 0.0)
        with drawing:
            accepted = could & (torch.rand_like(p_token) * q_token < p_token)
        index = torch.where(accepted & (index < 0), place, index)
        residual = (p - q).clamp_(min=0.0)
        mass = residual.sum(-1, keepdim=True)
        could = could & (mass[..., 0] > 0.0)
        p = torch.where(could[..., None], residual / mass, p)
        if place < drafted.shape[-1] - 1:
            q = q.scatter(-1, at_token, 0.0)
            q /= q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
    return index, draw(p)
