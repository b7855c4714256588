"""Streams that mark accepted drafts: the text is generate's, and the marks are those of the statistics."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from helpers.calls import new_spec
from helpers.models import ROW
from hf_selfspec import MarkedStreamer, Piece


@pytest.mark.parametrize("end", ["", "!"], ids=["letters", "symbols wait for the next space"])
def test_pieces_of_words_and_their_marks(llama: LlamaForCausalLM, end: str) -> None:
    """Plain calls have none, also after one with drafts."""
    options, pieces = ROW | {"max_new_tokens": 20, "do_sample": False}, list[Piece]()
    words: Any = SimpleNamespace(decode=lambda tokens, **_: "".join(f" {token}{end}" for token in tokens))
    streamer, spec = MarkedStreamer(words, pieces.append), new_spec()
    new = llama.generate(**options)[0, ROW["input_ids"].shape[1] :].tolist()
    for assistant in (spec, None, spec):
        pieces.clear()
        llama.generate(**options, assistant=assistant, streamer=streamer)
        assert "".join(piece.text for piece in pieces) == words.decode(new)
        marked = [piece for piece in pieces if piece.text.strip()]
        assert [piece.text.split() for piece in marked] == [[f"{token}{end}"] for token in new]
        drafted = [piece.from_draft for piece in marked]
        assert drafted == (spec.stats.from_draft[0] if assistant else [False] * 20)
    assert len(set(drafted)) == 2
