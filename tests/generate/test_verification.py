"""Verification piece by piece: choosing a token, walking a draft, processors of all its nodes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_selfspec import TopKTree
from hf_selfspec.batch import Draft, Text, Verdict
from hf_selfspec.drafts.scoring import Scorer
from hf_selfspec.generate import walk
from hf_selfspec.generate.output import Stopper
from hf_selfspec.generate.walk import accept_drawn, choose_sampled, verify
from hf_selfspec.model.logits import Logits, draw_without_replacement

ALMOST_ONE = 1 - 2**-30


def fix_uniform(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """The next uniform numbers are these."""
    script = iter(values)
    for name in ("rand", "rand_like"):
        monkeypatch.setattr(torch, name, lambda *_, **__: torch.tensor(next(script), dtype=torch.float64))


def at_once(scores: torch.Tensor, drafted: list[int], q: torch.Tensor) -> tuple[int, int | None]:
    """``choose_sampled`` as on a GPU, with one place more than there are tokens."""
    index, token = map(int, accept_drawn(scores.softmax(-1), q, torch.tensor([*drafted, -1])))
    return (drafted[index], index) if index >= 0 else (token, None)


each_way = pytest.mark.parametrize("decide", [choose_sampled, at_once])


def orders(q: torch.Tensor, count: int) -> Iterator[tuple[list[int], float]]:
    """Every sequence of ``count`` distinct tokens, with the probability of drawing it from ``q`` one after another."""
    for drawn in permutations(range(len(q)), count):
        probability, left = 1.0, 1.0
        for token in drawn:
            probability *= float(q[token]) / left if probability else 0.0
            left -= float(q[token])
        if probability > 0.0:
            yield list(drawn), probability


def outcomes(
    decide: Any, p: torch.Tensor, drafted: list[int], q: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The distribution of the token that is chosen given its candidates, by bisecting its uniform numbers."""
    residuals: list[torch.Tensor] = []

    def draw(residual: torch.Tensor) -> torch.Tensor:
        residuals.append(residual)
        return torch.zeros((), dtype=torch.long)

    def accepted(*uniform: float) -> int | None:
        fix_uniform(monkeypatch, *uniform, *[ALMOST_ONE] * (len(drafted) + 1))
        index: int | None = decide(p.log(), drafted, q)[1]
        return index

    monkeypatch.setattr(walk, "draw", draw)
    found, reached = torch.zeros(len(p)), 1.0
    for index, token in enumerate(drafted):
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if accepted(*[ALMOST_ONE] * index, middle) == index else (low, middle)
        found[token] += reached * high
        reached *= 1.0 - high
    residuals.clear()
    accepted()
    return found + reached * residuals[0] if residuals and reached > 1e-6 else found


HALVES, BOTH = [0.5, 0.5, 0.0], [0, 1]


@pytest.mark.parametrize(
    "case",
    [
        ([0.0, 0.0], [0.0, 0.0, 1.0], [0, 1], [0.5, 0.4, 0.1], [2]),
        # Fewer tokens have a probability than siblings were asked for: the rest of the list is padding.
        ([ALMOST_ONE, 0.0], [0.2, 0.8], [0, 1], [1.0, 0.0], [1]),
        # p and q are equal but for rounding; even then a token that p rules out must not come through.
        ([ALMOST_ONE], [0.5, 0.5], [1], [0.5000001, 0.5000001], BOTH),
        ([1.0], HALVES, [0], [0.5, 0.5, 0.0], BOTH),
        ([1.0], HALVES, [2], [0.5, 0.5, 1e-9], BOTH),
        ([1.0], [0.0, 0.5, 0.5], [1], [0.0, 0.5000001, 0.5000001], [1, 2]),
    ],
)
@each_way
def test_what_cannot_be_is_never_accepted(case: Any, decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform numbers, p, drafted tokens, q, and what may come instead."""
    uniform, p, drafted, q, tokens = case
    fix_uniform(monkeypatch, *uniform, 1.0)
    token, index = decide(torch.tensor(p).log(), drafted, torch.tensor(q))
    assert token in tokens
    assert index is None


def test_a_line_never_accepts_a_token_without_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the uniform number is 0."""
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    p, q = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.5]]])
    for token in (0, 1):
        accepted, instead = accept_drawn(p, q, torch.tensor([[[token]]]))
        assert (accepted.item(), instead.item()) == (token - 1, 1)


def test_drawing_without_replacement_is_drawing_in_turn() -> None:
    torch.manual_seed(0)
    q, draws = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]), 20000
    drawn = draw_without_replacement(q.expand(draws, 5), 5)
    assert set(drawn[:, 4].tolist()) == {1}, "what is drawn beyond what there is has no probability"
    drawn = drawn[:, :3]
    expected = list(orders(q, 3))
    observed = [int((drawn == torch.tensor(order)).all(1).sum()) for order, _ in expected]
    assert sum(observed) == draws
    assert chisquare(observed, [draws * probability for _, probability in expected], sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize(("confidence", "width"), [(0.5, 10), (0.51, 5), (0.8, 5), (0.81, 3), (0.96, 1), (math.nan, 1)])
def test_tree_is_narrower_the_surer_the_draft(confidence: float, width: int) -> None:
    assert TopKTree().width(confidence) == width


def quick(examples: int) -> Any:
    """The same examples in each run, as long as each takes."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


# Some tokens without a probability.
LOGITS = st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 2.0]), min_size=4, max_size=4).filter(
    lambda logits: max(logits) > -math.inf
)


@each_way
@quick(20)
@given(p=LOGITS, q=LOGITS, count=st.integers(0, 3))
def test_candidates_leave_the_distribution_p(decide: Any, p: list[float], q: list[float], count: int) -> None:
    """Averaged over all siblings that could have been drawn without replacement."""
    target, drawn_from = torch.tensor(p).softmax(-1), torch.tensor(q).softmax(-1)
    marginal = torch.zeros(4)
    with pytest.MonkeyPatch.context() as patch:
        for drawn, probability in orders(drawn_from, min(count, int((drawn_from > 0).sum()))):
            marginal += probability * outcomes(decide, target, drawn, drawn_from, patch)
    torch.testing.assert_close(marginal, target, rtol=0, atol=2e-5)


@st.composite
def trees(draw: Any) -> tuple[list[int], list[int]]:
    """Parents and tokens of up to nine nodes, some of which do not count; siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(1, draw(st.integers(1, 9)) + 1):
        usable = [0, *(n for n in range(1, node) if parents[n - 1] >= 0)]
        parents.append(draw(st.sampled_from([*usable, -1])))
        taken = {token for parent, token in zip(parents, tokens, strict=False) if parent == parents[-1] >= 0}
        tokens.append(draw(st.sampled_from(sorted(set(range(12)) - taken))))
    return parents, tokens


@quick(80)
@given(tree=trees(), seed=st.integers(0, 999), drawn=st.integers(0, 10))
def test_a_walk_is_the_longest_path_that_agrees(tree: tuple[list[int], list[int]], seed: int, drawn: int) -> None:
    """Greedy, and sampling where only one token has a probability, children of some nodes were drawn, and others named;
    on a CPU, and as on a GPU."""
    parents, tokens = tree
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, len(tokens) + 1, 12, generator=generator)
    for node, token in enumerate(tokens, start=1):  # some parents agree with a child
        if torch.rand((), generator=generator) < 0.7 and parents[node - 1] >= 0:
            logits[0, parents[node - 1], token] = 9.0 + node
    text = Text.of(torch.zeros(1, 3, dtype=torch.long), [0], 20)
    draft = Draft(torch.tensor([tokens]), [len(tokens)], [parents])
    sharp = torch.full_like(logits, -torch.inf).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    stopper = Stopper(StoppingCriteriaList())
    uniform, found = replace(draft, q=torch.full((1, drawn, 12), 1 / 12)), list[Verdict]()
    for given_draft, one_by_one in ((draft, "cpu"), (uniform, "cpu"), (uniform, "none")):
        scorer = Scorer(LogitsProcessorList(), 1, do_sample=given_draft is uniform)
        with patch.object(walk, "_ONE_BY_ONE", one_by_one):
            found += verify(text, given_draft, Logits(sharp), scorer, stopper, [False], None)
    node, expected, path = 0, [], []
    while node >= 0:
        expected.append(int(logits[0, node].argmax()))
        node = next((n for n, t in enumerate(tokens, start=1) if parents[n - 1] == node and t == expected[-1]), -1)
        path.append(node)
    for verdict in found:
        assert (verdict.tokens, verdict.nodes, verdict.sources) == (expected, path, [0, *path[:-1]])
