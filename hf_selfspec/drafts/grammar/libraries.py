"""Grammars of one row: their interface, those of libraries, found by the names of their classes, and users' own."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...errors import SettingTypeError, UnsupportedOptionError

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
        kind: the class itself; subclasses are registered on their own.
        adapter: a function of ``(processor, input_ids)``, see above.

    Raises:
        SettingTypeError: ``kind`` is not a class, or ``adapter`` is not a function.
    """
    if not isinstance(kind, type) or not callable(adapter):
        raise SettingTypeError(
            "register_grammar(kind, adapter) takes a class of logits processors and a function of (processor, "
            f"input_ids) that returns a grammar for each row, got {kind!r} and {adapter!r}."
        )
    _registered[kind] = adapter


def find_adapter(processor: Any) -> Callable[[torch.Tensor], Sequence[Grammar]] | None:
    """The function from ``input_ids`` ``[b, s]`` to a processor's grammars, ``None`` if none is known."""
    processor_class = type(processor)
    name = f"{processor_class.__module__}.{processor_class.__qualname__}"
    adapter = _registered.get(processor_class) or LIBRARIES.get(name)
    if adapter is None:
        return None

    def grammars(input_ids: torch.Tensor) -> Sequence[Grammar]:
        rows = adapter(processor, input_ids)
        complete = isinstance(rows, Sequence) and len(rows) == len(input_ids)
        if not complete or not all(callable(getattr(row, method, None)) for row in rows for method in _METHODS):
            raise SettingTypeError(
                f"the adapter that is registered for {processor_class.__name__} must return a grammar for each of the "
                f"{len(input_ids)} rows, with the methods mask(vocabulary), advance(token) and rollback(count), got "
                f"{rows!r}."
            )
        return rows

    return grammars


def _unpacked(words: torch.Tensor, vocabulary: int, beyond: bool) -> torch.Tensor:
    """A BoolTensor ``[vocabulary]`` of the bits of int32 ``words``; ``beyond`` is the value for tokens after them."""
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little", count=min(vocabulary, 32 * len(words)))
    mask = torch.from_numpy(bits.view(np.bool_))
    if len(mask) == vocabulary:
        return mask
    return torch.cat([mask, torch.full((vocabulary - len(mask),), beyond, device="cpu")])


class _Matching:
    """A matcher that ignores tokens after its end, where its processor no longer calls it."""

    library: str

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._steps: list[int | None] = []  # ``None`` for tokens that the matcher ignored

    @property
    def taken(self) -> list[int]:
        return [token for token in self._steps if token is not None]

    def advance(self, token: int) -> None:
        took = self.take(token)
        if took is False:
            raise UnsupportedOptionError(
                f"a grammar of {self.library} does not allow token {token}, which was generated nevertheless: plain "
                "generate fails here, too, or continues with a text that the grammar does not allow. Another logits "
                "processor forbids all tokens that the grammar allows, or forces one, or the grammar was made for "
                "fewer tokens than the model has."
            )
        self._steps.append(token if took else None)

    def rollback(self, count: int) -> None:
        back = sum(token is not None for token in self._steps[-count:])
        del self._steps[-count:]
        if back:
            self.take_back(back)

    def take(self, token: int) -> bool | None:
        """Whether the matcher consumed the token, ``None`` if it has ended and ignores it."""
        raise NotImplementedError

    def take_back(self, count: int) -> None:
        """Takes back the last ``count`` tokens that were consumed, which are no longer among :attr:`taken`."""
        self.matcher.rollback(count)


class XGrammar(_Matching):
    """A ``GrammarMatcher`` of xgrammar, its row of the processor's bitmask, and the texts of all tokens if known."""

    library = "xgrammar"

    def __init__(self, matcher: Any, bitmask: torch.Tensor, row: int, texts: Sequence[bytes] = ()) -> None:
        super().__init__(matcher)
        self.bitmask, self.row, self.texts = bitmask, row, texts

    def mask(self, vocabulary: int) -> torch.Tensor:
        """The mask as xgrammar's processor applies it: after the end it stays as it was before the last token."""
        if not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(self.bitmask, self.row)
        elif taken := self.taken:
            self.matcher.rollback(1)
            self.matcher.fill_next_token_bitmask(self.bitmask, self.row)
            self.matcher.accept_token(taken[-1])
        return _unpacked(self.bitmask[self.row], vocabulary, beyond=True)

    def expected(self) -> int | None:
        """The longest token with which the text that has to come next begins."""
        if self.matcher.is_terminated() or not self.texts:
            return None
        try:
            text = self.matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:  # it ends within a character
            text = error.object
        texts = {token: bytes(self.texts[token]) for token in self.mask(len(self.texts)).nonzero()[:, 0].tolist()}
        beginnings = [token for token in texts if texts[token] and text.startswith(texts[token])]
        return max(beginnings, key=lambda token: len(texts[token]), default=None)

    def take(self, token: int) -> bool | None:
        return None if self.matcher.is_terminated() else bool(self.matcher.accept_token(token))


class LLGuidance(_Matching):
    """An ``LLMatcher`` of llguidance."""

    library = "llguidance"

    def mask(self, vocabulary: int) -> torch.Tensor:
        words = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32)
        return _unpacked(words, vocabulary, beyond=False)

    def take(self, token: int) -> bool | None:
        if self.matcher.is_stopped() and self.matcher.validate_tokens([token]) != 1:
            return None
        # Unlike ``consume_token`` this leaves the matcher as it is where the token is not allowed.
        return bool(self.matcher.try_consume_tokens([token]))


class OutlinesCore(_Matching):
    """One of a list of ``Guide`` objects of outlines-core."""

    library = "outlines-core"

    def __init__(self, guides: list[Any], row: int) -> None:
        super().__init__(guides[row])
        self.guides, self.row = guides, row
        self.begun = copy.copy(self.matcher)  # a guide goes back only so far

    def mask(self, vocabulary: int) -> torch.Tensor:
        words = torch.zeros((vocabulary + 31) // 32, dtype=torch.int32, device="cpu")
        self.matcher.write_mask_into(words.data_ptr(), words.numel(), words.element_size())
        return _unpacked(words, vocabulary, beyond=False)

    def take(self, token: int) -> bool | None:
        if not self.matcher.accepts_tokens([token]):
            return None if self.matcher.is_finished() else False
        self.matcher.advance(token, return_tokens=False)
        return True

    def take_back(self, count: int) -> None:
        if count <= self.matcher.get_allowed_rollback():
            self.matcher.rollback_state(count)
            return
        self.matcher = self.guides[self.row] = copy.copy(self.begun)
        for token in self.taken:
            self.matcher.advance(token, return_tokens=False)


def _xgrammars(matchers: Sequence[Any], bitmask: torch.Tensor, grammar: Any) -> Sequence[XGrammar]:
    # The texts of all tokens, in xgrammar's own list, which creates each as it is read.
    texts = getattr(getattr(grammar.tokenizer_info, "_handle", None), "decoded_vocab", ())
    texts = texts() if callable(texts) else texts
    return [XGrammar(matcher, bitmask, row, texts) for row, matcher in enumerate(matchers)]


def _private(processor: Any, name: str) -> Any:
    """An attribute of an outlines processor that is not part of outlines' public interface."""
    if not hasattr(processor, name):
        raise UnsupportedOptionError(
            f"{type(processor).__name__} of this version of outlines has no `{name}`, where 1.3.3 keeps its state. "
            "Use that version, or declare how to reach the state by hf_selfspec.register_grammar."
        )
    return getattr(processor, name)


LIBRARIES: dict[str, Adapter] = {
    "xgrammar.contrib.hf.LogitsProcessor": lambda processor, _: _xgrammars(
        processor.matchers, processor.token_bitmask, processor.compiled_grammars[0]
    ),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda processor, _: _xgrammars(
        _private(processor, "_matchers"), _private(processor, "_bitmask"), _private(processor, "compiled_grammar")
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": lambda processor, _: [
        LLGuidance(matcher) for matcher in _private(processor, "ll_matchers")
    ],
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda processor, input_ids: [
        OutlinesCore(_private(processor, "_guides"), row) for row in range(len(input_ids))
    ],
}
