"""What a call has generated so far, where rows end, what a streamer has shown, and what is returned."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..batch import Text, Verdict
from ..drafts.scoring import stateful
from ..model.logits import Logits
from ..model.prompt import CACHE_NAME
from ..model.transfer import read, upload
from ..stats import GenerationStats

# Criteria that need not be called for each token: by the token, the length, the time, or the last tokens of any row.
_FEW_CALLS = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
# lm-eval's criterion, by the places that its class has had.
_OF_ALL_ROWS = {f"lm_eval.models.{module}.MultiTokenEOSCriteria" for module in ("utils", "utils_hf", "huggingface")}
# An id of no token, which is part of no stop string.
_NO_TOKEN = 1 << 31


class SharedStop:
    """lm-eval's criterion, which ends all rows at once, when each of them has had a text among its last tokens."""

    def __init__(self, criterion: Any, pad_token: int) -> None:
        self._criterion, self._pad_token = criterion, pad_token
        # With which rows had the text first; the criterion remembers those of earlier calls.
        self.lengths: list[float] = [0 if is_done else math.inf for is_done in criterion.done_tracker]

    def see(self, row: int, ids: torch.Tensor, has_ended: bool) -> None:
        """Sees the first tokens ``[s]`` of a row, behind which there is padding where it has ended."""
        criterion, most = self._criterion, self._criterion.sequence_id_len
        if self.lengths[row] < math.inf:
            return
        tokens = ids[criterion.initial_decoder_input_length :][-most:].tolist()
        windows = ([*tokens, *[self._pad_token] * pads][-most:] for pads in range(most + 1 if has_ended else 1))
        texts = enumerate(criterion.tokenizer.batch_decode([last])[0] for last in windows)
        found = (pads for pads, text in texts if criterion.sequence in text)
        self.lengths[row] = len(ids) + next(found, math.inf)

    def finish(self, width: int) -> None:
        """Leaves the criterion as plain ``generate`` leaves it, whose last text had that width."""
        self._criterion.done_tracker[:] = [length <= width for length in self.lengths]


class Stopper:
    """Tells where rows end. A class that derives from one of transformers' criteria may end them elsewhere."""

    def __init__(self, criteria: StoppingCriteriaList, rows: int = 0, pad_token: int = 0) -> None:
        """``rows`` is their number where rows that were ahead may be cut to where all end, as no cache is kept."""
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
        shared = [c for c in criteria if f"{type(c).__module__}.{type(c).__qualname__}" in _OF_ALL_ROWS]
        # Beside criteria that end rows in other ways, where it is seen depends on these.
        is_alone = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) or c in shared for c in criteria)
        if not (is_alone and self.has_eos and all(len(c.done_tracker) == rows for c in shared)):
            shared = []
        self.shared = [SharedStop(c, pad_token) for c in shared]
        # Names; with any, all are called only as by plain `generate`.
        self.stateful = () if shared else stateful(criteria)
        self.criteria = criteria
        self._limits = [c for c in criteria if type(c) is MaxTimeCriteria]
        self._strings = [c for c in criteria if type(c) is StopStringCriteria]
        self._others = StoppingCriteriaList(c for c in criteria if type(c) not in _FEW_CALLS and not shared)
        self.reads_text = bool(self._others or shared)

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
        for shared in self.shared:
            shared.see(row, text.prefix(row, ahead)[0], done and length != self.max_length)
            if (last := max(shared.lengths)) < math.inf:
                last = max(int(last), text.prompt_width + 1)
                self.max_length = last if self.max_length is None else min(last, self.max_length)
                done = done or length >= self.max_length
        return done

    def end(self, text: Text, verdicts: list[Verdict]) -> None:
        """Ends rows by the criteria that are called once a round: at the time limit with their next token, otherwise
        with the token that completes a stop string."""
        counts = [len(verdict.tokens) for verdict in verdicts]
        ends: list[list[bool]] = []
        # The clock needs no ids.
        if any(limit(torch.empty((1, 0), dtype=torch.long, device="cpu"), None) for limit in self._limits):
            ends = [[True]] * len(counts)
        elif self._strings and (most := max(counts)):
            rows = [verdict.tokens + [0] * (most - len(verdict.tokens)) for verdict in verdicts]
            text.write_draft(upload(rows, text.device), 0)
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


@dataclass(eq=False)
class Output:
    """The rows of one call; ``done`` tells which of them get no more tokens."""

    text: Text
    stopper: Stopper
    config: GenerationConfig  # what is returned besides the ids
    pad_token: int  # id for rows that have ended
    streamer: Any  # receives each token once all rows have it; None for none
    stats: GenerationStats
    in_step: bool  # whether processors and criteria are called for all rows together

    def __post_init__(self) -> None:
        b, config = self.text.batch_size, self.config
        self.done, self.streamed = [False] * b, 0
        self._ended: list[int | None] = [None] * b
        scores = config.return_dict_in_generate and config.output_scores
        logits = config.return_dict_in_generate and config.output_logits
        # For each row and token scores and logits [v], or for each token the scores [b, v] where rows advance together.
        self.scores: list[list[torch.Tensor]] | None = [[] for _ in range(b)] if scores and not self.in_step else None
        self.steps: list[torch.Tensor] | None = [] if scores and self.in_step else None
        self.logits: list[list[torch.Tensor]] | None = [[] for _ in range(b)] if logits else None
        self.stats.from_draft = [[] for _ in range(b)]

    @property
    def is_finished(self) -> bool:
        return all(self.done)

    def ends_unevenly(self) -> bool:
        """Whether a row's text is shorter than the others', so that the cache to hand back needs a forward over it."""
        return min(self.text.lengths) < self.text.prompt_width + max(self.counts())

    def counts(self) -> list[int]:
        """Tokens of each row that are shown (the rest is padding)."""
        if (shared := self._shared_count()) is not None:
            return [shared] * self.text.batch_size
        generated = (length - self.text.prompt_width for length in self.text.lengths)
        counts = [count if end is None else end for count, end in zip(generated, self._ended, strict=True)]
        most = self.stopper.max_length  # which a row that was ahead may have passed when it was found
        return counts if most is None else [min(count, most - self.text.prompt_width) for count in counts]

    def shown(self, most: int) -> list[list[int]]:
        """The tokens of each row that are shown, at most ``most``."""
        return [tokens[: min(count, most)] for tokens, count in zip(self.text.new, self.counts(), strict=True)]

    def take(self, row: int, verdict: Verdict, count: int, logits: Logits, line: Collection[int]) -> list[int]:
        """Takes the first ``count`` tokens of a verdict on a draft with this ``line`` of nodes, and returns them."""
        accepted = [node >= 0 for node in verdict.nodes[:count]]
        self.stats.siblings += sum(node >= 0 and node not in line for node in verdict.nodes[:count])
        self.stats.from_draft[row] += accepted
        self.stats.tokens += count
        self.stats.accepted += sum(accepted)
        if self.stats.verify_passes:
            self.stats.accepted_lengths[sum(accepted)] += 1
        if verdict.stopped and count == len(verdict.tokens) and self._ended[row] is None:
            self._ended[row] = self.text.lengths[row] + count - self.text.prompt_width
        if self.logits is not None:
            at_nodes = (logits.of_all[row, node] for node in verdict.sources[:count])
            self.logits[row] += [values.to(torch.float32, copy=True) for values in at_nodes]
        if self.scores is not None:
            self.scores[row] += verdict.scores[:count]
        return verdict.tokens[:count]

    def append(self, new: list[list[int]]) -> None:
        """Appends tokens to the text of each row, and updates which rows are done."""
        self.text.append(new)
        self.done = [self._is_done(row) for row in range(len(new))]

    def stream(self) -> None:
        """Shows what all rows have."""
        if self.streamer is None:
            return
        counts, width = self.counts(), self.text.prompt_width
        open_rows = [length - width for length, done in zip(self.text.lengths, self.done, strict=True) if not done]
        ready = min(open_rows) if open_rows else max(counts)
        while (step := self.streamed) < ready:
            rows = zip(self.text.new, counts, strict=True)
            tokens = [row[step] if step < count else self.pad_token for row, count in rows]
            self.put(tokens, [any(drafted[step : step + 1]) for drafted in self.stats.from_draft])

    def put(self, tokens: list[int], from_draft: list[bool]) -> None:
        """Shows the next token of each row."""
        self.streamed += 1
        if self.streamer is not None:
            if hasattr(self.streamer, "from_draft"):  # it marks drafted tokens
                self.streamer.from_draft = from_draft
            self.streamer.put(torch.tensor(tokens, device="cpu"))

    def ids(self) -> torch.Tensor:
        """``[b, s]`` as ``generate`` returns them."""
        text, counts = self.text, self.counts()
        ids = text.ids[:, : text.prompt_width + max(counts)].clone()
        for row, count in enumerate([] if self.in_step else counts):  # else rows that have ended were padded already
            ids[row, text.prompt_width + count :] = self.pad_token
        return ids

    def returned(self, ids: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput:
        """What ``generate(return_dict_in_generate=True)`` returns; steps after a row's end hold zeros."""
        steps = ids.shape[1] - self.text.prompt_width
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=_by_step(self.scores, steps) if self.steps is None else tuple(self.steps),
            logits=_by_step(self.logits, steps),
            **{CACHE_NAME: cache},
        )

    def _shared_count(self) -> int | None:
        """Number of tokens of every row, if rows that end are not padded: plain ``generate`` keeps generating them."""
        if self.stopper.has_eos or any(end is None for end in self._ended):
            return None
        return max(end for end in self._ended if end is not None)

    def _is_done(self, row: int) -> bool:
        if self._ended[row] is None:
            return self.stopper.max_new(self.text, row) <= 0
        if self.stopper.has_eos:
            return True
        count, length = self._shared_count(), self.text.lengths[row]
        at_most = self.stopper.max_length is not None and length >= self.stopper.max_length
        return at_most or (count is not None and length - self.text.prompt_width >= count)


def _by_step(rows: list[list[torch.Tensor]] | None, steps: int) -> tuple[torch.Tensor, ...] | None:
    """For each step one tensor ``[b, ...]`` of what the rows have for their tokens; zeros after a row's end."""
    if rows is None:
        return None
    empty = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else empty for row in rows]) for step in range(steps))
