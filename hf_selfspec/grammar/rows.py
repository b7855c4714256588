"""Grammars of the rows of one generation, as functions of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process as lp

from ..errors import SettingTypeError
from ..types import Text
from .protocol import Grammar, find_adapter

# Masks that a row keeps: those of one draft and its verification.
_KEPT = 64

Path = tuple[int, ...]


class _Row:
    """A grammar as a function of the new tokens of its row: it goes back and forth to where it is asked."""

    def __init__(self, grammar: Grammar, vocabulary: int, name: str) -> None:
        self._grammar, self._vocabulary, self._name = grammar, vocabulary, name
        self._taken: list[int] = []
        self._masks: dict[Path, torch.Tensor] = {}

    def mask(self, tokens: Path) -> torch.Tensor:
        """A BoolTensor ``[v]``, true for what may follow ``tokens``."""
        if tokens not in self._masks:
            self.go_to(tokens)
            if len(self._masks) >= _KEPT:
                self._masks.clear()
            self._masks[tokens] = self.fresh_mask()
        return self._masks[tokens]

    def fresh_mask(self) -> torch.Tensor:
        """The mask where the grammar stands."""
        vocabulary = self._vocabulary
        mask = self._grammar.mask(vocabulary)
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != (vocabulary,):
            raise SettingTypeError(
                f"mask({vocabulary}) of the grammar that is registered for {self._name} must return a BoolTensor "
                f"[{vocabulary}], true for the tokens that may come next, got {mask!r}."
            )
        return mask

    def go_to(self, tokens: Sequence[int]) -> None:
        """Has the grammar take in exactly these tokens."""
        taken, same = self._taken, 0
        for known, token in zip(taken, tokens, strict=False):
            if known != token:
                break
            same += 1
        if same < len(taken):
            self._grammar.rollback(len(taken) - same)
            del taken[same:]
        for token in tokens[same:]:
            self._grammar.advance(token)
            taken.append(token)


class GrammarMask:
    """A logits processor in the place of one that is known to forbid tokens by grammars that can go back.

    It is a function of what it is given, so that it can be called for drafts, for any position and for one row.

    Args:
        processor: the user's own. It is called once, by :meth:`begin`.
        adapt: makes its grammars, see :func:`.protocol.find_adapter`.

    Attributes:
        name: of the processor's class.
    """

    is_stateless = True

    def __init__(self, processor: Any, adapt: Callable[[torch.Tensor], Sequence[Grammar]]) -> None:
        self._processor, self._adapt = processor, adapt
        self.name = type(processor).__name__
        self._rows: list[_Row] = []
        self._start = 0

    @classmethod
    def of(cls, processor: Any) -> GrammarMask | None:
        """What takes the place of ``processor``, ``None`` where it has no grammars that are known to go back."""
        adapt = find_adapter(processor)
        return None if adapt is None else cls(processor, adapt)

    def begin(self, input_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Calls the processor behind the prompts ``input_ids`` ``[b, s]``, as plain ``generate`` does first."""
        self._processor(input_ids, logits.clone())
        self._rows = [_Row(grammar, logits.shape[-1], self.name) for grammar in self._adapt(input_ids)]
        self._start = input_ids.shape[1]

    def allowed(self, row: int, tokens: Path) -> torch.Tensor:
        """A BoolTensor ``[v]``, true for what may follow these new tokens of ``row``."""
        return self._rows[row].mask(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[b, v]`` that follow the rows ``input_ids`` ``[b, s]``."""
        return torch.cat([self.of_row(row, input_ids[row], scores[row : row + 1]) for row in range(len(scores))])

    def of_row(self, row: int, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[1, v]`` that follow ``ids`` ``[s]`` of one row."""
        mask = self.allowed(row, tuple(ids[self._start :].tolist()))
        return scores.masked_fill(~mask.to(scores.device), -torch.inf)

    def finish(self, texts: Sequence[Sequence[int]]) -> None:
        """Leaves the processor as plain ``generate`` leaves it.

        Args:
            texts: for each row the new tokens that it would have seen.
        """
        for row, tokens in zip(self._rows, texts, strict=True):
            row.go_to(tokens)
            row.fresh_mask()


@dataclass(frozen=True)
class Spot:
    """The end of a row's text, from which drafts begin.

    Attributes:
        masks: the grammars.
        row: which row.
        tokens: its new tokens.
        ends: tokens that end a row.
    """

    masks: Sequence[GrammarMask]
    row: int
    tokens: Path
    ends: frozenset[int]

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether ``token`` may follow the drafted tokens ``path``, which may all follow each other."""
        return not self._has_ended(path) and all(bool(mask[token]) for mask in self._masks(path))

    def only(self, path: Sequence[int]) -> int | None:
        """The token that has to follow ``path``, ``None`` where there are several or none."""
        if self._has_ended(path):
            return None
        allowed = reduce(torch.logical_and, self._masks(path)).numpy()
        return int(allowed.argmax()) if int(np.count_nonzero(allowed)) == 1 else None

    def forced(self, most: int) -> Path:
        """What has to come next: tokens as long as a single one is allowed, ``most`` at most."""
        found: Path = ()
        while len(found) < most and (token := self.only(found)) is not None:
            found += (token,)
        return found

    def _masks(self, path: Sequence[int]) -> list[torch.Tensor]:
        tokens = self.tokens + tuple(path)
        return [mask.allowed(self.row, tokens) for mask in self.masks]

    def _has_ended(self, path: Sequence[int]) -> bool:
        return bool(path) and path[-1] in self.ends


@dataclass(frozen=True)
class Constraint:
    """What grammars say about drafts.

    Attributes:
        masks: of all grammars; false in a condition where there are none.
        ends: tokens that end a row.
    """

    masks: Sequence[GrammarMask] = ()
    ends: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.masks)

    def at(self, text: Text, row: int) -> Spot:
        """The end of a row."""
        tokens = tuple(text.ids[row, text.prompt_width : text.lengths[row]].tolist())
        return Spot(self.masks, row, tokens, self.ends)


def with_grammars(processors: lp.LogitsProcessorList) -> lp.LogitsProcessorList:
    """The processors, with a :class:`GrammarMask` in the place of each that has grammars that can go back."""
    return lp.LogitsProcessorList(GrammarMask.of(processor) or processor for processor in processors)
