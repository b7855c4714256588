"""Stopping criteria, tested on every prefix of an accepted block."""

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ..batch import Text
from ..drafts.stateless import stateful


class Stopper:
    """Tells whether a row ends with its last token. A class that derives from transformers' may end it elsewhere."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.max_length: int | None = min(
            (criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria), default=None
        )
        self.eos_tokens: frozenset[int] = frozenset(
            int(token)
            for criterion in criteria
            if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.flatten()
        )
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.stateful = stateful(criteria)  # names; with any, all are called only as by plain `generate`
        self.criteria = criteria
        self._others = StoppingCriteriaList(c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria))
        self.reads_text = bool(self._others)

    def __call__(self, text: Text, row: int, ahead: int, token: int, scores: list[torch.Tensor] | None) -> bool:
        """Whether ``row`` ends with its ``ahead``-th scratch token."""
        length = text.lengths[row] + ahead
        done = self.max_length is not None and length >= self.max_length
        if self.eos_tokens and not done:
            done = token in self.eos_tokens
        if self._others and not done:
            # A criterion may identify a row by its place in the batch, so each place gets a copy.
            copies = text.batch_size
            expanded = None if scores is None else tuple(score.expand(copies, -1) for score in scores)
            done = bool(self._others(text.prefix(row, ahead).expand(copies, -1), expanded)[row])
        return done

    def max_new(self, text: Text, row: int) -> int:
        """The number of tokens that ``row`` may still get by the limit on its length."""
        return self.max_length - text.lengths[row] if self.max_length is not None else 1 << 30
