"""Streams text while it is generated, and marks the accepted draft tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..errors import SettingError
from ..model.anatomy import causal_lm
from ..model.encoding import Prompt, encoded
from ..selfspec import SelfSpec
from ..validation import check_count, check_share

# What an unfinished character is decoded to.
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """A piece of text, of one token or of the few that make up a character.

    Attributes:
        text: the text.
        from_draft: whether all of its tokens were drafted and accepted.
    """

    text: str
    from_draft: bool


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


def stream(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    write: Callable[[Piece], None],
    *,
    spec: SelfSpec | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float | None = None,
) -> str:
    """Generates, and passes on each piece of text as soon as it is known.

    ``spec.stats`` has the statistics afterwards.

    Args:
        model: a causal LM of transformers, or a PEFT model around one.
        tokenizer: the model's tokenizer.
        prompt: a text to continue, or a chat as a list of messages.
        write: called with each :class:`Piece`.
        spec: what drafts, ``SelfSpec()`` by default.
        max_new_tokens: maximum number of tokens to generate.
        temperature: sampling temperature, 0 for greedy decoding.
        top_p: share of the probability to sample from (nucleus sampling); the generation config's by default.

    Returns:
        The whole text.

    Raises:
        SelfSpecError: a setting, the prompt or the model is not allowed.
    """
    inner = causal_lm(model, "stream")
    check_count("stream(max_new_tokens)", max_new_tokens)
    inputs, pieces = encoded(tokenizer, prompt, inner.device), list[str]()

    def keep(piece: Piece) -> None:
        pieces.append(piece.text)
        write(piece)

    model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        **sampling("stream", temperature, top_p),
        assistant=spec or SelfSpec(),
        streamer=MarkedStreamer(tokenizer, keep),
    )
    return "".join(pieces)


def sampling(who: str, temperature: float, top_p: float | None) -> dict[str, Any]:
    """Returns the options of ``generate`` for a temperature (0 for greedy decoding) and ``top_p``."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < torch.inf:
        raise SettingError(f"{who}(temperature) must be a finite number of at least 0, got {temperature!r}.")
    if top_p is not None:
        check_share(f"{who}(top_p)", top_p, zero=False, one=True)
        if temperature == 0:
            raise SettingError(f"{who}(top_p={top_p!r}) has no effect at temperature 0: give a temperature, too.")
    if temperature == 0:
        return {"do_sample": False}
    warping = {} if top_p is None else {"top_p": top_p}
    return {"do_sample": True, "temperature": float(temperature), **warping}
