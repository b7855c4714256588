"""Verification of trees piece by piece: candidates that were drawn and named, layouts of several rows, forwards."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from helpers.architectures import build
from helpers.models import VOCABULARY, tiny_llama
from helpers.verification import fix_uniform
from hf_selfspec.batch import Draft
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.target import Target
from hf_selfspec.verify.sampling import choose_sampled

ALMOST_ONE = 1 - 2**-30


# Drawn and named candidates at one place -----------------------------------------------------------------------------


def outcomes(
    p: torch.Tensor, drafted: list[int], q: torch.Tensor, num_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The distribution of ``choose_sampled``'s token given its candidates, by bisecting its uniform numbers."""
    residuals: list[torch.Tensor] = []

    def draw(residual: torch.Tensor, count: int) -> torch.Tensor:
        residuals.append(residual)
        return torch.zeros(1, dtype=torch.long)

    def accepted(*uniform: float) -> int | None:
        fix_uniform(monkeypatch, *uniform, *[ALMOST_ONE] * len(drafted))
        return choose_sampled(p.log(), drafted, q, num_drawn)[1]

    monkeypatch.setattr(torch, "multinomial", draw)
    found, reached = torch.zeros(len(p)), 1.0
    # What is left is drawn, and may be one of the named ones.
    for index, token in enumerate(drafted[:num_drawn]):
        low, high = 0.0, 1.0
        while high - low > 1e-8:
            middle = (low + high) / 2
            low, high = (middle, high) if accepted(*[ALMOST_ONE] * index, middle) == index else (low, middle)
        found[token] += reached * high
        reached *= 1.0 - high
    residuals.clear()
    accepted()
    return found + reached * residuals[0] if residuals and reached > 1e-6 else found


def drawings(q: torch.Tensor, count: int) -> list[tuple[list[int], float]]:
    """All sequences of distinct tokens that can be drawn from ``q``, and the probability of each."""
    found = []
    for drawn in permutations(range(len(q)), count):
        probability, left = 1.0, 1.0
        for token in drawn:
            probability *= float(q[token]) / left
            left -= float(q[token])
        found.append((list(drawn), probability))
    return found


# Named tokens may follow from what was drawn, but not from the uniform numbers.
NAMED = {
    "the same whatever was drawn": lambda drawn: [token for token in (2, 0, 3) if token not in drawn],
    "one": lambda drawn: [next(token for token in (1, 3, 0, 2) if token not in drawn)],
    "by what was drawn": lambda drawn: [token for token in range(drawn[0], drawn[0] + 3) if token not in drawn],
    "all": lambda drawn: [token for token in range(4) if token not in drawn],
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drawn_and_named_candidates_have_the_full_models_distribution(
    seed: int, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged over all that could have been drawn, the token is distributed as ``p``: exactly, without samples."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (1.5 * torch.randn(2, 4, generator=generator)).softmax(-1)
    marginal = torch.zeros(4)
    for drawn, probability in drawings(q, count):
        named = [token % 4 for token in NAMED[name](drawn)]
        named = [token for token in dict.fromkeys(named) if token not in drawn]
        marginal += probability * outcomes(p, [*drawn, *named], q, count, monkeypatch)
    torch.testing.assert_close(marginal, p, atol=2e-6, rtol=0)


def test_named_candidates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is named in whatever order; ``q`` is not looked at."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.0, 0.0, 0.0, 1.0])
    for count in range(5):
        for named in permutations(range(4), count):
            torch.testing.assert_close(outcomes(p, list(named), q, 0, monkeypatch), p, atol=2e-6, rtol=0)


@pytest.mark.parametrize("token", range(4))
def test_a_named_candidate_that_is_drawn_is_accepted(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.0, 0.9, 0.1, 0.0])
    monkeypatch.setattr(torch, "multinomial", lambda residual, count: torch.tensor([token]))
    fix_uniform(monkeypatch, *[ALMOST_ONE] * 4)
    assert choose_sampled(p.log(), [3, 2], None, 2) == (token, {3: 0, 2: 1}.get(token))
    assert choose_sampled(p.log(), [1, 3, 0], q, 1) == (token, {3: 1, 0: 2}.get(token))


def test_candidates_of_a_draft() -> None:
    """Children beyond the drawn nodes are named, also where a node has both, and lines have their own."""
    q = torch.rand(1, 2, 5)
    draft = Draft(torch.tensor([[3, 4, 1, 2, 0]]), [3], [[0, 1, 0, 1, 2]], q, num_drawn=2)
    children = [draft.children(0, node) for node in range(6)]
    assert children == [[1, 3], [2, 4], [5], [], [], []]
    for node, drawn in ((0, 1), (1, 1)):
        found, count = draft.candidates(0, node, children[node])
        assert torch.equal(found, q[0, node])
        assert count == drawn
    assert draft.candidates(0, 2, [5]) == (None, 0)
    assert draft.candidates(0, 3, []) == (None, 0)
    line = Draft(torch.tensor([[3, 4]]), [2], q=q)
    assert line.candidates(0, 1, line.children(0, 1))[1] == 1
    assert Draft(torch.tensor([[3, 4]]), [2]).candidates(0, 0, [1]) == (None, 0)


# Layouts -------------------------------------------------------------------------------------------------------------


def test_layout_of_different_trees() -> None:
    """Node 0 is the last token; a node sees itself and what is above it in its own row, one that does not count
    nothing else."""
    layout = TreeLayout.of_tree([[0, 0, 1, 3], [0, 1, -1, -1], [-1, -1, -1, -1]])
    assert layout.size == 5
    assert layout.offsets(torch.device("cpu")).tolist() == [[0, 1, 1, 2, 3], [0, 1, 2, 0, 0], [0, 0, 0, 0, 0]]
    expected = [
        [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]],
        [[0], [0, 1], [0, 1, 2], [3], [4]],
        [[0], [1], [2], [3], [4]],
    ]
    ancestry = layout.ancestry(torch.device("cpu"))
    assert [[row.nonzero()[:, 0].tolist() for row in tree] for tree in ancestry] == expected
    slots = torch.tensor([[7], [3], [5]]) + torch.arange(5)
    keys, visible = layout.keys(slots, 12, first=1)
    assert keys[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]
    assert keys[1].tolist() == [0, 1, 2, 3, 4, 5, 3, 3, 8, 9, 10, 11]
    assert visible.shape == (3, 4, 12)
    for row, first in enumerate((7, 3, 5)):
        for node in range(1, 5):
            seen = visible[row, node - 1, first : first + 5].nonzero()[:, 0].tolist()
            assert seen == expected[row][node]
            assert visible[row, node - 1, :first].all()


# Forwards ------------------------------------------------------------------------------------------------------------


def random_parents(size: int, generator: torch.Generator, counted: int) -> list[int]:
    return [
        int(torch.randint(0, node, (1,), generator=generator)) if node <= counted else -1 for node in range(1, size + 1)
    ]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "llama4_text", "deepseek_v3"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_forward_over_trees_is_a_forward_over_each_path(name: str, seed: int) -> None:
    """Three rows at different lengths, each with a tree of its own, against the plain model along each path."""
    model: PreTrainedModel = tiny_llama() if name == "llama" else build(name)
    generator = torch.Generator().manual_seed(seed)
    lengths, size = [11, 4, 8], 9
    parents = [random_parents(size, generator, counted) for counted in (9, 6, 0)]
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=generator)
    tokens = torch.randint(3, VOCABULARY, (3, size + 1), generator=generator)
    anatomy = Anatomy.of(model)
    target = Target(model, anatomy, SpeculativeCache(anatomy.num_layers, 3, 16))
    with target.prepared():
        target.prefill(ids[:, : max(lengths)], [0] * 3, lengths)
        logits = target.step(tokens, lengths, nodes=TreeLayout.of_tree(parents)).logits
    for row, length in enumerate(lengths):
        for node in range(size + 1):
            above = [node]
            while above[0] > 0:
                above.insert(0, parents[row][above[0] - 1])
            if above[0] < 0:
                continue
            path = torch.cat([ids[row, :length], tokens[row, above]])[None]
            torch.testing.assert_close(logits[row, node], model(path).logits[0, -1], atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_accepted_paths_of_trees_leave_their_keys_and_values(llama: LlamaForCausalLM) -> None:
    """After a path was kept the next forward sees it as if it had been a line, in each row its own."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    tokens = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    parents, paths = [[0, 0, 2, 3, 1], [0, 1, 0, 2, 4]], [[2, 3, 4], [1, 2, 4]]
    target = Target(llama, Anatomy.of(llama), SpeculativeCache(6, 2, 8))
    with target.prepared():
        target.prefill(ids, [0, 0], [6, 6])
        target.step(tokens, [6, 6], nodes=TreeLayout.of_tree(parents))
        moves = [(row, 6 + node, 6 + depth) for row in (0, 1) for depth, node in enumerate(paths[row], 1)]
        target.cache.keep_path([move for move in moves if move[1] != move[2]])
        last = torch.tensor([[9], [11]])
        logits = target.step(last, [10, 10]).logits
    for row, path in enumerate(paths):
        whole = torch.cat([ids[row], tokens[row, [0, *path]], last[row]])[None]
        torch.testing.assert_close(logits[row, 0], llama(whole).logits[0, -1], atol=1e-4, rtol=1e-4)
