"""Applies logits processors and warpers at each position, with that position's own prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria

from ..batch import Draft, Text
from ..errors import NumericalError, SettingTypeError
from ..model.internals import prefix_function
from ..model.layout import TreeLayout
from ..model.transfer import RowNumbers
from .grammar.rows import GrammarMask

# A processor that keeps a state from step to step (a grammar matcher, a counter), or changes the ids or the model, is
# right only if it is called as plain ``generate`` calls it: once for each emitted token, in order, on the whole text so
# far. Drafting would call it for tokens that are never emitted. So all but those known to be stateless, and streamers,
# are called that way, see :func:`.walk.verify_in_step`. These are transformers' own for decoder-only models, without
# the ends of their names, if the installed version has them: first those that depend on the scores alone, so that any
# number of positions can be processed in one call, then those that depend on one row's prefix and scores, whichever row
# that is. UnbatchedClassifierFreeGuidance and SynthID are no such classes: they keep a cache of their own forwards, or
# the contexts that were hashed already.
_PREFIX_FREE = (
    "Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta", "SuppressTokens", "LogitNormalization",
    "InfNanRemove",
)  # fmt: skip
_ROW_BLIND = (
    "RepetitionPenalty", "ForcedBOSToken", "SuppressTokensAtBegin", "ExponentialDecayLengthPenalty", "NoRepeatNGram",
    "MinLength", "MinNewTokensLength", "NoBadWords", "SequenceBias", "ForcedEOSToken",
)  # fmt: skip
_OTHERS = ("TopH", "EncoderRepetitionPenalty", "EncoderNoRepeatNGram", "Watermark")
_CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria", "ConfidenceCriteria")


def _processors(names: tuple[str, ...]) -> frozenset[type]:
    endings = ("", "LogitsProcessor", "LogitsWarper")
    classes = (getattr(lp, name + ending, None) for name in names for ending in endings)
    return frozenset(cls for cls in classes if isinstance(cls, type))


PREFIX_FREE = _processors(_PREFIX_FREE)
# Some of these only once they are bound to their row.
ROW_BLIND = PREFIX_FREE | _processors(_ROW_BLIND) | {lp.PrefixConstrainedLogitsProcessor}
_registered: set[type] = {getattr(stopping_criteria, name) for name in _CRITERIA}
_registered |= _processors(_PREFIX_FREE + _ROW_BLIND + _OTHERS)
_registered |= {TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer}


def register_stateless(kind: type) -> None:
    """Declares that a class of logits processors or stopping criteria keeps no state from call to call.

    Its result has to follow from ``(input_ids, scores)`` alone, and it changes neither these nor the model. It may then
    be called for drafted tokens, for several positions in any order and for one row at a time, which makes drafts more
    often right and batches faster. All others, and streamers, are called once for each emitted token, as plain
    ``generate`` does. Your own class or function can have an attribute ``is_stateless = True`` instead.

    Args:
        kind: the class itself, also of streamers that do not change the model; subclasses are registered on their own.

    Raises:
        SettingTypeError: it is not a class.
    """
    if not isinstance(kind, type):
        raise SettingTypeError(
            f"register_stateless takes a class of logits processors or stopping criteria, got {kind!r}. Give an object "
            "the attribute `is_stateless = True` instead."
        )
    _registered.add(kind)


def stateful(functions: Iterable[Any]) -> tuple[str, ...]:
    """Names of those processors or criteria that may keep a state."""
    return tuple(getattr(each, "__name__", type(each).__name__) for each in functions if not is_stateless(each))


def is_stateless(function: Any) -> bool:
    """Whether a logits processor, a stopping criterion or a function of either is known to keep no state."""
    declared = getattr(function, "is_stateless", None)
    if isinstance(declared, bool):
        return declared
    if type(function) is lp.PrefixConstrainedLogitsProcessor:
        return is_stateless(prefix_function(function))
    return type(function) in _registered


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Scorer:
    """Turns logits into the scores from which a token is chosen, as plain ``generate`` would."""

    def __init__(self, processors: lp.LogitsProcessorList, batch_size: int, do_sample: bool) -> None:
        self.do_sample = do_sample
        self.stateful = stateful(processors)  # names; with any, all are called only as by plain `generate`
        self.prefix_free = all(type(processor) in PREFIX_FREE for processor in processors)
        self.repairs = any(isinstance(processor, lp.InfNanRemoveLogitsProcessor) for processor in processors)
        self.grammars = [processor for processor in processors if isinstance(processor, GrammarMask)]
        others = [processor for processor in processors if not isinstance(processor, GrammarMask)]
        # Whether all nodes of a draft can be scored at once; with a grammar, given what it allows at each of them.
        are_others = all(type(processor) in PREFIX_FREE or _is_penalty(processor, batch_size) for processor in others)
        self.at_once = are_others and not self.grammars
        self.grammar = self.grammars[0] if are_others and len(self.grammars) == 1 else None
        self._empty = len(processors) == 0
        self.processors = processors
        self._rows = [
            lp.LogitsProcessorList(_of_row(processor, row, batch_size) for processor in processors)
            for row in range(batch_size)
        ]
        self._batch_size = batch_size
        self._row_blind = all(type(processor) in ROW_BLIND for processor in others)

    @property
    def is_greedy(self) -> bool:
        return self._empty and not self.do_sample

    @property
    def for_drafts(self) -> Scorer:
        """The scorer without processors that may keep a state: these must not see tokens that are not emitted."""
        if not self.stateful:
            return self
        stateless = lp.LogitsProcessorList(processor for processor in self.processors if is_stateless(processor))
        return Scorer(stateless, self._batch_size, self.do_sample)

    def everywhere(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of logits ``[..., v]``; only where :attr:`prefix_free` holds."""
        if self._empty:
            return logits
        flat = logits.reshape(-1, logits.shape[-1])
        no_prefix = torch.zeros(flat.shape[0], 0, dtype=torch.long, device=flat.device)
        for processor in self.processors:  # the list itself would look up what each of them takes, in every call
            flat = processor(no_prefix, flat)
        return flat.view_as(logits)

    def of_nodes(
        self, text: Text, draft: Draft, logits: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores of logits ``[b, t + 1, v]`` at each row's last token and at each drafted one; only where
        :attr:`at_once` holds, or with the tokens ``[b, t + 1, v]`` that :attr:`grammar` allows."""
        if self.prefix_free:
            return self.everywhere(logits)
        scores, before = logits, None
        no_prefix = torch.zeros(scores[..., 0].numel(), 0, dtype=torch.long, device=scores.device)
        for processor in self.processors:
            if allowed is not None and processor is self.grammar:
                scores = scores.masked_fill(~allowed, -torch.inf)
            elif _is_penalty(processor, len(scores)):
                before = _before_nodes(text, draft) if before is None else before
                scores = _penalized(scores, processor, *before)
            else:
                scores = processor(no_prefix, scores.flatten(0, 1)).view_as(scores)
        return scores

    def roughly(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of logits ``[..., v]``; raw logits if processors need a prefix: they change draft and target alike."""
        return self.everywhere(logits) if self.prefix_free else logits

    def row(self, row: int, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores ``[v]`` of one row's logits ``[v]`` after ``prefix`` ``[1, s]``."""
        # Many processors expect their batch's size and identify a row by its place, so each place gets a copy.
        copies = 1 if self._row_blind else self._batch_size
        return self._rows[row](prefix.expand(copies, -1), logits.expand(copies, -1).clone())[row % copies]

    def ahead(self, text: Text, ahead: int, logits: torch.Tensor, wanted: list[bool]) -> torch.Tensor:
        """Scores ``[b, v]`` of logits ``[b, v]`` that follow ``ahead`` scratch columns, for the wanted rows."""
        if self.prefix_free:
            return self.everywhere(logits)
        if all(wanted) and min(text.lengths) == max(text.lengths):
            return self.processors(text.with_draft(ahead), logits.clone())
        scores = logits.clone()
        for row, want in enumerate(wanted):
            if want:
                scores[row] = self.row(row, text.prefix(row, ahead), logits[row])
        return scores


def _is_penalty(processor: Any, batch_size: int) -> bool:
    """Whether a processor is a repetition penalty that fits the batch: it looks at the set of earlier tokens alone."""
    if type(processor) is not lp.RepetitionPenaltyLogitsProcessor:
        return False
    ignored = processor.prompt_ignore_length  # one number for each row since transformers 5.24, as a tensor
    return not isinstance(ignored, torch.Tensor) or len(ignored) == batch_size


def _before_nodes(text: Text, draft: Draft) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of the text and the path up to each node of a draft, ``[b, t + 1, s]``, -1 for those of other paths,
    and their columns in the text, ``[b, 1, s]``."""
    device, b, width = text.device, text.batch_size, max(text.lengths)
    tree = draft.tree()
    nodes = tree or TreeLayout.replay(draft.size + 1, behind=0)  # a line
    ends = RowNumbers(text.lengths).on(device)
    of_text = torch.arange(width, device=device).expand(b, -1)
    of_draft = (ends - 1 + nodes.offsets(device)[:, 1:]).expand(b, -1)
    earlier = text.ids[:, :width].masked_fill(of_text >= ends, -1)[:, None].expand(-1, nodes.size, -1)
    drafted = torch.where(nodes.ancestry(device)[:, :, 1:], draft.on(device, tree)[:, None], -1)
    return torch.cat([earlier, drafted], dim=-1), torch.cat([of_text, of_draft], dim=-1)[:, None]


def _penalized(scores: torch.Tensor, processor: Any, tokens: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Scores ``[b, t + 1, v]`` with a repetition penalty, by the processor's own arithmetic."""
    if not tokens.shape[-1]:  # embedded prompts have no ids
        return scores
    ignored, vocabulary = processor.prompt_ignore_length, scores.shape[-1]
    ignored = ignored.to(scores.device)[:, None, None] if isinstance(ignored, torch.Tensor) else ignored or 0
    counts = (tokens >= 0) & (tokens < vocabulary) & (columns >= ignored)
    # In the place of those that do not count is the first one that does, if there is any.
    first = tokens.gather(-1, counts.int().argmax(-1, keepdim=True)).clamp(0, vocabulary - 1)
    tokens = torch.where(counts, tokens, first)
    before = scores.gather(-1, tokens)
    penalized = torch.where(before < 0, before * processor.penalty, before / processor.penalty)
    return scores.scatter(-1, tokens, torch.where(counts.any(-1, keepdim=True), penalized, before))


def _of_row(processor: Any, row: int, batch_size: int) -> Processor:
    if isinstance(processor, GrammarMask):
        return lambda input_ids, scores: processor.of_row(row, input_ids[0], scores)
    if _is_penalty(processor, batch_size):
        ignored = processor.prompt_ignore_length
        ignored = int(ignored[row]) if isinstance(ignored, torch.Tensor) else ignored
        return lp.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored)
    if batch_size == 1 or type(processor) is not lp.PrefixConstrainedLogitsProcessor:
        return processor
    # A prefix function must not be called for copies in other rows.
    allowed = prefix_function(processor)
    return lp.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)


def check_highest(highest: Iterable[float], model_name: str) -> None:
    """Raises a ``NumericalError`` where no token can be chosen by a model's highest logits."""
    if not all(map(math.isfinite, highest)):
        raise NumericalError(
            f"{model_name} returned NaN or infinite logits. Check the weights and the dtype (float16 overflows where "
            "bfloat16 and float32 do not)."
        )
