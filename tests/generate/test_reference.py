"""``Decoder`` does what the loop of ``tests/reference.py`` does, which is short enough to be seen to be right."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import pytest
import torch
from transformers import LlamaForCausalLM

import reference
from helpers.models import ROW, tiny_llama
from helpers.sampling import NEW_TOKENS, PROMPT, SIGNIFICANCE, exact_joint, llama, p_of_counts
from hf_selfspec import EarlyExit, FixedLength, SelfSpec

AT_ONCE = pytest.mark.machine("nodes_are_scored_at_once")


def first_layers(model: LlamaForCausalLM, count: int) -> LlamaForCausalLM:
    """What drafts after an exit, as a model of its own."""
    shallow = deepcopy(model)
    shallow.model.layers = shallow.model.layers[:count]
    return shallow


def as_function(model: LlamaForCausalLM, do_sample: bool) -> reference.Model:
    @cache
    @torch.no_grad()
    def probabilities(tokens: tuple[int, ...]) -> list[list[float]]:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
        p = logits.softmax(-1) if do_sample else torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return p.tolist()

    return lambda tokens: probabilities(tuple(tokens))


@pytest.mark.parametrize("length", [1, 3, 6])
def test_greedy_ids_and_drafts(length: int) -> None:
    model, tokens = tiny_llama(), ROW["input_ids"][0].tolist()
    target, draft = (as_function(each, do_sample=False) for each in (model, first_layers(model, 3)))
    ((from_draft, _),) = reference.outcomes(lambda draw: reference.generate(target, draft, tokens, 40, length, draw))
    spec = SelfSpec(EarlyExit(3), FixedLength(length))
    ids = model.generate(**ROW, max_new_tokens=40, do_sample=False, assistant=spec)
    assert ids[0].tolist() == tokens
    assert spec.stats.from_draft == [from_draft]
    assert 0.1 < spec.stats.acceptance_rate < 0.95


@pytest.mark.parametrize("scored", ["singly", pytest.param("at once", marks=AT_ONCE)])
def test_sampled_tokens_and_drafts(scored: str) -> None:
    """Both the tokens and which of them were drafted are distributed as the loop has them."""
    target, draft = (as_function(each, do_sample=True) for each in (llama(), first_layers(llama(), 2)))

    def run(draw: reference.Draw) -> tuple[Sequence[int], Sequence[bool]]:
        tokens = PROMPT[0].tolist()
        from_draft = reference.generate(target, draft, tokens, NEW_TOKENS, 3, draw)
        return tuple(tokens[PROMPT.shape[1] :]), tuple(from_draft)

    expected, of_tokens = Counter[object](), Counter[Sequence[int]]()
    for result, probability in reference.outcomes(run):
        expected[result] += probability
        of_tokens[result[0]] += probability
    joint = torch.tensor([of_tokens[tokens] for tokens in sorted(of_tokens)], dtype=torch.float64)
    torch.testing.assert_close(joint, exact_joint(llama(), []), rtol=0, atol=1e-6)  # the loop itself is exact

    torch.manual_seed(0)
    rows, spec = 4000, SelfSpec(EarlyExit(2), FixedLength(3))
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "num_return_sequences": rows}
    sampled = llama().generate(PROMPT, assistant=spec, **options)[:, PROMPT.shape[1] :].tolist()
    observed = Counter(zip(map(tuple, sampled), map(tuple, spec.stats.from_draft), strict=True))
    assert observed.keys() <= expected.keys()
    counts, joint = (torch.tensor([by[cell] for cell in expected]).double() for by in (observed, expected))
    assert p_of_counts(counts, joint) > SIGNIFICANCE
