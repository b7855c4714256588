"""Random models whose early layers agree with the last one at a set rate: no weights needed."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..draft.early_exit import EarlyExit
from ..selfspec import SelfSpec
from ..stop.rules import FixedLength

_DAMPINGS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.6, 0.8)


def damped_llama(
    width: int,
    layers: int = 12,
    exit_layer: int = 4,
    num_draft: int = 4,
    agreement: float = 0.8,
    vocabulary: int = 4096,
    positions: int = 16384,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    intermediate: int | None = None,
    search: bool = True,
) -> tuple[LlamaForCausalLM, float]:
    """A random Llama whose layers from ``exit_layer`` on are damped so that an exit there agrees at the set rate.

    Agreement is the acceptance rate of greedy drafts; of a row of dampings the one that comes closest is taken.

    Args:
        width: hidden size; heads are 64 wide, two query heads share a key head.
        layers: decoder layers.
        exit_layer: the exit that is to agree.
        num_draft: length of the drafts.
        agreement: rate aimed for, between 0 and 1.
        vocabulary, positions: sizes of the vocabulary and the context.
        dtype, device: of the model.
        seed: of the weights.
        intermediate: width of the MLP, 8/3 of the hidden size by default.
        search: whether to damp at all; without it the agreement is 0 and not measured.

    Returns:
        The model and the agreement that it has.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=intermediate or width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=positions,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().to(dtype)
    if not search:
        return model, 0.0
    upper = [
        m.weight for layer in model.model.layers[exit_layer:] for m in (layer.self_attn.o_proj, layer.mlp.down_proj)
    ]
    full = [weight.detach().clone() for weight in upper]
    best = (2.0, 0.0, 0.0)
    for factor in _DAMPINGS:
        _damp(upper, full, factor)
        found = acceptance(model, exit_layer, num_draft)
        best = min(best, (abs(found - agreement), factor, found))
    _damp(upper, full, best[1])
    return model, best[2]


def _damp(weights: list[torch.Tensor], originals: list[torch.Tensor], factor: float) -> None:
    with torch.no_grad():
        for weight, original in zip(weights, originals, strict=True):
            torch.mul(original, factor, out=weight)


def acceptance(model: LlamaForCausalLM, exit_layer: int, num_draft: int, tokens: int = 64) -> float:
    """Acceptance rate of drafts of ``num_draft`` tokens after the prompt of the measurements."""
    spec = SelfSpec(draft=EarlyExit(exit_layer), stop=FixedLength(num_draft))
    model.generate(**random_prompt(model, 1, 64), max_new_tokens=tokens, do_sample=False, assistant=spec)
    assert spec.stats is not None
    return spec.stats.acceptance_rate


def random_prompt(model: LlamaForCausalLM, rows: int, length: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random token ids ``[rows, length]`` and a mask of ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, model.config.vocab_size, (rows, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
