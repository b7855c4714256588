"""Trees: their layouts in several rows, forwards over them, and the paths that are kept."""

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from helpers.architectures import build
from helpers.models import VOCABULARY, tiny_llama
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache import SpeculativeCache
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.target import Target


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
