"""Sampling is lossless: joint distributions of generated tokens against exact enumeration with the whole model."""

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation import CandidateGenerator, TopKLogitsWarper, TopPLogitsWarper

from helpers.captured import Traced
from helpers.sampling import OPTIONS, SAMPLES, SPECS, VOCABULARY, check_exact, exact_joint, llama, sample
from hf_selfspec import Cascade, EarlyExit, FixedLength, Lookup, SelfSpec, TopKTree
from hf_selfspec.batch import Draft
from hf_selfspec.drafts.controller import Controller
from hf_selfspec.model.graphs.model_graphs import COMPARISONS

# Free drafts, and in turns with another source; few nodes, so that not every token of the tiny vocabulary is named.
NAMED: dict[str, SelfSpec] = {
    "named": SelfSpec(Lookup(max_nodes=3)),
    "in turns": SelfSpec(Cascade([Lookup(max_nodes=4), EarlyExit(1)]), FixedLength(2), TopKTree(((1.0, 2),))),
}
# Processors that do not look at the text are one mechanism, so each is tested with one draft.
CASES = [
    *((spec, options) for spec in SPECS for options in ("plain", "repetition_penalty")),
    ("early exit", "top_k"),
    ("tree", "top_p"),
    ("skipped layers", "temperature"),
]


@pytest.mark.every_run("tree-plain")
@pytest.mark.parametrize(("spec", "options"), CASES)
def test_joint_distribution_is_that_of_the_full_model(spec: str, options: str) -> None:
    named, processors = OPTIONS[options]
    rows = SAMPLES // 2 if options == "repetition_penalty" else SAMPLES  # it is called for each row and node
    check_exact(sample(SPECS[spec], rows=rows, **named), exact_joint(llama(), processors))


@pytest.mark.every_run("tree")
@pytest.mark.machine("nodes_are_scored_at_once")
@pytest.mark.parametrize("spec", SPECS)
def test_joint_distribution_of_what_a_gpu_decides_at_once(spec: str) -> None:
    check_exact(sample(SPECS[spec], rows=SAMPLES), exact_joint(llama(), []))


@pytest.mark.every_run("in turns-plain")
@pytest.mark.machine("verification_is_free")
@pytest.mark.parametrize(
    ("name", "options"),
    [("named", "top_k"), ("named", "repetition_penalty"), ("in turns", "top_p"), ("in turns", "plain")],
)
def test_joint_distribution_of_named_tokens(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls, which draft with what those before have shown."""
    seen, turns, drawn_from = list[bool](), itertools.count(), Draft.drawn_from

    def watched(draft: Draft, row: int, node: int) -> Any:
        q = drawn_from(draft, row, node)
        seen.extend([q is not None] * bool(draft.children(row, node)))
        return q

    def choose(self: Controller, promised: Any, free: float = 0.0) -> str | None:
        return next(iter(promised), None) if next(turns) % 2 else None

    monkeypatch.setattr(Draft, "drawn_from", watched)
    monkeypatch.setattr(Controller, "choose", choose)
    given, processors = OPTIONS[options]
    check_exact(sample(replace(NAMED[name]), rows=400, calls=3, **given), exact_joint(llama(), processors))
    assert min(seen.count(False), seen.count(True) if name == "in turns" else 99) > 10


@pytest.mark.slow
@pytest.mark.machine("graphs_are_taken")
@pytest.mark.parametrize("spec", SPECS)
def test_joint_distribution_of_captured_forwards(spec: str) -> None:
    sampled = sample(replace(SPECS[spec]), deepcopy(llama()), rows=8, calls=SAMPLES // 8, top_k=3)
    served = {graph.inputs[0].shape[1] - 4 for graph in Traced.made if graph.runs > COMPARISONS}
    assert min(served) == 1  # a token, in a step of a draft, beside four numbers
    assert max(served) > 8  # tokens and their layout, in a verification
    check_exact(sampled, exact_joint(llama(), [TopKLogitsWarper(3)]))


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


@pytest.mark.every_run("every second call")
@pytest.mark.parametrize("every", [1, 2, 1 << 30], ids=["always", "every second call", "never"])
def test_joint_distribution_with_a_candidate_generator(every: int) -> None:
    sampled = sample(SelfSpec(draft=Bigrams(lambda call: call % every == 0)), rows=SAMPLES // 2, top_p=0.9)
    check_exact(sampled, exact_joint(llama(), [TopPLogitsWarper(0.9)]))
