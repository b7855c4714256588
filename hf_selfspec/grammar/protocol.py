"""The interface of a grammar for one row, and the logits processors whose grammars are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.generation import logits_process as lp

from ..errors import SettingTypeError
from .libraries import LIBRARIES

# Returns the grammars of all rows, given a processor and the ``input_ids`` ``[b, s]`` of its latest call.
Adapter = Callable[[Any, torch.Tensor], Sequence["Grammar"]]

_METHODS = ("mask", "advance", "rollback")
_registered: dict[type, Adapter] = {}


class Grammar(Protocol):
    """Which tokens may follow in one row of a batch; tokens can be rolled back.

    A grammar may also have a method ``expected()``, which returns the token that most likely comes next where there is
    hardly a choice (a key of an object, which can be split into tokens in several ways), or ``None``.
    """

    def mask(self, vocabulary: int) -> torch.Tensor:
        """A BoolTensor ``[vocabulary]`` on the CPU, true for the tokens that may come next; the state does not change.

        If only one token may come next, it is drafted without a forward.
        """

    def advance(self, token: int) -> None:
        """Advances by the next token, as the processor does at the beginning of its next call."""

    def rollback(self, count: int) -> None:
        """Rolls back the last ``count`` tokens, at most as many as :meth:`advance` was called with."""


def register_grammar(kind: type, adapter: Adapter) -> None:
    """Declares that a class of logits processors does nothing but forbid tokens, by grammars that can be rolled back.

    The processor itself is called once for each generation, with the prompts and scores of 0, before anything goes
    through the model. Then ``adapter(processor, input_ids)``, with the ``input_ids`` ``[b, s]`` of that call, returns
    for each row an object with ``mask(vocabulary)``, ``advance(token)`` and ``rollback(count)``, see :class:`Grammar`.
    These work on the state of the processor itself: at the end of the generation they have consumed all new tokens
    of their rows but the last one of the batch, and no padding, so that the processor is as plain ``generate`` leaves
    it, except for padding. Processors of xgrammar and outlines (with outlines-core, llguidance or xgrammar) are known.

    Args:
        kind: the class itself; subclasses are registered on their own. Also the class of a function that is passed as
            ``prefix_allowed_tokens_fn``.
        adapter: a function of ``(processor, input_ids)``, see above.

    Raises:
        SettingTypeError: ``kind`` is not a class, or ``adapter`` is not a function.
    """
    if not isinstance(kind, type):
        raise SettingTypeError(f"register_grammar(kind) takes a class of logits processors, got {kind!r}.")
    if not callable(adapter):
        raise SettingTypeError(
            f"register_grammar({kind.__name__}, adapter) takes a function of (processor, input_ids) that returns a "
            f"grammar for each row, got {adapter!r}."
        )
    _registered[kind] = adapter


def find_adapter(processor: Any) -> Callable[[torch.Tensor], Sequence[Grammar]] | None:
    """The function from ``input_ids`` ``[b, s]`` to a processor's grammars, ``None`` if none is known."""
    if type(processor) is lp.PrefixConstrainedLogitsProcessor:
        processor = processor._prefix_allowed_tokens_fn
    kind = type(processor)
    adapter = _registered.get(kind) or LIBRARIES.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if adapter is None else lambda input_ids: _checked(processor, adapter(processor, input_ids), input_ids)


def _checked(processor: Any, grammars: Sequence[Grammar], input_ids: torch.Tensor) -> Sequence[Grammar]:
    complete = isinstance(grammars, Sequence) and len(grammars) == len(input_ids)
    if not complete or not all(callable(getattr(one, name, None)) for one in grammars for name in _METHODS):
        raise SettingTypeError(
            f"the adapter that is registered for {type(processor).__name__} must return a grammar for each of the "
            f"{len(input_ids)} rows, with the methods mask(vocabulary), advance(token) and rollback(count), got "
            f"{grammars!r}."
        )
    return grammars
