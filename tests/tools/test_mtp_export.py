"""MTP layers that were fitted leave as checkpoints of speculators, which other engines load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.blocks import of_speculators
from helpers.calls import check_lossless
from helpers.fitted import mtp_of
from hf_selfspec import MTP, FixedLength, MtpHead, SelfSpec, load_head
from hf_selfspec.errors import UnsupportedModelError


def exported_to_speculators(folder: Path) -> tuple[PreTrainedModel, MtpHead]:
    """A head of a Qwen 3, whose model lies beside it."""
    model, head = build("qwen3"), mtp_of(build("qwen3"))
    model.save_pretrained(folder / "model")
    model = type(model).from_pretrained(folder / "model")
    SelfSpec(MTP(head), FixedLength(4)).export_draft(folder / "head", model)
    return model, head


def test_an_mtp_layer_leaves_in_the_format_of_speculators(tmp_path: Path) -> None:
    """It comes back with the same weights, and drafts where it is attached; a head with several states has no place."""
    model, head = exported_to_speculators(tmp_path)
    again = load_head(model, tmp_path / "head")
    assert isinstance(again, MtpHead)
    kept, exported = head.state_dict(), again.state_dict()
    assert kept.keys() == exported.keys()
    assert all(torch.equal(kept[name], exported[name]) for name in kept)
    check_lossless(model, SelfSpec(), 8)
    SelfSpec(MTP(head), FixedLength(4)).export_draft(tmp_path / "head", model)  # in place of the first
    for others, message in (
        ((model, mtp_of(model, state_layers=(1, 3))), r"before layers \[1, 3\], for which no format has a place"),
        ((build("llama"), mtp_of(build("llama"))), r"LlamaForCausalLM ships with none.*one layer of \('qwen3',\)"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            SelfSpec(MTP(others[1])).export_draft(tmp_path / "other", others[0])


def test_speculators_loads_an_exported_mtp_layer(tmp_path: Path) -> None:
    package = of_speculators("mtp")
    model, head = exported_to_speculators(tmp_path)
    theirs = package.MTPDraftModel.from_pretrained(tmp_path / "head").eval()
    assert theirs.config.num_speculative_steps == 4
    ids = torch.randint(3, 90, (1, 9))
    with torch.no_grad():
        states, embeddings = model.model(ids).last_hidden_state[:, :-1], model.get_input_embeddings()(ids[:, 1:])
        places = torch.arange(8)[None]
        rotation = theirs.rotary_emb(states, places)
        mask = torch.full((8, 8), -torch.inf).triu(1)[None, None]
        states_of_theirs = theirs.mtp_layers[0](
            states, embeddings, attention_mask=mask, position_ids=places, position_embeddings=rotation
        )
        torch.testing.assert_close(states_of_theirs, head(embeddings, states, places), atol=1e-5, rtol=1e-5)
