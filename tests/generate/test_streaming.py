"""Streams that mark accepted drafts: the text is generate's, and the marks are those of the statistics."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from helpers.calls import new_spec
from helpers.models import character_tokenizer, ragged_batch
from helpers.processes import DEMO_MODEL
from hf_selfspec import MarkedStreamer, Piece, SelfSpec, SettingError


def streamed(model: LlamaForCausalLM, inputs: Any, spec: SelfSpec | bool, **options: Any) -> list[Piece]:
    pieces: list[Piece] = []
    streamer = MarkedStreamer(character_tokenizer(), pieces.append)
    model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=spec, streamer=streamer, **options)
    return pieces


def test_marks_are_those_of_the_statistics(llama: LlamaForCausalLM) -> None:
    inputs, spec, pieces = ragged_batch((8,), seed=3), new_spec(), list[Piece]()
    streamer = MarkedStreamer(character_tokenizer(), pieces.append)
    for _ in range(2):
        pieces.clear()
        llama.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=spec, streamer=streamer)
    assert [piece.from_draft for piece in pieces] == spec.stats.from_draft[0]
    assert {piece.from_draft for piece in pieces} == {True, False}
    plain = llama.generate(**inputs, max_new_tokens=20, do_sample=False)[0, 8:]
    assert "".join(piece.text for piece in pieces) == character_tokenizer().decode(plain)


@pytest.mark.filterwarnings("ignore:the prompts are padded on the right")
def test_plain_generate_has_no_marks(llama: LlamaForCausalLM) -> None:
    inputs, spec = ragged_batch((8,), seed=3), new_spec()
    assert not any(piece.from_draft for piece in streamed(llama, inputs, False))
    inputs["attention_mask"][0, -2:] = 0  # left to generate
    assert not any(piece.from_draft for piece in streamed(llama, inputs, spec))
    assert spec.stats.left_to_generate
    pieces, inputs, ends = list[Piece](), ragged_batch((8,), seed=3), set[bool]()
    streamer, options = MarkedStreamer(character_tokenizer(), pieces.append), {"max_new_tokens": 12, "do_sample": False}
    for end in llama.generate(**inputs, **options)[0, 10:].tolist():
        llama.generate(**inputs, **options, eos_token_id=end, assistant=spec, streamer=streamer)
        ends.add(spec.stats.from_draft[0][-1])
        pieces.clear()
        llama.generate(**inputs, **options, assistant=False, streamer=streamer)
        assert not any(piece.from_draft for piece in pieces)
    assert True in ends, "an earlier call has to end with a drafted token"


def test_several_rows_are_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(SettingError, match="MarkedStreamer takes one row, got 3"):
        streamed(llama, ragged_batch(), new_spec())


def test_characters_of_several_tokens_are_whole() -> None:
    """The demo model's tokenizer writes letters outside ASCII as bytes; what is unfinished comes at the end."""
    tokenizer, text = AutoTokenizer.from_pretrained(DEMO_MODEL), 'print("größe → 🙂🙂")\n\tdone'
    tokens, emoji = (tokenizer(string, add_special_tokens=False)["input_ids"] for string in (text, "🙂"))
    for put in (tokens, emoji[:1]):
        pieces: list[Piece] = []
        streamer = MarkedStreamer(tokenizer, pieces.append)
        streamer.put(torch.tensor([[1, 2]]))
        for index, token in enumerate(put):
            streamer.from_draft = [index % 2 == 0]
            streamer.put(torch.tensor([token]))
        assert bool(pieces) == (put is tokens)
        streamer.end()
        assert "".join(piece.text for piece in pieces) == (text if put is tokens else "\ufffd")
        assert len(pieces) < len(put) or put is not tokens
        assert not any("\ufffd" in piece.text for piece in pieces) or put is not tokens
