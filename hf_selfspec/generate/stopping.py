"""Stopping criteria, tested on every prefix of an accepted block."""

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..batch import Text, Verdict
from ..drafts.stateless import stateful
from ..model.transfer import read, upload

# Criteria that need not be called for each token: by the token, the length, the time, or the last tokens of any row.
_FEW_CALLS = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
# An id of no token, which is part of no stop string.
_NO_TOKEN = 1 << 31


class Stopper:
    """Tells where rows end. A class that derives from one of transformers' criteria may end them elsewhere."""

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
        self.has_others = any(type(c) not in (EosTokenCriteria, MaxLengthCriteria) for c in criteria)
        self.stateful = stateful(criteria)  # names; with any, all are called only as by plain `generate`
        self.criteria = criteria
        self._limits = [c for c in criteria if type(c) is MaxTimeCriteria]
        self._strings = [c for c in criteria if type(c) is StopStringCriteria]
        self._others = StoppingCriteriaList(c for c in criteria if type(c) not in _FEW_CALLS)
        self.reads_text = bool(self._others)

    def __call__(self, text: Text, row: int, ahead: int, token: int, scores: list[torch.Tensor] | None) -> bool:
        """Whether ``row`` ends with its ``ahead``-th scratch token, as far as criteria are called for each token."""
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

    def end(self, text: Text, verdicts: list[Verdict]) -> None:
        """Ends rows by the criteria that are called once a round: at the time limit with their next token, otherwise
        with the token that completes a stop string."""
        counts = [len(verdict.tokens) for verdict in verdicts]
        no_ids = torch.empty((1, 0), dtype=torch.long, device="cpu")  # the clock needs none
        ends: list[list[bool]] = []
        if any(limit(no_ids, None) for limit in self._limits):
            ends = [[True]] * len(counts)
        elif self._strings and (most := max(counts)):
            rows = [verdict.tokens + [0] * (most - len(verdict.tokens)) for verdict in verdicts]
            text.write_draft(upload(rows, text.ids.device), 0)
            # The prefixes of all rows [b * most, s], as far as a stop string can reach back.
            width = max(criterion.maximum_token_len for criterion in self._strings)
            prefixes = text.around_ends(width - 1, most, _NO_TOKEN).unfold(1, width, 1).flatten(0, 1)
            are_met = torch.stack([criterion(prefixes, None) for criterion in self._strings]).any(0)
            (ends,) = read(are_met.view(len(counts), most))
        for verdict, count, met in zip(verdicts, counts, ends or [[]] * len(counts), strict=True):
            if True in met[:count]:
                verdict.end(met.index(True) + 1)

    def max_new(self, text: Text, row: int) -> int:
        """The number of tokens that ``row`` may still get by the limit on its length."""
        return self.max_length - text.lengths[row] if self.max_length is not None else 1 << 30
