"""Trees: their layouts in several rows, forwards over them, and the paths that are kept."""

import pytest
import torch
from transformers import PreTrainedModel

from helpers.architectures import build
from helpers.models import VOCABULARY, tiny_llama
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.model.cache.speculative_cache import SpeculativeCache
from hf_selfspec.model.layout import TreeLayout
from hf_selfspec.model.target import Target


def random_parents(size: int, generator: torch.Generator, counted: int) -> list[int]:
    return [
        int(torch.randint(0, node, (1,), generator=generator)) if node <= counted else -1 for node in range(1, size + 1)
    ]


@torch.no_grad()
@pytest.mark.every_run("0-.*")
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
