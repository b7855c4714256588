"""Random models with a part that agrees with the whole at a set rate, so that no trained weights are needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..draft.early_exit import EarlyExit
from ..draft.skip_layers import SkipLayers
from ..model.anatomy import Anatomy
from ..search.skip_space import SkipSpace
from ..selfspec import SelfSpec
from ..stop.rules import FixedLength

# Factors between these are tried by bisection; the second, stronger range only if the first is not enough.
_RANGES, _HALVINGS, _NEAR = ((0.01, 1.0), (1e-4, 0.01)), 9, 0.04


@dataclass(frozen=True)
class LlamaShape:
    """A Llama with random weights.

    Attributes:
        width: hidden size; heads are 64 wide, two query heads share a key head.
        layers: decoder layers.
        intermediate: width of the MLP, 8/3 of the hidden size by default.
        vocabulary, positions: sizes of the vocabulary and the context.
        dtype, device: data type and device of the model.
        seed: seed of the weights.
    """

    width: int
    layers: int
    intermediate: int | None = None
    vocabulary: int = 4096
    positions: int = 16384
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def model(self) -> LlamaForCausalLM:
        """Creates the model; every call returns the same weights."""
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
            return LlamaForCausalLM(config).eval().to(self.dtype)


def damped_llama(
    shape: LlamaShape, exit_layer: int = 4, num_draft: int = 4, agreement: float = 0.8
) -> tuple[LlamaForCausalLM, float]:
    """Returns a random Llama whose layers from ``exit_layer`` on are damped so that the exit agrees at a set rate.

    Agreement is the acceptance rate of greedy drafts; the closest of several dampings is taken.

    Args:
        shape: sizes of the model.
        exit_layer: the exit that should agree.
        num_draft: number of tokens in a draft.
        agreement: wanted rate, between 0 and 1.

    Returns:
        The model and the agreement that it has.
    """
    model = shape.model()
    spec = SelfSpec(draft=EarlyExit(exit_layer), stop=FixedLength(num_draft))
    return model, _damped(model, exit_blocks(shape.layers, exit_layer), spec, agreement).agreement


def known_skips_llama(
    shape: LlamaShape, ratio: float = 0.5, num_draft: int = 4, agreement: float = 0.95
) -> tuple[LlamaForCausalLM, SkipLayers, float]:
    """Returns a random Llama in which known attention and MLP blocks, at random depths, hardly matter.

    Args:
        shape: sizes of the model; the first and the last layer matter.
        ratio: share of the other layers' blocks that hardly matter.
        num_draft: number of tokens in a draft.
        agreement: wanted rate when all of these blocks are skipped, between 0 and 1.

    Returns:
        The model, the blocks that hardly matter, and the agreement when they are skipped.
    """
    model = shape.model()
    space = SkipSpace.of(Anatomy.of(model))
    known = space.random(np.random.default_rng(shape.seed), ratio)
    draft = SkipLayers(tuple(known.skipped_attention), tuple(known.skipped_mlp))
    places = [space.blocks[place] for place in space.places(known)]
    return model, draft, _damped(model, places, SelfSpec(draft=draft, stop=FixedLength(num_draft)), agreement).agreement


@dataclass(frozen=True)
class Damping:
    """The damping of blocks.

    Attributes:
        factor: factor of the blocks' last weights.
        agreement: how often drafts agree with it.
    """

    factor: float
    agreement: float


def exit_damping(shape: LlamaShape, exit_layer: int, num_draft: int = 4, agreement: float = 0.8) -> Damping:
    """Finds the damping of :func:`damped_llama`, which :func:`damp_blocks` can repeat on the same model."""
    spec = SelfSpec(draft=EarlyExit(exit_layer), stop=FixedLength(num_draft))
    return _damped(shape.model(), exit_blocks(shape.layers, exit_layer), spec, agreement)


def exit_blocks(layers: int, exit_layer: int) -> list[tuple[int, str]]:
    """All blocks after an exit, in a model with ``layers`` layers."""
    return [(layer, block) for layer in range(exit_layer, layers) for block in ("attention", "mlp")]


def damp_blocks(model: LlamaForCausalLM, places: list[tuple[int, str]], factor: float) -> None:
    """Multiplies the last weights of blocks by ``factor``, so that the blocks matter less."""
    with torch.no_grad():
        for weight in _ends(model, places):
            weight.mul_(factor)


def _ends(model: LlamaForCausalLM, places: list[tuple[int, str]]) -> list[torch.nn.Parameter]:
    decoder = model.model.layers
    return [
        (decoder[layer].self_attn.o_proj if block == "attention" else decoder[layer].mlp.down_proj).weight
        for layer, block in places
    ]


def _damped(model: LlamaForCausalLM, places: list[tuple[int, str]], spec: SelfSpec, agreement: float) -> Damping:
    """Damps blocks until drafts of ``spec`` agree about as often as wanted."""
    weights = _ends(model, places)
    full = [weight.detach().clone() for weight in weights]
    best = (2.0, 0.0, 0.0)
    for low, high in _RANGES:
        if best[0] <= _NEAR:
            break
        for _ in range(_HALVINGS):
            factor = (low * high) ** 0.5
            _damp(weights, full, factor)
            found = acceptance(model, spec)
            best = min(best, (abs(found - agreement), factor, found))
            low, high = (factor, high) if found > agreement else (low, factor)
    _damp(weights, full, best[1])
    return Damping(*best[1:])


def _damp(weights: list[torch.nn.Parameter], originals: list[torch.Tensor], factor: float) -> None:
    with torch.no_grad():
        for weight, original in zip(weights, originals, strict=True):
            torch.mul(original, factor, out=weight)


def acceptance(model: LlamaForCausalLM, spec: SelfSpec, tokens: int = 96) -> float:
    """Acceptance rate of ``spec`` after the prompt of the measurements."""
    model.generate(**random_prompt(model, 1, 64), max_new_tokens=tokens, do_sample=False, assistant=spec)
    assert spec.stats is not None
    return spec.stats.acceptance_rate


def random_prompt(model: LlamaForCausalLM, rows: int, length: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random token ids ``[rows, length]`` and a mask of ones."""
    generator = torch.Generator("cpu").manual_seed(seed)
    size = model.config.vocab_size
    ids = torch.randint(2, size, (rows, length), generator=generator, device="cpu").to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
