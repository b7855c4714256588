"""Streams text while it is generated, and marks the accepted draft tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..errors import SettingError

# What an unfinished character is decoded to.
_UNFINISHED = "\ufffd"


class Piece(NamedTuple):
    """A piece of text, of one token or of the few that make up a character."""

    text: str
    from_draft: bool  # whether all of its tokens were drafted and accepted


class MarkedStreamer(BaseStreamer):
    """A streamer for ``generate`` that marks which pieces of the text were drafted.

    ::

        streamer = MarkedStreamer(tokenizer, lambda piece: print(piece.text, piece.from_draft))
        model.generate(**inputs, assistant=SelfSpec(), streamer=streamer)

    Args:
        tokenizer: the model's tokenizer.
        write: called with each :class:`Piece` as soon as it is known, without the prompt and special tokens.

    Attributes:
        from_draft: for each row whether the token that :meth:`put` gets was drafted and accepted; empty where that is
            not known, as in calls that are left to plain ``generate``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[Piece], None]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self.from_draft: list[bool] = []
        self._begin()

    def _begin(self) -> None:
        self._is_prompt = True
        self._tokens: list[int] = []
        self._drafted: list[bool] = []
        # Tokens from the first index on are decoded together, since spaces depend on the tokens before; the text of
        # those before the second index was written already.
        self._context, self._written = 0, 0

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then one token at a time.

        Raises:
            SettingError: there are several rows.
        """
        if value.dim() > 1 and len(value) > 1:
            raise SettingError(f"MarkedStreamer takes one row, got {len(value)}. Generate them one after the other.")
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += value.flatten().tolist()
        self._drafted += self.from_draft or [False]
        self.from_draft = []
        self._write_new(ended=False)

    def end(self) -> None:
        """Writes what is left."""
        self._write_new(ended=True)
        self._begin()

    def _write_new(self, ended: bool) -> None:
        text = self._decode(self._tokens[self._context :])
        written = len(self._decode(self._tokens[self._context : self._written]))
        if len(text) <= written or (text.endswith(_UNFINISHED) and not ended):
            return
        self._write(Piece(text[written:], all(self._drafted[self._written :])))
        self._context, self._written = self._written, len(self._tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
