"""Streams that mark accepted drafts: the text is generate's, and the marks are those of the statistics."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from helpers.calls import new_spec
from helpers.models import character_tokenizer, ragged_batch
from helpers.processes import DEMO_MODEL
from hf_selfspec import MarkedStreamer, Piece, SettingError

INPUTS, OPTIONS = ragged_batch((8,), seed=3), {"max_new_tokens": 20, "do_sample": False}


def test_marks_are_those_of_the_statistics(llama: LlamaForCausalLM) -> None:
    spec, pieces = new_spec(), list[Piece]()
    streamer = MarkedStreamer(character_tokenizer(), pieces.append)
    for _ in range(2):
        pieces.clear()
        llama.generate(**INPUTS, **OPTIONS, assistant=spec, streamer=streamer)
    assert [piece.from_draft for piece in pieces] == spec.stats.from_draft[0]
    assert {piece.from_draft for piece in pieces} == {True, False}
    plain = llama.generate(**INPUTS, **OPTIONS)[0, 8:]
    assert "".join(piece.text for piece in pieces) == character_tokenizer().decode(plain)
    with pytest.raises(SettingError, match="MarkedStreamer takes one row, got 3"):
        llama.generate(**ragged_batch(), **OPTIONS, assistant=spec, streamer=streamer)


@pytest.mark.filterwarnings("ignore:the prompts are padded on the right")
def test_plain_generate_has_no_marks(llama: LlamaForCausalLM) -> None:
    """Nor has a call that is left to it; also after a call that ended with a drafted token."""
    spec, pieces = new_spec(), list[Piece]()
    streamer = MarkedStreamer(character_tokenizer(), pieces.append)
    padded = {name: each.clone() for name, each in INPUTS.items()}
    padded["attention_mask"][0, -2:] = 0
    for end in llama.generate(**INPUTS, **OPTIONS)[0, 10:].tolist():
        llama.generate(**INPUTS, **OPTIONS, eos_token_id=end, assistant=spec, streamer=streamer)
        if spec.stats.from_draft[0][-1]:
            break
    else:
        pytest.fail("a call has to end with a drafted token")
    for inputs, assistant in ((INPUTS, False), (padded, spec)):
        pieces.clear()
        llama.generate(**inputs, **OPTIONS, assistant=assistant, streamer=streamer)
        assert pieces
        assert not any(piece.from_draft for piece in pieces)
    assert spec.stats.left_to_generate


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
