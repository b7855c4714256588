"""Grammars of the rows of one generation, as functions of the text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from ...batch import Draft, Text
from ...errors import SettingTypeError
from .libraries import Grammar, find_adapter

# Masks, and expected tokens, that a row keeps: those of one draft and its verification.
_KEPT = 128

# The most allowed tokens among which an expected one is looked for, and the probability that it comes: SmolLM2-135M
# chose it in 203 of 302 such places in ten JSON objects, and in the others shorter pieces of the same text.
_NARROW, _LIKELY = 32, 0.67

Path = tuple[int, ...]


class _Row:
    """A grammar as a function of its row's new tokens; results are cached by the drafted path after a text."""

    def __init__(self, grammar: Grammar, vocabulary: int, name: str) -> None:
        self.vocabulary = vocabulary
        self._grammar, self._name = grammar, name
        self._taken: list[int] = []
        self._text: list[int] = []
        self._results: dict[tuple[str, Path], Any] = {}

    def expected(self, text: list[int], path: Path) -> int | None:
        """The token that most likely follows ``text`` and ``path``, ``None`` where the grammar does not know."""
        expected = getattr(self._grammar, "expected", None)
        return None if expected is None else self._result("expected", text, path, expected)

    def mask(self, text: list[int], path: Path) -> torch.Tensor:
        """A BoolTensor ``[v]``, true for the tokens that may follow ``text`` and ``path``."""
        return self._result("mask", text, path, self.fresh_mask)

    def mask_after(self, tokens: list[int]) -> torch.Tensor:
        text = self._text if tokens[: len(self._text)] == self._text else tokens
        return self.mask(text, tuple(tokens[len(text) :]))

    def fresh_mask(self) -> torch.Tensor:
        vocabulary = self.vocabulary
        mask = self._grammar.mask(vocabulary)
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != (vocabulary,):
            raise SettingTypeError(
                f"mask({vocabulary}) of the grammar that is registered for {self._name} must return a BoolTensor "
                f"[{vocabulary}], true for the tokens that may come next, got {mask!r}."
            )
        return mask

    def go_to(self, text: Sequence[int], path: Path = ()) -> None:
        taken, tokens = self._taken, [*text, *path]
        same = len(text) if taken[: len(text)] == tokens[: len(text)] else 0
        for before, token in zip(taken[same:], tokens[same:], strict=False):
            if before != token:
                break
            same += 1
        if same < len(taken):
            self._grammar.rollback(len(taken) - same)
            del taken[same:]
        for token in tokens[same:]:
            self._grammar.advance(token)
            taken.append(token)

    def _result(self, name: str, text: list[int], path: Path, find: Callable[[], Any]) -> Any:
        if text is not self._text:
            if text != self._text:
                self._results.clear()
            self._text = text
        if (name, path) not in self._results:
            self.go_to(text, path)
            if len(self._results) >= _KEPT:
                self._results.clear()
            self._results[name, path] = find()
        return self._results[name, path]


class GrammarMask:
    """A logits processor in place of one that forbids tokens by grammars; can be called for any position and row."""

    is_stateless = True

    def __init__(self, processor: Any, adapt: Callable[[torch.Tensor], Sequence[Grammar]]) -> None:
        self._processor, self._adapt = processor, adapt
        self.name = type(processor).__name__
        self.rows: list[_Row] = []
        self._start = 0

    def begin(self, input_ids: torch.Tensor, vocabulary: int) -> None:
        """Calls the processor with the prompts ``[b, s]``, as plain ``generate`` does, before there are logits."""
        scores = torch.zeros(len(input_ids), vocabulary, device=input_ids.device, dtype=torch.float32)
        self._processor(input_ids, scores)
        self.rows = [_Row(grammar, vocabulary, self.name) for grammar in self._adapt(input_ids)]
        self._start = input_ids.shape[1]

    def fit(self, vocabulary: int) -> None:
        """Makes masks as wide as the logits, whose width is known by now."""
        for row in self.rows:
            row.vocabulary = vocabulary

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[b, v]`` that follow the rows ``input_ids`` ``[b, s]``."""
        return torch.cat([self.of_row(row, input_ids[row], scores[row : row + 1]) for row in range(len(scores))])

    def of_row(self, row: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[n, v]`` that follow ``ids`` ``[s]`` of one row."""
        mask = self.rows[row].mask_after(ids[self._start :].tolist())
        return scores.masked_fill(~mask.to(scores.device), -torch.inf)

    def of_nodes(self, text: Text, draft: Draft, wanted: Sequence[bool], ends: frozenset[int]) -> torch.Tensor:
        """What may follow each node of a draft whose tokens the host knows, ``[b, t + 1, v]``; everything behind
        forbidden tokens and those that end a row, and after nodes that do not count."""
        size, vocabulary = draft.size + 1, self.rows[0].vocabulary
        masks = torch.ones(text.batch_size, size, vocabulary, dtype=torch.bool, device="cpu")
        assert draft.listed is not None
        for row in filter(wanted.__getitem__, range(text.batch_size)):
            chosen, paths = list(text.new[row]), dict[int, Path]({0: ()})
            for node in range(size):
                if node in paths:
                    masks[row, node] = self.rows[row].mask(chosen, paths[node])
                    for child in draft.children(row, node):
                        token = draft.listed[row][child - 1]
                        if token not in ends and masks[row, node, token]:
                            paths[child] = (*paths[node], token)
        return masks

    def finish(self, texts: Sequence[Sequence[int]]) -> None:
        """Leaves the processor as plain ``generate`` leaves it, which would have seen these new tokens of each row."""
        for row, tokens in zip(self.rows, texts, strict=True):
            row.go_to(tokens)
            row.fresh_mask()


@dataclass(frozen=True)
class DraftCursor:
    """The end of a row's text, its new tokens, from which drafts begin; ``ends`` are tokens that end a row."""

    masks: Sequence[GrammarMask]
    row: int
    text: list[int]
    ends: frozenset[int]

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether ``token`` may follow the drafted tokens ``path``, all of which are allowed themselves."""
        return not self._has_ended(path) and all(bool(mask[token]) for mask in self._masks(path))

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        """A BoolTensor ``[v]``, true for what may follow ``path``."""
        return reduce(torch.logical_and, self._masks(path))

    def likely(self, path: Sequence[int]) -> tuple[int, float] | None:
        """The token that follows ``path`` where there is hardly a choice, and its probability: 1.0 if it is forced."""
        if self._has_ended(path):
            return None
        allowed = self.mask(path).numpy()
        count = int(np.count_nonzero(allowed))
        if count == 1:
            return int(allowed.argmax()), 1.0
        if count > _NARROW:
            return None
        expected = (mask.rows[self.row].expected(self.text, tuple(path)) for mask in self.masks)
        return next(((token, _LIKELY) for token in expected if token is not None and allowed[token]), None)

    def _masks(self, path: Sequence[int]) -> list[torch.Tensor]:
        return [mask.rows[self.row].mask(self.text, tuple(path)) for mask in self.masks]

    def _has_ended(self, path: Sequence[int]) -> bool:
        return bool(path) and path[-1] in self.ends


def with_grammars(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors, with a :class:`GrammarMask` in place of each whose grammars can be rolled back."""
    return LogitsProcessorList(
        processor if (adapt := find_adapter(processor)) is None else GrammarMask(processor, adapt)
        for processor in processors
    )
