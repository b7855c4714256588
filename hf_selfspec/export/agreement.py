"""Checks that an exported draft predicts what the same part of the model predicts."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..draft.blocks import DraftBlocks
from ..errors import UnsupportedModelError
from ..model.anatomy import Anatomy
from ..model.partial import ForwardPass, obeying, partial_forwards
from ..model.patching import evaluating
from ..model.plan import LayerPlan

# Tokens of the text on which the two are compared.
_TOKENS = 16
# How far apart logits may be, as a share of the largest one: other kernels round differently. The models of the tests
# agree within 1e-5; a wrong or incomplete layer changes logits by a tenth or more.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_agreement(model: PreTrainedModel, anatomy: Anatomy, blocks: DraftBlocks, draft: PreTrainedModel) -> None:
    """Compares the logits of the draft with those of the model's blocks on a text of a few tokens.

    Raises:
        UnsupportedModelError: they predict different things.
    """
    ids = probe_text(model)
    with torch.no_grad(), evaluating(model):
        expected = partial_logits(model, anatomy, blocks, ids).float()
        found = draft(input_ids=ids, use_cache=False).logits.float()
    apart = (found - expected).abs().max().item()
    allowed = _TOLERANCE.get(model.dtype, 0.0) * max(1.0, expected.abs().max().item())
    if not apart <= allowed:
        raise UnsupportedModelError(
            f"the checkpoint would not predict what this part of {anatomy.model_name} predicts (logits differ by "
            f"{apart:.2g}, at most {allowed:.2g} is rounding): the model treats positions, residuals or the number of "
            "its layers in a way of its own. Nothing was written. Export another part, or use this one with "
            "generate(assistant=...)."
        )


def probe_text(model: PreTrainedModel) -> torch.Tensor:
    """``[1, s]`` ids spread over the vocabulary."""
    embeddings = model.get_input_embeddings()
    places = torch.arange(1, _TOKENS + 1, device=embeddings.weight.device)
    return (places * 7919 % embeddings.weight.shape[0])[None]


def partial_logits(model: PreTrainedModel, anatomy: Anatomy, blocks: DraftBlocks, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[1, s, v]`` of the blocks when they run inside the whole model."""
    adapter = blocks.adapter
    current = ForwardPass(blocks.plan)
    if adapter is not None and adapter.head is None:
        current.head_input_fn = lambda states: adapter.on(states.device)(states).to(states.dtype)
    with partial_forwards(model, anatomy):
        if blocks.plan.skipped_attention != blocks.plan.skipped_mlp:
            with obeying(ForwardPass(LayerPlan(anatomy.num_layers))):  # records what blocks return besides states
                model(input_ids=ids, use_cache=False)
        with obeying(current):
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    if adapter is None or adapter.head is None:
        return logits
    assert current.exit_state is not None
    part = adapter.on(logits.device)
    assert part.head is not None
    found: torch.Tensor = part.head(part(current.exit_state))
    return found
