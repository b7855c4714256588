"""MTP layers as drafts: what they predict, whatever was drafted and accepted before, and what comes of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.calls import unchanged
from helpers.fitted import adapter_of, mtp_of
from helpers.machine import Machine, bytes_that_wait
from helpers.models import BATCH, ROW, tiny_llama
from helpers.watched import watched
from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SettingError, SettingTypeError, TopKTree
from hf_selfspec.batch import Draft, Text
from hf_selfspec.drafts import MTP, Cascade, EarlyExitAdapter, Lookup
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.drafts.states import StatesDraft
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.modules.mtp import MtpHead
from hf_selfspec.modules.shipped import attach

# A tree, and further options of a call.
_CALLS: dict[str, tuple[TopKTree | None, dict[str, Any]]] = {
    "line": (None, {}),
    "tree": (TopKTree(((0.9999, 3), (1.0, 1))), {}),
    "chunks": (None, {"prefill_chunk_size": 4}),
}


@torch.no_grad()
def attentive_mtp_of(model: PreTrainedModel, layers: int, state_layers: tuple[int, ...] = ()) -> MtpHead:
    """One whose attention is far from uniform and weighs in, so that wrong places show."""
    head = mtp_of(model, layers, state_layers=state_layers)
    for name, weight in head.layers.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "o_proj")):
            weight.mul_(4.0)
    return head


@torch.no_grad()
def predicted(model: PreTrainedModel, head: MtpHead, text: torch.Tensor, drafted: torch.Tensor) -> list[int]:
    """What a head predicts after a text ``[s]`` and none, one, ... of the drafted tokens ``[t]``, without caches, by
    the definition of the layers: each reads the tokens one place further on, and the last one goes on with its own
    states."""
    known = model.model(text[None, :-1], output_hidden_states=bool(head.state_layers))
    states = known.last_hidden_state
    if head.state_layers:
        states = head.fuse(torch.cat([known.hidden_states[layer] for layer in head.state_layers], dim=-1))
    embeddings = model.get_input_embeddings()(torch.cat([text, drafted]))[None]
    places, entered, found = torch.arange(embeddings.shape[1])[None], states, list[int]()
    for depth in range(len(drafted)):
        layer = min(depth, len(head.layers) - 1)
        # Beyond its place the last layer gets one more entry, of its own last state.
        entered = states if depth == layer else torch.cat([entered, states[:, -1:]], dim=1)
        read = slice(layer + 1, layer + 1 + entered.shape[1])
        states = head(embeddings[:, read], entered, places[:, read], layer=layer)
        found.append(int(model.lm_head(states[0, -1]).argmax()))
    return found


def check_draft(model: PreTrainedModel, head: MtpHead, mask: torch.Tensor, text: Text, draft: Draft) -> None:
    """Each row has the tokens that the head predicts."""
    for row, length in enumerate(draft.lengths):
        known = text.ids[row, int(mask[row].argmax()) : text.lengths[row]]
        line = draft.tokens[row, :length]
        assert line.tolist() == predicted(model, head, known, line)


@pytest.mark.every_run("line-batch-1|tree-one row-3")
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("call", _CALLS)
def test_drafts_are_what_the_layers_predict(layers: int, inputs: Any, call: str) -> None:
    model, lengths, (tree, options) = tiny_llama(4, factor=0.5), set[int](), _CALLS[call]
    head = attentive_mtp_of(model, layers)

    def check(text: Text, draft: Draft) -> None:
        check_draft(model, head, inputs["attention_mask"], text, draft)
        lengths.update(draft.lengths)

    spec = SelfSpec(watched(MTP(head), check), FixedLength(4), tree)
    plain = model.generate(**inputs, max_new_tokens=16, **options)
    with unchanged(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, assistant=spec, **options), plain)
    assert max(lengths) == 4
    assert 0 < spec.stats.acceptance_rate < 1


@pytest.mark.every_run("3-states1-8|1-states2-512")
@pytest.mark.parametrize("most", [512, 8, 0])
@pytest.mark.parametrize(("layers", "states"), [(1, ()), (3, ()), (1, (1, 2, 3))])
def test_rounds_of_others_are_taken_in(
    layers: int, states: tuple[int, ...], most: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of free drafts, an early exit, which hands over the states that enter its layer, or nothing. In pieces, where
    many wait."""
    machine.states_wait(most)
    model, observe = tiny_llama(4, factor=0.5), StatesDraft.observe
    head, seen = attentive_mtp_of(model, layers, states), list[list[int]]()
    chance, waiting = random.Random(0), list[int]()

    def observed(drafter: Any, *given: Any) -> None:
        observe(drafter, *given)
        waiting.append(bytes_that_wait(drafter) // (4 * model.config.hidden_size * max(len(states), 1)))

    def see(text: Text, draft: Draft) -> None:
        seen.append(draft.lengths)
        check_draft(model, head, BATCH["attention_mask"], text, draft)

    def choose(controller: Controller, promised: Any, free: float = 0.0) -> str | None:
        return chance.choice([None, None, *promised])

    monkeypatch.setattr(StatesDraft, "observe", observed)
    monkeypatch.setattr(Controller, "choose", choose)
    monkeypatch.setattr(Controller, "speedup", lambda *given: 2.0 * chance.randrange(2))
    source = Cascade([Lookup(), EarlyExit(2), watched(MTP(head), see)])
    model.generate(**BATCH, max_new_tokens=36, assistant=SelfSpec(source, FixedLength(4)))
    assert len(seen) > 3
    assert max(waiting) <= 3 * (most + layers)


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    model, call = tiny_llama(), {"max_new_tokens": 4, "assistant": SelfSpec(MTP(mtp_of(build("qwen3"))))}
    wrong: Any = model
    for make, kind, message in (
        (lambda: MTP(tmp_path / "none"), SettingError, "there is no saved part at"),
        (lambda: MTP(wrong), SettingTypeError, "must be MtpHead or the path"),
        (lambda: MtpHead([]), SettingError, "no configs of MTP layers"),
        (lambda: MtpHead([{}]), SettingError, "no configs of MTP layers"),
        (lambda: MTP(MtpHead(MtpHead.of(model).configs)), SettingError, "has no weights yet"),
        (lambda: MtpHead([{"model_type": "nothing"}]), SettingError, "no configs of MTP layers"),
        (lambda: MtpHead.of(model, state_layers=(3, 1)), SettingError, r"reads the states before layers \[3, 1\]"),
        (lambda: MtpHead.of(tiny_llama(2), state_layers=(1, 3)), SettingError, "the model has 2"),
        (lambda: model.generate(**ROW, **call), SettingError, "takes states of width 32, and the model has 64"),
        (lambda: MtpHead.of(build("mamba")), UnsupportedModelError, "cannot stand alone"),
    ):
        with pytest.raises(kind, match=message):
            make()


@pytest.mark.filterwarnings("error")
def test_attached_layers_leave_the_states_to_an_adapter() -> None:
    model = tiny_llama(factor=0.5)
    attach(model, mtp_of(model))
    spec = SelfSpec(Cascade([Lookup(), EarlyExitAdapter(adapter_of(model))]), FixedLength(3))
    model.generate(**ROW, max_new_tokens=4, assistant=spec)
