"""Streams text while it is generated, and marks the accepted draft tokens."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer


class Piece(NamedTuple):
    """A piece of generated text, usually whole words, and whether it was drafted."""

    text: str
    from_draft: bool  # whether all of its tokens were drafted and accepted


class MarkedStreamer(TextStreamer):
    """Transformers' ``TextStreamer``, for one row, which calls ``write`` with each :class:`Piece` instead of printing.

    Attributes:
        from_draft: whether the next token was drafted and accepted; empty where that is not known, as in plain calls.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[Piece], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.from_draft: list[bool] = []
        self._write, self._marks = write, list[bool]()

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one token at a time."""
        self._marks += [] if self.next_tokens_are_prompt else self.from_draft or [False]
        self.from_draft = []
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes a text, behind which the last token may have begun a word that is not whole yet."""
        decoded = self.tokenizer.decode(self.token_cache, **self.decode_kwargs) if self.token_cache else ""
        count = len(self._marks) - (len(decoded) > self.print_len)
        if text:
            self._write(Piece(text, all(self._marks[:count] or self._marks)))
        if text or stream_end:
            del self._marks[:count]
