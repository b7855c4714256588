"""What ``generate`` offers beside ids (these are in ``test_plain_ids``): what it calls, returns, takes and fills."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from helpers.architectures import build
from helpers.calls import PAST, assert_mixed, new_spec, new_tokens
from helpers.models import BATCH, ROW
from hf_selfspec import EarlyExit, FixedLength, OnTheFlySearch, SelfSpec, SkipLayers, TopKTree

Inputs = dict[str, torch.Tensor]

EXIT = new_spec()
SPECS = {
    "exit": EXIT,
    "search": SelfSpec(SkipLayers(search=OnTheFlySearch(8, budget=1.0), ratio=0.4), FixedLength(4)),
    "tree": SelfSpec(draft=EarlyExit(3), stop=FixedLength(4), tree=TopKTree(((0.5, 3), (1.0, 1)))),
}
END = 9  # Token of the first row with which some calls end it; the next rows end later.


def ours_and_plain(model: PreTrainedModel, spec: SelfSpec, inputs: Inputs, **options: Any) -> tuple[Any, Any]:
    """What speculative and plain ``generate`` return; the drafts were partly kept and partly rejected."""
    options = {"max_new_tokens": 24} | options
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, assistant=spec)
    assert_mixed(spec)
    return ours, plain


def test_criterion_that_looks_at_scores(llama: LlamaForCausalLM) -> None:
    """Which are recorded with ``output_scores``."""

    def criterion(input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...], **kwargs: Any) -> torch.Tensor:
        return torch.stack(list(scores)).amax(-1).sum(0) > 4.0

    options = {"return_dict_in_generate": True, "output_scores": True, "stopping_criteria": [criterion]}
    ours, plain = ours_and_plain(llama, EXIT, ROW, **options)
    assert 4 < len(plain.scores) < 24
    assert torch.equal(ours.sequences, plain.sequences)


def test_max_time(llama: LlamaForCausalLM) -> None:
    width = BATCH["input_ids"].shape[1]
    ours = llama.generate(**BATCH, max_new_tokens=24, max_time=1e-9, assistant=EXIT)
    assert torch.equal(ours, llama.generate(**BATCH, max_new_tokens=1))
    later = llama.generate(**BATCH, max_new_tokens=400, max_time=0.1, assistant=EXIT)
    assert width + 1 < later.shape[1] < width + 400
    assert torch.equal(later, llama.generate(**BATCH, max_new_tokens=later.shape[1] - width))


def test_ids_have_the_type_of_plain_generates(llama: LlamaForCausalLM) -> None:
    """64 bits, also after a prompt of 32."""
    inputs = BATCH | {"input_ids": BATCH["input_ids"].int()}
    for returned in (False, True):
        options = {"max_new_tokens": 6, "return_dict_in_generate": returned}
        outputs = [llama.generate(**inputs, **options, assistant=assistant) for assistant in (False, EXIT)]
        plain, ours = (output.sequences if returned else output for output in outputs)
        assert plain.dtype == ours.dtype == torch.int64
        assert torch.equal(plain, ours)


@pytest.mark.filterwarnings("ignore:OnTheFlySearch:UserWarning")  # a row may end before its window is full
@pytest.mark.parametrize(
    ("name", "inputs", "with_eos"), [("exit", ROW, True), ("tree", BATCH, False), ("search", BATCH, True)]
)
def test_scores_and_logits(llama: LlamaForCausalLM, name: str, inputs: Inputs, with_eos: bool) -> None:
    """Equal up to each row's end; plain generate goes on computing scores for padding, which mean nothing."""
    spec, options = SPECS[name], {"repetition_penalty": 1.3, "max_new_tokens": 18}
    rows = new_tokens(llama, inputs, **options)
    ends = [row[END + 3 * index] for index, row in enumerate(rows)] if with_eos else []
    options |= {"eos_token_id": ends or None, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    ours, plain = ours_and_plain(llama, spec, inputs, **options)
    assert type(ours) is type(plain)
    assert torch.equal(ours.sequences, plain.sequences)
    steps = len(plain.scores)
    lengths = [next((i for i, token in enumerate(row, start=1) if token in ends), steps) for row in rows]
    transitions = [llama.compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (ours, plain)]
    for kind in ("scores", "logits"):
        assert len(getattr(ours, kind)) == steps
        mine, theirs = (torch.stack(getattr(output, kind), dim=1) for output in (ours, plain))
        for row, length in enumerate(lengths):
            torch.testing.assert_close(mine[row, :length], theirs[row, :length], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(transitions[0][row, :length], transitions[1][row, :length], atol=1e-5, rtol=1e-5)
    assert not torch.equal(ours.scores[3], ours.logits[3])
    del options["output_scores"]
    ours, plain = ours_and_plain(llama, spec, inputs, **options)
    assert ours.keys() == plain.keys() == {"sequences", "logits", PAST}


@pytest.mark.parametrize("sized", [True, False])
def test_own_cache_is_filled(sized: bool) -> None:
    """Of full attention and of sliding windows; calls go on from it."""
    model, width = build("gemma3_text"), BATCH["input_ids"].shape[1]
    cache = DynamicCache(config=model.config) if sized else DynamicCache()
    ids = model.generate(**BATCH, max_new_tokens=14, **{PAST: cache}, assistant=EXIT)
    assert_mixed(EXIT)
    assert cache.get_seq_length() == ids.shape[1] - 1 == width + 13
    mask = torch.cat([BATCH["attention_mask"], torch.ones(len(ids), 14, dtype=torch.long)], dim=1)
    following: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 14}
    expected = model.generate(**following)
    assert torch.equal(model.generate(**following, **{PAST: cache}), expected)


def test_prefill_in_chunks(fresh_llama: LlamaForCausalLM) -> None:
    """Whose ids are in ``test_plain_ids``."""
    widths: list[int] = []
    fresh_llama.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    fresh_llama.generate(**BATCH, prefill_chunk_size=2, max_new_tokens=12, assistant=EXIT)
    assert max(widths) <= 5  # of verification
