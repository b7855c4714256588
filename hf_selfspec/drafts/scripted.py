"""Drafts of known tokens, for checks of verification itself."""

from __future__ import annotations

import torch

from ..batch import Draft, Text
from ..errors import UnsupportedModelError
from ..model.forward_pass import ForwardPass
from .source import Drafter, DraftSource, Session

# Right tokens of the first draft, and all of its nodes, as many as free drafts have at most: the others are wrong.
# Tokens of the second draft, all of them wrong.
_DRAFTED, _NODES, _FEW = 2, 31, 2


class NeverCalledError(UnsupportedModelError):
    """No decoder layer ran in a forward."""


class Scripted(DraftSource, Drafter):
    """Drafts the ``tokens`` of each row once, with wrong ones beside them and, in every second row, at the end; then a
    few wrong ones, then nothing. It serves one generation, in which it is the drafter as well."""

    takes_forwards = reads_logits = False

    def __init__(self, tokens: list[list[int]], lines_in_step: bool) -> None:
        self._tokens, self._lines_in_step = tokens, lines_in_step
        self._rounds = 0

    def start(self, session: Session) -> Drafter:
        session.target.cache.reserve(_NODES + 1)
        self._target, self._vocabulary = session.target, session.vocabulary
        self._is_tree = session.anatomy.tree and not self._lines_in_step
        self._nodes = max(2 * _DRAFTED, session.cap_by_logit_memory(_NODES))
        return self

    def propose(self, text: Text, max_new: list[int]) -> Draft:
        self._rounds += 1
        right = [
            tokens[length - text.prompt_width :] or tokens[-1:]
            for tokens, length in zip(self._tokens, text.lengths, strict=True)
        ]
        if self._rounds > 2:
            return Draft.none(text)
        if self._rounds == 2:
            listed = [[self._wrong(tokens[0])] * _FEW for tokens in right]
            return Draft(torch.tensor(listed, device="cpu"), [_FEW] * len(right), listed=listed)
        # Without siblings, and in every second row, the draft ends with a token that is rejected.
        rows = [
            (first, self._wrong(second) if row % 2 or not self._is_tree else second)
            for row, (first, second, *_) in enumerate(right)
        ]
        states, prefix = self._states(text)
        wrong = [[self._wrong(row[-1])] * (self._nodes - _DRAFTED) for row in rows]
        if not self._is_tree:
            listed, parents = [[*row, *more] for row, more in zip(rows, wrong, strict=True)], None
        else:
            # Each token has a wrong sibling before it, so that accepted ones have to move, and others follow.
            listed = [
                [self._wrong(first), first, self._wrong(second), second, *more[_DRAFTED:]]
                for (first, second), more in zip(rows, wrong, strict=True)
            ]
            line = [0, 0, 2, 2, *range(4, self._nodes)]
            parents = [line] * len(rows)
        lengths = [self._nodes - _DRAFTED * self._is_tree] * len(rows)
        return Draft(torch.tensor(listed, device="cpu"), lengths, parents, states=states, prefix=prefix, listed=listed)

    def _wrong(self, token: int) -> int:
        return (token + 1) % self._vocabulary

    def _states(self, text: Text) -> tuple[torch.Tensor | None, int]:
        """The states of each row's last token ``[b, 1, d]`` that enter a layer in the middle, and its number."""
        target = self._target
        layer = target.anatomy.num_layers // 2
        if self._lines_in_step or not layer:
            return None, 0
        run = target.step(text.last_tokens(), text.last_slots(), ForwardPass(target.full_plan, stop=layer))
        if run.captured is None:
            raise NeverCalledError(
                f"the forwards of the decoder layers of {target.anatomy.model_name} are never called, so no part of it "
                "can draft"
            )
        return (run.captured, layer) if target.anatomy.replay else (None, 0)
