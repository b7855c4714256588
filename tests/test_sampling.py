"""Sampling is lossless: joint distributions of generated tokens against exact enumeration with the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from scipy.stats import chisquare
from transformers import (
    CompileConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation import (
    CandidateGenerator,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_selfspec import ConfidenceThreshold, EarlyExit, FixedLength, SelfSpec, SkipLayers, TopKTree
from hf_selfspec.model import graphs
from hf_selfspec.model.graphs import Graph
from hf_selfspec.verify import walk
from hf_selfspec.verify.sampling import choose_sampled

VOCABULARY = 5
PROMPT = torch.tensor([[3]])
# The first token comes from the prompt's forward, so this leaves room for drafts of two tokens, then of one.
NEW_TOKENS = 4
SAMPLES = 2000
# A right implementation falls below this once in ten thousand seeds, the biased ones of this file by far.
SIGNIFICANCE = 1e-4

SPECS = {
    "early exit": SelfSpec(draft=EarlyExit(2), stop=FixedLength(3)),
    "skipped layers": SelfSpec(draft=SkipLayers((1, 2), (2,)), stop=ConfidenceThreshold(0.45)),
    "tree": SelfSpec(draft=EarlyExit(1), stop=FixedLength(3), tree=TopKTree(((0.6, 3), (1.0, 2)))),
}
# Options of generate, and transformers' processor for each.
OPTIONS = {
    "plain": ({}, []),
    "top_k": ({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "repetition_penalty": ({"repetition_penalty": 2.5}, [RepetitionPenaltyLogitsProcessor(2.5)]),
}


@torch.no_grad()
def peak(final_norm: torch.nn.Module) -> None:
    """Takes distributions far from uniform, so that draft and target differ clearly."""
    final_norm.weight.mul_(10.0)


@cache
def llama() -> LlamaForCausalLM:
    model = tiny_llama(layers=4, vocabulary=VOCABULARY, factor=1.5, seed=4)
    peak(model.model.norm)
    # Attention that is far from uniform and weighs in, so that a wrong context shows.
    with torch.no_grad():
        for layer in model.model.layers:
            for name, factor in (("q_proj", 10.0), ("k_proj", 10.0), ("v_proj", 1.5), ("o_proj", 1.5)):
                getattr(layer.self_attn, name).weight.mul_(factor)
    return model


@torch.no_grad()
def exact_joint(model: PreTrainedModel, processors: list, steps: int = NEW_TOKENS) -> torch.Tensor:
    """Probability ``[v ** steps]`` of each continuation of the prompt, read as a number in base ``v``."""
    ids, joint = PROMPT, torch.ones(1, dtype=torch.float64)
    for _ in range(steps):
        scores = LogitsProcessorList(processors)(ids, model(ids).logits[:, -1].float())
        joint = (joint[:, None] * scores.double().softmax(-1)).flatten()
        every_token = torch.arange(VOCABULARY).repeat(len(ids))[:, None]
        ids = torch.cat([ids.repeat_interleave(VOCABULARY, 0), every_token], dim=1)
    return joint


def p_value(sequences: torch.Tensor, joint: torch.Tensor) -> float:
    """Chi-squared test of ``sequences`` ``[n, s + steps]``; cells in which fewer than 5 are expected are pooled."""
    generated = sequences[:, PROMPT.shape[1] :]
    places = VOCABULARY ** torch.arange(generated.shape[1]).flip(0)
    observed = torch.bincount((generated * places).sum(1), minlength=len(joint)).double()
    if observed[joint == 0].any():
        return 0.0
    expected, order = (joint * len(sequences)).sort()
    observed = observed[order]
    pooled = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    observed = torch.cat([observed[:pooled].sum()[None], observed[pooled:]])
    expected = torch.cat([expected[:pooled].sum()[None], expected[pooled:]])
    return float(chisquare(observed.numpy(), expected.numpy()).pvalue)


def sample(
    spec: SelfSpec,
    model: PreTrainedModel | None = None,
    rows: int = SAMPLES,
    calls: int = 1,
    seed: int = 0,
    **options: object,
) -> tuple[torch.Tensor, float]:
    """``[calls * rows, s + NEW_TOKENS]`` samples, ``rows`` in one batch, and the acceptance rate."""
    torch.manual_seed(seed)
    sequences, accepted, drafted = [], 0, 0
    for _ in range(calls):
        sequences.append(
            (model or llama()).generate(
                PROMPT, do_sample=True, max_new_tokens=NEW_TOKENS, num_return_sequences=rows, assistant=spec, **options
            )
        )
        accepted += spec.stats.accepted
        drafted += spec.stats.drafted
    return torch.cat(sequences), accepted / drafted


def check_exact(sampled: tuple[torch.Tensor, float], joint: torch.Tensor) -> None:
    sequences, acceptance_rate = sampled
    assert 0.1 < acceptance_rate < 0.95, "a draft that is nearly always right or wrong tests little"
    assert p_value(sequences, joint) > SIGNIFICANCE


# Processors that do not look at the text are one mechanism, so each is tested with one draft.
CASES = [
    *((spec, options) for spec in SPECS for options in ("plain", "repetition_penalty")),
    ("early exit", "top_k"),
    ("tree", "top_p"),
    ("skipped layers", "temperature"),
]


@pytest.mark.parametrize(("spec", "options"), CASES)
def test_joint_distribution_is_that_of_the_full_model(spec: str, options: str) -> None:
    named, processors = OPTIONS[options]
    rows = SAMPLES // 2 if options == "repetition_penalty" else SAMPLES  # it is called for each row and node
    check_exact(sample(SPECS[spec], rows=rows, **named), exact_joint(llama(), processors))


@pytest.mark.parametrize("spec", ["early exit", "tree"])
def test_joint_distribution_of_calls_with_one_row(spec: str) -> None:
    sampled = sample(SPECS[spec], rows=1, calls=100, top_k=2)
    check_exact(sampled, exact_joint(llama(), [TopKLogitsWarper(2)]))


@pytest.mark.parametrize("spec", SPECS)
def test_joint_distribution_of_compiled_forwards(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def by_graph(graph: Graph, count: int, by_graph: Callable[[], Any], eager: Callable[[], Any]) -> Any:
        served.append(count)
        return by_graph()

    monkeypatch.setattr(graphs, "_USES", 2)
    monkeypatch.setattr(Graph, "faster_of", by_graph)
    compiled = replace(SPECS[spec], compile=CompileConfig(backend="eager", mode="default"))
    sampled = sample(compiled, rows=SAMPLES // 4, calls=4, top_k=3)
    assert 1 in served  # steps of drafts
    assert max(served) > 1  # verifications
    check_exact(sampled, exact_joint(llama(), [TopKLogitsWarper(3)]))


@pytest.mark.filterwarnings("ignore:GPTNeoForCausalLM cannot take rows:UserWarning")
def test_joint_distribution_where_rows_advance_together() -> None:
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=4,
        num_heads=2,
        attention_types=[[["global", "local"], 2]],
        bos_token_id=1,
        eos_token_id=None,
    )
    model = GPTNeoForCausalLM(config).eval()
    peak(model.transformer.ln_f)
    spec = SelfSpec(draft=EarlyExit(1), stop=FixedLength(3))
    sampled = sample(spec, model, rows=2, calls=100, top_k=3)
    check_exact(sampled, exact_joint(model, [TopKLogitsWarper(3)]))


# A user's own draft ------------------------------------------------------------------------------------------------


class Bigrams(CandidateGenerator):
    """Draws two tokens from a table; ``says_q(call)`` tells whether a call returns the distributions too."""

    def __init__(self, says_q: Callable[[int], bool]) -> None:
        self.says_q = says_q
        self.calls = 0
        self.table = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = []
        for _ in range(2):
            logits.append(self.table[input_ids[:, -1]])
            input_ids = torch.cat([input_ids, torch.multinomial(logits[-1].softmax(-1), 1)], dim=1)
        self.calls += 1
        return input_ids, torch.stack(logits, dim=1) if self.says_q(self.calls) else None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        pass


@pytest.mark.parametrize(
    "says_q",
    [lambda call: True, lambda call: False, lambda call: call % 2 == 0],
    ids=["always", "never", "every second call"],
)
def test_joint_distribution_with_a_candidate_generator(says_q: Callable[[int], bool]) -> None:
    sampled = sample(SelfSpec(draft=Bigrams(says_q)), rows=SAMPLES // 2, top_p=0.9)
    check_exact(sampled, exact_joint(llama(), [TopPLogitsWarper(0.9)]))


def test_the_distributions_of_a_candidate_generator_are_made_use_of() -> None:
    knowing, guessing = (SelfSpec(draft=Bigrams(lambda call, says_q=says_q: says_q)) for says_q in (True, False))
    assert sample(knowing, rows=1000)[1] > sample(guessing, rows=1000)[1] + 0.02


# The test itself ---------------------------------------------------------------------------------------------------

Choice = tuple[int, int | None]


def accepts_everything(scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int) -> Choice:
    return (drafted[0], 0) if drafted else choose_sampled(scores, drafted, q, num_drawn)


def draws_from_p_after_a_rejection(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> Choice:
    token, index = choose_sampled(scores, drafted, q, num_drawn)
    return choose_sampled(scores, [], None, 0) if index is None else (token, index)


def does_not_take_siblings_out_of_q(
    scores: torch.Tensor, drafted: list[int], q: torch.Tensor | None, num_drawn: int
) -> Choice:
    for index, token in enumerate(drafted):
        chosen, accepted = choose_sampled(scores, [token], q, 1)
        if accepted is not None:
            return chosen, index
        scores = (scores.softmax(-1) - q).clamp(min=0.0).log()
    return choose_sampled(scores, [], None, 0)


@pytest.mark.parametrize(
    ("spec", "biased"),
    [
        ("early exit", accepts_everything),
        ("early exit", draws_from_p_after_a_rejection),
        ("tree", does_not_take_siblings_out_of_q),
    ],
)
def test_a_biased_acceptance_rule_is_detected(
    spec: str, biased: Callable[..., Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "choose_sampled", biased)
    sequences, _ = sample(SPECS[spec])
    assert p_value(sequences, exact_joint(llama(), [])) < SIGNIFICANCE / 1000


# Seeds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_a_seed_fixes_the_output(spec: str) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return llama().generate(
            PROMPT, do_sample=True, max_new_tokens=12, num_return_sequences=4, assistant=SPECS[spec]
        )

    first = draw(7)
    assert torch.equal(first, draw(7))
    assert not torch.equal(first, draw(8))
