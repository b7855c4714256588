"""Block heads as drafts: ids and distributions are the model's, in every company."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.blocks import CONFIGS, block_of, published, right_block_of
from helpers.calls import unchanged
from helpers.fitted import adapter_of, mtp_of
from helpers.machine import Machine
from helpers.models import BATCH, ROW, tiny_llama
from helpers.sampling import check_exact, each_family, exact_joint, sample
from helpers.sampling import llama as tiny_vocabulary
from helpers.watched import drafts_into
from hf_selfspec import (
    Block,
    ConfidenceThreshold,
    EarlyExit,
    FixedLength,
    SelfSpec,
    SettingError,
    SettingTypeError,
    TopKTree,
    load_head,
    load_mtp,
)
from hf_selfspec.batch import Draft
from hf_selfspec.drafts import MTP, Cascade, Drafter, DraftSource, Lookup, Session
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.errors import UnsupportedModelError
from hf_selfspec.modules.block import BlockHead
from hf_selfspec.modules.shipped import attached_head

# Free drafts are worth their verification, as on a device that memory bounds.
pytestmark = pytest.mark.machine("verification_is_free")

SPECS: dict[str, Callable[[BlockHead], SelfSpec]] = {
    "alone": lambda head: SelfSpec(Block(head)),
    "cascade": lambda head: SelfSpec(Cascade([Lookup(), Block(head)]), FixedLength(3)),
    "tree": lambda head: SelfSpec(Block(head), FixedLength(4), TopKTree(((0.9999, 3), (1.0, 1)))),
    "exit beside": lambda head: SelfSpec(Cascade([Lookup(), Block(head), EarlyExit(2)]), ConfidenceThreshold(0.1)),
}


@pytest.mark.every_run("llama-.*|(qwen3_next|mixtral)-alone|gemma3_text-cascade")
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "bamba", "gemma3_text", "mixtral"])
def test_ids_are_plain(name: str, kind: str) -> None:
    """With a head that is right, and one that was drawn."""
    is_recurrent = name in ("qwen3_next", "bamba")
    if kind == "tree" and is_recurrent:
        pytest.skip("recurrent states take lines")
    model, options = build(name), {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    row = {key: value[1:2] for key, value in BATCH.items()}
    for inputs in (row,) if is_recurrent else (BATCH, row):  # plain serves batches of states
        plain = model.generate(**inputs, **options)
        right = right_block_of(model, plain[:, BATCH["input_ids"].shape[1] - 1 :])
        for head in (right, block_of(model, layers=(1, 2), **CONFIGS["dspark rnn"])):
            spec = SPECS[kind](head)
            with warnings.catch_warnings(), unchanged(model):
                warnings.filterwarnings("ignore", message=".*is left out")
                for _ in range(2):
                    assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
            assert head is not right or kind != "alone" or spec.stats.acceptance_rate > 0.3


DRAWN: dict[str, Callable[[PreTrainedModel], DraftSource]] = {
    **{
        name: lambda model, name=name: Block(block_of(model, layers=(1, 2, 3), scale=0.05, **CONFIGS[name]))  # type: ignore[misc]  # a default of a lambda
        for name in ("dflash", "dflash2", "dspark", "dspark gated", "dspark rnn")
    },
    "mtp": lambda model: MTP(mtp_of(model)),
    "two mtp layers": lambda model: MTP(mtp_of(model, 2)),
}


@pytest.mark.every_run("llama tree-(dspark rnn|mtp|dflash2)|llama-dspark")
@pytest.mark.parametrize("name", DRAWN)
@each_family
def test_drawn_tokens_have_the_models_distribution(
    name: str, family: Callable[[], PreTrainedModel], tree: TopKTree | None
) -> None:
    """Each slot of a block is drawn from its logits with all that its Markov head has added."""
    spec = SelfSpec(DRAWN[name](family()), FixedLength(3), tree)
    check_exact(sample(spec, family(), rows=1000), exact_joint(family(), []))


class Whole(Block):
    """Drafts whole blocks, as on a GPU."""

    def start(self, session: Session) -> Drafter:
        return super().start(session.with_usual_stop(FixedLength(self.module.num_tokens)))


@pytest.fixture
def any_width(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A block drafts in each round of a cascade, and is cut anywhere; the widths of its drafts."""
    chance, widths = random.Random(0), list[int]()
    monkeypatch.setattr(Controller, "choose", lambda controller, promised, free=0.0: next(iter(promised)))
    monkeypatch.setattr(
        Controller, "width", lambda controller, name, length: widths.append(chance.randint(1, length)) or widths[-1]
    )
    return widths


@pytest.mark.parametrize("inputs", [ROW, BATCH], ids=["one row", "batch"])
def test_ids_are_plain_wherever_a_block_is_cut(inputs: Any, any_width: list[int]) -> None:
    model = build("llama")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    head = right_block_of(model, plain[:, inputs["input_ids"].shape[1] - 1 :])
    spec = SelfSpec(Cascade([Lookup(), Whole(head)]))
    assert torch.equal(model.generate(**inputs, **options, assistant=spec), plain)
    sizes = [size for size, _ in spec.stats.round_sizes[:-3]]
    assert sizes == any_width[: len(sizes)]
    assert len(set(sizes)) > 2
    # A rule of the user's alone ends drafts.
    any_width.clear()
    model.generate(**inputs, **options, assistant=SelfSpec(Cascade([Lookup(), Block(head)]), FixedLength(3)))
    assert not any_width


def test_drawn_tokens_have_the_models_distribution_wherever_a_block_is_cut(any_width: list[int]) -> None:
    model = tiny_vocabulary()
    head = block_of(model, layers=(1, 2, 3), scale=0.05, **CONFIGS["dspark"])
    spec = SelfSpec(Cascade([Lookup(), Whole(head)]))
    check_exact(sample(spec, model, rows=250, calls=4), exact_joint(model, []))
    assert {1, 2} < set(any_width)


def test_a_head_that_has_just_taken_in_what_has_waited_drafts_as_ever(machine: Machine) -> None:
    model, drafted = tiny_llama(factor=0.5), list[list[Any]]()
    source = Block(block_of(model, **CONFIGS["dspark"]))
    for most in (512, 0, 8):
        machine.states_wait(most)
        drafts: list[Draft] = []
        model.generate(**BATCH, max_new_tokens=12, assistant=SelfSpec(drafts_into(drafts, source), FixedLength(3)))
        drafted.append([(draft.tokens.tolist(), draft.lengths) for draft in drafts])
    assert drafted[0] == drafted[1] == drafted[2]


def test_drafts_end_below_a_confidence() -> None:
    """By the confidence head, where there is one: the product of what it returns stays above the usual threshold up to
    the last token but one of each draft."""
    model = tiny_llama(factor=0.5)
    head = block_of(model, **CONFIGS["dspark gated"])
    assert head.confidence_head is not None
    longest = list[int]()
    for bias in (-9.0, -0.1, 9.0):
        with torch.no_grad():
            head.confidence_head.proj.weight.zero_()
            head.confidence_head.proj.bias.fill_(bias)
        drafts: list[Draft] = []
        model.generate(**ROW, max_new_tokens=10, assistant=SelfSpec(drafts_into(drafts, Block(head))))
        longest.append(max(draft.lengths[0] for draft in drafts))
    assert longest == [1, 2, head.num_tokens]


def test_positions_keep_their_digits_in_fewer_bits() -> None:
    """Frequencies of rotary positions stay in float32 in a copy of a head in bfloat16."""
    model = tiny_llama(factor=0.5)
    for head in (mtp_of(model), block_of(model)):
        kept, copied = (dict(of.named_buffers()) for of in (head, head.on(torch.device("cpu"), torch.bfloat16)))
        assert any("inv_freq" in name for name in kept)
        assert all(
            torch.equal(value, copied[name]) and value.dtype == copied[name].dtype for name, value in kept.items()
        )


@pytest.mark.usefixtures("no_warnings_yet")
def test_an_embedding_that_is_no_plain_tensor_is_refused() -> None:
    """In a cascade other drafts that read states begin all the same."""
    model = tiny_llama(factor=0.5)
    head, beside = block_of(model), mtp_of(model)
    plain = model.generate(**ROW, max_new_tokens=8)
    spread = type("Spread", (torch.nn.Parameter,), {"device_mesh": None})
    model.model.embed_tokens.weight = spread(model.model.embed_tokens.weight.data)
    with pytest.raises(UnsupportedModelError, match="no plain embedding in this process's memory"):
        model.generate(**ROW, max_new_tokens=8, assistant=SelfSpec(Block(head)))
    spec = SelfSpec(Cascade([Lookup(), Block(head), MTP(beside)]))
    with pytest.warns(match="is left out") as told:
        assert torch.equal(model.generate(**ROW, max_new_tokens=8, assistant=spec), plain)
    assert len(told) == 1


def test_an_output_head_that_is_offloaded_is_loaded_for_drafts(tmp_path: Path) -> None:
    """Unlike an embedding, it is called as a module, whose hook loads its weights."""
    model = build("llama")
    head, places = block_of(model, layers=(1, 2), draft_vocab_size=0), {"model": "cpu", "lm_head": "disk"}
    plain = model.generate(**ROW, max_new_tokens=8, do_sample=False)
    dispatch_model(model, device_map=places, main_device="cpu", offload_dir=tmp_path)
    assert model.lm_head.weight.is_meta
    spec = SelfSpec(Block(head))
    assert torch.equal(model.generate(**ROW, max_new_tokens=8, do_sample=False, assistant=spec), plain)
    assert spec.stats.drafted > 0


def test_an_attached_head_drafts_in_every_cascade(tmp_path: Path) -> None:
    """The last one that was attached counts, and one of another model stays off."""
    model, other, none = tiny_llama(factor=0.5), build("llama"), tmp_path / "none"
    for folder in (tmp_path / "block", none):
        folder.mkdir()
    published(tmp_path / "block", model, **CONFIGS["dspark"])
    adapter_of(model).save_pretrained(tmp_path / "adapter")
    for name in ("adapter", "block"):
        head, spec = load_head(model, tmp_path / name), SelfSpec()
        assert attached_head(model) is head
        model.generate(**BATCH, max_new_tokens=10, assistant=spec)
        assert spec.stats.draft_steps > 0
    (none / "config.json").write_text("{}")
    for call, error, words in (
        (lambda: load_head(other, tmp_path / "block"), SettingError, "made for another model"),
        (lambda: load_head(model, none), SettingError, r"holds no part: .*no kind that is known"),
        (lambda: load_head(model, 3), SettingTypeError, "must be a folder"),  # type: ignore[arg-type]  # on purpose
        (lambda: load_mtp(model), SettingError, "MTP"),  # what is attached is none, and the model ships with none
    ):
        with pytest.raises(error, match=words):
            call()
    assert attached_head(other) is None
