"""Adapters for the grammars of libraries, found by the names of their classes, so that no library is imported here."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedOptionError

# The most allowed tokens of an outlines-core state whose next states are looked up, which takes 0.3 µs each.
_MOST_LEADS = 1024


def _refusal(library: str, token: int) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"a grammar of {library} does not allow token {token}, which was generated nevertheless: plain generate fails "
        "here, too, or continues with a text that the grammar does not allow. Another logits processor forbids all "
        "tokens that the grammar allows, or forces one, or the grammar was made for fewer tokens than the model has."
    )


def _unpacked(words: torch.Tensor, vocabulary: int, beyond: bool) -> torch.Tensor:
    """A BoolTensor ``[vocabulary]`` of the bits of int32 ``words``; ``beyond`` is the value for tokens after them."""
    bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little", count=min(vocabulary, 32 * len(words)))
    found = torch.from_numpy(bits.view(np.bool_))
    if len(found) == vocabulary:
        return found
    return torch.cat([found, torch.full((vocabulary - len(found),), beyond, device="cpu")])


class _Matching:
    """A matcher that ignores tokens after its end, where its processor no longer calls it."""

    def __init__(self) -> None:
        # For each token whether the matcher consumed it, and the tokens that it consumed.
        self.steps: list[bool] = []
        self.taken: list[int] = []

    def advance(self, token: int) -> None:
        """Advances by the next token."""
        takes = self.takes(token)
        if takes:
            self.take(token)
            self.taken.append(token)
        self.steps.append(takes)

    def rollback(self, count: int) -> None:
        """Rolls back the last ``count`` tokens."""
        taken = sum(self.steps[-count:])
        del self.steps[-count:]
        if taken:
            self.take_back(taken)
            del self.taken[-taken:]

    def takes(self, token: int) -> bool:
        raise NotImplementedError

    def take(self, token: int) -> None:
        raise NotImplementedError

    def take_back(self, count: int) -> None:
        raise NotImplementedError


class XGrammar(_Matching):
    """A ``GrammarMatcher`` of xgrammar and its row of the processor's bitmask.

    Args:
        matcher, bitmask, row: see above.
        texts: the texts of all tokens; if empty, :meth:`expected` returns ``None``.
    """

    def __init__(self, matcher: Any, bitmask: torch.Tensor, row: int, texts: Sequence[bytes] = ()) -> None:
        super().__init__()
        self.matcher, self.bitmask, self.row, self.texts = matcher, bitmask, row, texts

    def mask(self, vocabulary: int) -> torch.Tensor:
        """The mask as xgrammar's processor applies it: after the end it stays as it was before the last token."""
        if not self.matcher.is_terminated():
            self.matcher.fill_next_token_bitmask(self.bitmask, self.row)
        elif self.taken:
            self.matcher.rollback(1)
            self.matcher.fill_next_token_bitmask(self.bitmask, self.row)
            self.matcher.accept_token(self.taken[-1])
        return _unpacked(self.bitmask[self.row], vocabulary, beyond=True)

    def expected(self) -> int | None:
        """The longest token with which the text that has to come next begins."""
        if self.matcher.is_terminated() or not self.texts:
            return None
        text = _forced_text(self.matcher)
        texts = {token: bytes(self.texts[token]) for token in self.mask(len(self.texts)).nonzero()[:, 0].tolist()}
        found = [token for token in texts if texts[token] and text.startswith(texts[token])]
        return max(found, key=lambda token: len(texts[token]), default=None)

    def takes(self, token: int) -> bool:
        return not self.matcher.is_terminated()

    def take(self, token: int) -> None:
        if not self.matcher.accept_token(token):
            raise _refusal("xgrammar", token)

    def take_back(self, count: int) -> None:
        self.matcher.rollback(count)


def _forced_text(matcher: Any) -> bytes:
    """The text that has to come next, which may end within a character."""
    try:
        return matcher.find_jump_forward_string().encode()
    except UnicodeDecodeError as error:
        return error.object


class LLGuidance(_Matching):
    """An ``LLMatcher`` of llguidance."""

    def __init__(self, matcher: Any) -> None:
        super().__init__()
        self.matcher = matcher

    def mask(self, vocabulary: int) -> torch.Tensor:
        """The mask as processors of llguidance apply it."""
        return _unpacked(
            torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32), vocabulary, False
        )

    def takes(self, token: int) -> bool:
        return not self.matcher.is_stopped() or self.matcher.validate_tokens([token]) == 1

    def take(self, token: int) -> None:
        # Unlike ``consume_token`` this leaves the matcher as it is where the token is not allowed.
        if not self.matcher.try_consume_tokens([token]):
            raise _refusal("llguidance", token)

    def take_back(self, count: int) -> None:
        self.matcher.rollback(count)


class OutlinesCore(_Matching):
    """One of a list of ``Guide`` objects of outlines-core, and its ``Index``."""

    def __init__(self, guides: list[Any], row: int, index: Any) -> None:
        super().__init__()
        self.guides, self.row, self.index = guides, row, index
        # A guide that continues a text cannot be reset to where it began here, so a copy is kept.
        self.begun = copy.copy(guides[row]) if guides[row].get_allowed_rollback() else None

    @property
    def guide(self) -> Any:
        return self.guides[self.row]

    def mask(self, vocabulary: int) -> torch.Tensor:
        """The mask as the processor of outlines-core applies it."""
        words = torch.zeros((vocabulary + 31) // 32, dtype=torch.int32, device="cpu")
        self.guide.write_mask_into(words.data_ptr(), words.numel(), words.element_size())
        return _unpacked(words, vocabulary, beyond=False)

    def expected(self) -> int | None:
        """The token that leads furthest: to the state that the most other tokens reach with one token more."""
        ends = self._ends(self.guide.get_state())
        before: Counter[int] = Counter()
        for end in set(ends.values()):
            before.update(set(self._ends(end).values()) - {end})
        furthest = max((before[end] for end in ends.values()), default=0)
        found = [token for token, end in ends.items() if before[end] == furthest]
        return found[0] if len(found) == 1 else None

    def _ends(self, state: int) -> dict[int, int]:
        """The tokens that are allowed in a state, each with the state that it leads to; none if there are too many."""
        index, tokens = self.index, self.index.get_allowed_tokens(state) or ()
        ends = {token: index.get_next_state(state, token) for token in tokens if len(tokens) <= _MOST_LEADS}
        return {token: end for token, end in ends.items() if end is not None}

    def takes(self, token: int) -> bool:
        return not self.guide.is_finished() or self.guide.accepts_tokens([token])

    def take(self, token: int) -> None:
        if not self.guide.accepts_tokens([token]):
            raise _refusal("outlines-core", token)
        self.guide.advance(token, return_tokens=False)

    def take_back(self, count: int) -> None:
        if count <= self.guide.get_allowed_rollback():
            self.guide.rollback_state(count)
            return
        if self.begun is None:
            self.guide.reset()
        else:
            self.guides[self.row] = copy.copy(self.begun)
        for token in self.taken[:-count]:
            self.guide.advance(token, return_tokens=False)


def _xgrammars(matchers: Sequence[Any], bitmask: torch.Tensor, grammar: Any) -> Sequence[XGrammar]:
    texts = _texts_of(grammar.tokenizer_info)
    return [XGrammar(matcher, bitmask, row, texts) for row, matcher in enumerate(matchers)]


def _texts_of(info: Any) -> Sequence[bytes]:
    """The texts of all tokens, in xgrammar's own list, which creates each as it is read."""
    texts = getattr(getattr(info, "_handle", None), "decoded_vocab", ())
    return texts() if callable(texts) else texts


def _own(processor: Any, name: str) -> Any:
    """An attribute of an outlines processor that is not part of outlines' public interface."""
    if not hasattr(processor, name):
        raise UnsupportedOptionError(
            f"{type(processor).__name__} of this version of outlines has no `{name}`, where 1.3.3 keeps its state. "
            "Use that version, or declare how to reach the state by hf_selfspec.register_grammar."
        )
    return getattr(processor, name)


def _xgrammar(processor: Any, input_ids: torch.Tensor) -> Sequence[XGrammar]:
    return _xgrammars(processor.matchers, processor.token_bitmask, processor.compiled_grammars[0])


def _xgrammar_of_outlines(processor: Any, input_ids: torch.Tensor) -> Sequence[XGrammar]:
    return _xgrammars(_own(processor, "_matchers"), _own(processor, "_bitmask"), _own(processor, "compiled_grammar"))


def _llguidance_of_outlines(processor: Any, input_ids: torch.Tensor) -> Sequence[LLGuidance]:
    return [LLGuidance(matcher) for matcher in _own(processor, "ll_matchers")]


def _outlines_core(processor: Any, input_ids: torch.Tensor) -> Sequence[OutlinesCore]:
    guides, index = _own(processor, "_guides"), _own(processor, "index")
    return [OutlinesCore(guides, row, index) for row in range(len(input_ids))]


LIBRARIES: dict[str, Callable[[Any, torch.Tensor], Sequence[Any]]] = {
    "xgrammar.contrib.hf.LogitsProcessor": _xgrammar,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _xgrammar_of_outlines,
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _llguidance_of_outlines,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _outlines_core,
}
