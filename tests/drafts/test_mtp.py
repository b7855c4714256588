"""MTP layers as drafts: what they predict, whatever was drafted and accepted before, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.calls import unchanged
from helpers.fitted import adapter_of, mtp_of
from helpers.models import BATCH, ROW, tiny_llama
from helpers.sampling import check_exact, each_family, exact_joint, sample
from helpers.watched import watched
from hf_selfspec import (
    EarlyExit,
    FixedLength,
    SelfSpec,
    SettingError,
    SettingTypeError,
    TopKTree,
)
from hf_selfspec.batch import Draft, Text
from hf_selfspec.drafts import MTP, Cascade, Drafter, EarlyExitAdapter, Lookup, Session, states
from hf_selfspec.drafts.heads import mtp
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.modules import shipped
from hf_selfspec.modules.mtp import MtpHead

_WIDE = TopKTree(((0.9999, 3), (1.0, 1)))


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


def check_drafts(model: PreTrainedModel, head: MtpHead, inputs: dict[str, Any], **options: Any) -> SelfSpec:
    """All drafts of a call have the tokens that the head predicts, in each row."""
    lengths = set[int]()

    def check(text: Text, draft: Draft) -> None:
        check_draft(model, head, inputs["attention_mask"], text, draft)
        lengths.update(draft.lengths)

    tree = options.pop("tree", None)
    spec = SelfSpec(watched(MTP(head), check), FixedLength(4), tree)
    plain = model.generate(**inputs, max_new_tokens=16, **options)
    assert torch.equal(model.generate(**inputs, max_new_tokens=16, assistant=spec, **options), plain)
    assert max(lengths) == 4
    return spec


@pytest.mark.every_run("line-batch-1|tree-one row-3")
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
@pytest.mark.parametrize("options", [{}, {"tree": _WIDE}, {"prefill_chunk_size": 4}], ids=["line", "tree", "chunks"])
def test_drafts_are_what_the_layers_predict(layers: int, inputs: Any, options: Any) -> None:
    model = tiny_llama(4, factor=0.5)
    with unchanged(model):
        spec = check_drafts(model, attentive_mtp_of(model, layers), inputs, **options)
    assert spec.stats is not None
    assert 0 < spec.stats.acceptance_rate < 1


@dataclass(frozen=True)
class Sometimes(MTP):
    """Drafts in every third round; in the others another source drafts nothing, or what it likes."""

    def start(self, session: Session) -> Drafter:
        drafter: Any = super().start(session)
        propose, update, rounds = drafter.propose, drafter.update, [0]

        def proposed(text: Text, max_new: list[int]) -> Draft:
            rounds[0] += 1
            if rounds[0] % 3 == 0:
                draft: Draft = propose(text, max_new)
                return draft
            line = text.ids[:, :2] if rounds[0] % 3 == 1 else text.ids[:, :0]
            return Draft(line, [min(line.shape[1], most) for most in max_new])

        drafter.propose = proposed
        drafter.update = lambda *given: (update if rounds[0] % 3 == 0 else drafter.observe)(*given)
        return drafter


@dataclass(frozen=True)
class Turns(MTP):
    """Takes turns with an early exit, whose drafts hand over the states that enter its exit layer."""

    def start(self, session: Session) -> Drafter:
        drafter: Any = super().start(session)
        exit_drafter: Any = EarlyExit(2).start(session)
        propose, update, rounds = drafter.propose, drafter.update, [0]

        def proposed(text: Text, max_new: list[int]) -> Draft:
            rounds[0] += 1
            draft: Draft = (propose if rounds[0] % 2 else exit_drafter.propose)(text, max_new)
            return draft

        def updated(*given: Any) -> None:
            (update if rounds[0] % 2 else drafter.observe)(*given)
            if not rounds[0] % 2:
                exit_drafter.update(*given)

        drafter.propose, drafter.update = proposed, updated
        return drafter


@pytest.mark.every_run(".*states2-Sometimes")
@pytest.mark.parametrize("kind", [Sometimes, Turns])
@pytest.mark.parametrize(("layers", "states"), [(1, ()), (3, ()), (1, (1, 2, 3))])
def test_rounds_of_others_are_taken_in(kind: type[MTP], layers: int, states: tuple[int, ...]) -> None:
    model = tiny_llama(4, factor=0.5)
    head = attentive_mtp_of(model, layers, states)
    seen = []

    def see(text: Text, draft: Draft) -> None:
        if draft.states is None and draft.size > 2:
            seen.append(draft.lengths)
            check_draft(model, head, BATCH["attention_mask"], text, draft)

    model.generate(**BATCH, max_new_tokens=24, assistant=SelfSpec(watched(kind(head), see), FixedLength(4)))
    assert len(seen) > 3


@pytest.mark.every_run("llama tree-1")
@pytest.mark.parametrize("layers", [1, 2])
@each_family
def test_drawn_tokens_have_the_models_distribution(
    family: Callable[[], PreTrainedModel], layers: int, tree: TopKTree | None
) -> None:
    model = family()
    spec = SelfSpec(MTP(mtp_of(model, layers)), FixedLength(3), tree)
    check_exact(sample(spec, model, rows=1000), exact_joint(model, []))


def of_another_width() -> Any:
    spec = SelfSpec(MTP(mtp_of(build("qwen3"))))
    return tiny_llama().generate(**ROW, max_new_tokens=4, assistant=spec)


REFUSALS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "nothing there": (lambda folder: MTP(folder / "none"), SettingError, "there is no saved MTP head at"),
    "something else": (lambda folder: MTP(tiny_llama()), SettingTypeError, "must be MtpHead or the path"),  # type: ignore[arg-type]  # a wrong one
    "no layers": (lambda folder: MtpHead([]), SettingError, r"a list with the config of each layer.*got \[\]"),
    "no settings": (lambda folder: MtpHead([{}]), SettingError, r"a list with the config of each layer.*got \[\{\}\]"),
    "no weights": (lambda folder: MTP(MtpHead(MtpHead.of(tiny_llama()).configs)), SettingError, "has no weights yet"),
    "no configs": (lambda folder: MtpHead([{"model_type": "nothing"}]), SettingError, "no configs of MTP layers"),
    "no order": (
        lambda folder: MtpHead([{"model_type": "llama"}], state_layers=[3, 1]),
        SettingError,
        "in increasing order",
    ),
    "too few layers": (lambda folder: MtpHead.of(tiny_llama(2), state_layers=(1, 3)), SettingError, "the model has 2"),
    "another width": (
        lambda folder: of_another_width(),
        SettingError,
        "takes states of width 32, and the model has 64",
    ),
    "no layer": (lambda folder: MtpHead.of(build("mamba")), UnsupportedModelError, "cannot stand alone"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_no_head_is_refused(case: str, tmp_path: Path) -> None:
    make, kind, message = REFUSALS[case]
    with pytest.raises(kind, match=message):
        make(tmp_path)


@pytest.mark.every_run("3")
@pytest.mark.parametrize("layers", [1, 3])
def test_states_that_wait_are_bounded(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others draft, the head takes in the text in pieces; its drafts are the same afterwards."""
    monkeypatch.setattr(states, "_WAITING", 8)
    waiting: list[int] = []
    observe = mtp.MtpDraft.observe

    def observed(drafter: mtp.MtpDraft, *given: Any) -> None:
        observe(drafter, *given)
        waiting.append(sum(piece.untyped_storage().nbytes() // (4 * 64) for piece in drafter._waiting))

    monkeypatch.setattr(mtp.MtpDraft, "observe", observed)
    test_rounds_of_others_are_taken_in(Sometimes, layers, ())
    assert max(waiting) <= 3 * (8 + layers)


@pytest.mark.filterwarnings("error")
def test_attached_layers_leave_the_states_to_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(factor=0.5)
    monkeypatch.setitem(shipped._attached, model, mtp_of(model))
    spec = SelfSpec(Cascade([Lookup(), EarlyExitAdapter(adapter_of(model))]), FixedLength(3))
    model.generate(**ROW, max_new_tokens=4, assistant=spec)
