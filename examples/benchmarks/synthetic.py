"""Random models with a part that agrees with the whole at a set rate, so that no trained weights are needed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from timing import add_numbers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_selfspec import EarlyExit, FixedLength, SelfSpec, SkipLayers
from hf_selfspec.model.anatomy import Anatomy
from hf_selfspec.search.skip_search import SkipSpace

DTYPES = ("float32", "bfloat16", "float16")
# Factors between these are tried by bisection; the second, stronger range only if the first is not enough.
_RANGES, _HALVINGS, _NEAR = ((0.01, 1.0), (1e-4, 0.01)), 9, 0.04


@dataclass(frozen=True)
class LlamaShape:
    """A Llama with random weights; heads are 64 wide, and two query heads share a key head."""

    width: int
    layers: int
    intermediate: int | None = None  # 8/3 of the width by default
    vocabulary: int = 4096
    positions: int = 16384
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def model(self) -> LlamaForCausalLM:
        """Creates the model on its device; every call returns the same weights."""
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate or self.width * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 64,
            num_key_value_heads=max(1, self.width // 128),
            max_position_embeddings=self.positions,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()

    def damped(self, exit_layer: int, factor: float) -> LlamaForCausalLM:
        """The model with the blocks after an exit multiplied by ``factor``, so that they matter less."""
        model = self.model()
        _damp(_ends(model, exit_blocks(self.layers, exit_layer)), factor)
        return model


def exit_damping(shape: LlamaShape, exit_layer: int, num_draft: int = 4, agreement: float = 0.8) -> float:
    """The factor with which greedy drafts of an exit are accepted about as often as wanted."""
    spec = SelfSpec(draft=EarlyExit(exit_layer), stop=FixedLength(num_draft))
    return _damped(shape.model(), exit_blocks(shape.layers, exit_layer), spec, agreement)


def known_skips_llama(
    shape: LlamaShape, ratio: float = 0.5, num_draft: int = 4, agreement: float = 0.95
) -> tuple[LlamaForCausalLM, SkipLayers]:
    """A random Llama in which known attention and MLP blocks, at random depths, hardly matter, and these blocks.

    ``ratio`` is their share of all blocks but those of the first and the last layer; drafts that skip them are accepted
    about as often as ``agreement``.
    """
    model = shape.model()
    space = SkipSpace.of(Anatomy.of(model))
    plan = space.random(np.random.default_rng(shape.seed), ratio)
    draft = SkipLayers(tuple(plan.skipped_attention), tuple(plan.skipped_mlp))
    places = [space.blocks[place] for place in space.places(plan)]
    _damped(model, places, SelfSpec(draft=draft, stop=FixedLength(num_draft)), agreement)
    return model, draft


def exit_blocks(layers: int, exit_layer: int) -> list[tuple[int, str]]:
    """All blocks after an exit, in a model with ``layers`` layers."""
    return [(layer, block) for layer in range(exit_layer, layers) for block in ("attention", "mlp")]


def random_prompt(model: LlamaForCausalLM, rows: int, length: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random token ids ``[rows, length]`` and a mask of ones."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(2, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def add_random_models(parser: argparse.ArgumentParser) -> None:
    """Options of random models."""
    add_numbers(parser, width=[256, 1024], layers=12, vocabulary=4096, threads=1)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--intermediate", type=int, help="MLP width, 8/3 of the hidden size by default")
    parser.add_argument("--device", default="cpu")


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, LlamaShape]]:
    """The random models, with their names in tables."""
    for width in args.width:
        for name in args.dtype:
            dtype = getattr(torch, name)
            shape = LlamaShape(width, args.layers, args.intermediate, args.vocabulary, dtype=dtype, device=args.device)
            yield f"width {width}, {name}", shape


def _ends(model: LlamaForCausalLM, places: list[tuple[int, str]]) -> list[torch.nn.Parameter]:
    """The last weights of blocks."""
    names = {"attention": "self_attn.o_proj.weight", "mlp": "mlp.down_proj.weight"}
    return [model.model.layers[layer].get_parameter(names[block]) for layer, block in places]


def _damped(model: LlamaForCausalLM, places: list[tuple[int, str]], spec: SelfSpec, agreement: float) -> float:
    """Damps blocks until drafts of ``spec`` agree about as often as wanted, and returns the factor."""
    weights = _ends(model, places)
    full = [weight.detach().clone() for weight in weights]
    best = (2.0, 0.0)
    for low, high in _RANGES:
        if best[0] <= _NEAR:
            break
        for _ in range(_HALVINGS):
            factor = (low * high) ** 0.5
            _damp(weights, factor, full)
            model.generate(**random_prompt(model, 1, 64), max_new_tokens=96, do_sample=False, assistant=spec)
            acceptance = spec.stats.acceptance_rate
            best = min(best, (abs(acceptance - agreement), factor))
            low, high = (factor, high) if acceptance > agreement else (low, factor)
    _damp(weights, best[1], full)
    return best[1]


@torch.no_grad()
def _damp(weights: list[torch.nn.Parameter], factor: float, originals: list[torch.Tensor] | None = None) -> None:
    for weight, original in zip(weights, originals or weights, strict=True):
        torch.mul(original, factor, out=weight)
