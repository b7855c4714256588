"""Free drafts, alone and around a layer draft, against plain ``generate``: token for token, greedy, float32."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from helpers.architectures import build
from helpers.calls import new_tokens
from helpers.fitted import adapter_of, heads_of
from helpers.models import VOCABULARY, tiny_llama
from helpers.watched import drafts_into, watched
from hf_selfspec import FixedLength, SelfSpec, TopKTree
from hf_selfspec.batch import Draft, Text
from hf_selfspec.drafts import Cascade, DynamicExit, EarlyExit, EarlyExitAdapter, Lookup, SkipLayers
from hf_selfspec.drafts.controller import ArmStats
from hf_selfspec.model.logits import Logits, Tops

pytestmark = pytest.mark.machine("verification_is_free")

Inputs = dict[str, torch.Tensor]

SPECS: dict[str, Callable[[], SelfSpec]] = {
    "lookup": SelfSpec.lookup,
    "exit": lambda: SelfSpec(Cascade([Lookup(), EarlyExit(3)]), FixedLength(3)),
}


def repetitive(lengths: tuple[int, ...] = (14,), seed: int = 3) -> Inputs:
    """Left-padded prompts, each a few tokens over and over."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        piece = torch.randint(3, VOCABULARY, (4 + row,), generator=generator)
        ids[row, width - length :] = piece.repeat(length)[:length]
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


ROW, BATCH = repetitive(), repetitive((14, 9, 11))
INPUTS = {"one row": ROW, "ragged batch": BATCH}


def both(model: PreTrainedModel, spec: SelfSpec, inputs: Inputs, **options: Any) -> tuple[Any, Any]:
    """What speculative and plain ``generate`` return. The text is generated a second time, found in the store."""
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0} | options
    plain = model.generate(**inputs, **options)
    model.generate(**inputs, **options, assistant=spec)
    ours = model.generate(**inputs, **options, assistant=spec)
    assert spec.stats.accepted > 0
    return ours, plain


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("placeholder", [VOCABULARY, -100])
def test_ids_of_embedded_prompts_may_be_anything(llama: LlamaForCausalLM, kind: str, placeholder: int) -> None:
    """A placeholder for which the model has no embedding is not drafted where the text before it occurs again."""
    embeds = llama.get_input_embeddings()(ROW["input_ids"])
    first = new_tokens(llama, ROW, max_new_tokens=1)[0]
    ids = ROW["input_ids"].clone()
    ids[0, :4] = torch.tensor([*ids[0, -2:], *first, placeholder])
    ours, plain = both(llama, SPECS[kind](), {"input_ids": ids, "inputs_embeds": embeds})
    assert torch.equal(ours, plain)


@pytest.mark.every_run("bloom-lookup|mpt-exit")
@pytest.mark.parametrize(
    ("name", "kind"), [("bloom", "lookup"), ("mpt", "exit"), ("falcon-alibi", "lookup"), ("gpt_neo", "exit")]
)
@pytest.mark.filterwarnings("ignore:.*cannot take")
def test_models_without_tree_masks_draft_lines(name: str, kind: str) -> None:
    drafts: list[Draft] = []
    model, spec = build(name), SPECS[kind]()
    spec = replace(spec, draft=drafts_into(drafts, spec.draft))
    for shape, inputs in INPUTS.items() if name != "gpt_neo" else [("one row", ROW)]:  # which drafts no batches
        ours, plain = both(model, spec, inputs, eos_token_id=new_tokens(model, inputs, max_new_tokens=10)[-1][9])
        assert torch.equal(ours, plain), shape
    assert drafts
    assert not any(draft.parents for draft in drafts)


def test_trees_are_no_larger_than_allowed(llama: LlamaForCausalLM) -> None:
    """Around a layer draft too, whose own tokens always count."""
    layers = SelfSpec(Cascade([Lookup(max_nodes=5), EarlyExit(3)]), FixedLength(2))
    for spec, size, depth in (
        (SelfSpec(Lookup(max_nodes=5)), 5, 5),
        (layers, 5, 5),
        (replace(layers, stop=FixedLength(7)), 7, 7),
        (SelfSpec(Lookup(), max_draft=2), 31, 2),
    ):
        drafts: list[Draft] = []
        ours, plain = both(llama, replace(spec, draft=drafts_into(drafts, spec.draft)), ROW)
        assert torch.equal(ours, plain)
        assert max(draft.size for draft in drafts) <= size
        assert max(max(draft.lengths) for draft in drafts) <= depth


def test_logits_take_no_more_than_64_mib() -> None:
    model, prompt = tiny_llama(2, vocabulary=120_000), torch.arange(5, 45)[:, None] + torch.arange(12) % 3
    for spec in (SelfSpec(Lookup()), SelfSpec(EarlyExit(1), FixedLength(9))):
        for _ in range(2):
            model.generate(prompt, max_new_tokens=5, do_sample=False, assistant=spec)
        assert max(size for size, _ in spec.stats.round_sizes) == 2  # 40 rows of 3 tokens are 57.6 MB


DEEP = tiny_llama(layers=8, factor=0.5)
OTHERS: dict[str, Callable[[], SelfSpec]] = {
    "exit": lambda: SelfSpec(EarlyExit(3), FixedLength(2)),
    "exit, tree": lambda: SelfSpec(EarlyExit(3), FixedLength(3), TopKTree(((1.0, 2),))),
    "skipped layers": lambda: SelfSpec(SkipLayers((2, 3), (4,)), FixedLength(3)),
    "adapter": lambda: SelfSpec(EarlyExitAdapter(adapter_of(DEEP)), FixedLength(3)),
    "heads": lambda: SelfSpec(DynamicExit(heads_of(DEEP, 0.6)), FixedLength(3)),
}


@pytest.mark.every_run("one row-(exit, tree|skipped layers|heads)")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("shape", INPUTS)
def test_drafts_after_free_rounds(shape: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second round is free. What the other source drafts after them is what it would draft alone there."""
    inputs, alone = INPUTS[shape], OTHERS[name]()
    turns = iter(range(1 << 30))
    monkeypatch.setattr(ArmStats, "speedup", lambda self, promised: (math.inf, 1.0)[next(turns) % 2])
    seen: list[dict[tuple[int, int], int]] = [{}, {}]
    plain, drafts = DEEP.generate(**inputs, max_new_tokens=26, do_sample=False), list[Draft]()

    def see(text: Text, draft: Draft) -> None:
        for row, length in enumerate(draft.lengths):
            if length:
                seen[bool(drafts)][row, text.lengths[row]] = int(draft.tokens[row, 0])

    source = watched(alone.draft, see)
    cascade = replace(alone, draft=drafts_into(drafts, Cascade([Lookup(stored_tokens=0), source])))
    for spec in (replace(alone, draft=source, stop=FixedLength(1), tree=None), cascade, cascade):
        assert torch.equal(DEEP.generate(**inputs, max_new_tokens=26, do_sample=False, assistant=spec), plain)
    assert len(seen[1]) < sum(count > 0 for draft in drafts for count in draft.lengths)
    common = seen[0].keys() & seen[1].keys()
    assert len(common) > 3
    assert all(seen[0][place] == seen[1][place] for place in common)


def test_a_second_adapter_is_left_out(tmp_path: Path) -> None:
    """Only one can see the prompt."""
    for seed, name in enumerate(("one", "two")):
        adapter_of(DEEP, seed=seed).save_pretrained(tmp_path / name)
    first, second = (EarlyExitAdapter(str(tmp_path / name)) for name in ("one", "two"))
    spec = SelfSpec(Cascade([Lookup(stored_tokens=0), first, second]), FixedLength(3))
    plain = DEEP.generate(**BATCH, max_new_tokens=16, do_sample=False)
    with pytest.warns(UserWarning, match="is left out of the drafts.*only one draft source can"):
        assert torch.equal(DEEP.generate(**BATCH, max_new_tokens=16, do_sample=False, assistant=spec), plain)


@pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 5), (4, 97), (11, 2048), (3, 50257)])
def test_the_most_likely_tokens_and_their_probabilities(nodes: int, vocabulary: int) -> None:
    logits = torch.randn(2, nodes, vocabulary, generator=torch.Generator().manual_seed(0))
    shares, tokens = logits.softmax(-1).topk(min(8, vocabulary), dim=-1)
    # Beyond eight pieces of a vocabulary the sum is an estimate; these logits are as spread out as they can be.
    most = 1.00001 if vocabulary <= 512 else 1.5
    for row in range(2):
        likeliest, estimated = map(torch.from_numpy, Tops(Logits(logits)).of(row))
        assert torch.equal(likeliest, tokens[row])
        assert (estimated / shares[row]).log().abs().max() < math.log(most)


def test_logits_that_overflow_favour_nothing() -> None:
    """float16 can make infinities of which no probabilities come; other nodes keep theirs."""
    logits = torch.zeros(1, 6, 97)
    logits[0, 1] = torch.nan
    logits[0, 2, 5] = torch.inf
    logits[0, 3, 7] = 50.0
    tokens, shares = Tops(Logits(logits)).of(0)
    assert not shares[1:3].any()
    assert (tokens[3, 0], shares[3, 0]) == (7, pytest.approx(1.0))
    assert shares[0, 0] == pytest.approx(1 / 97)
