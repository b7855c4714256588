"""Calls that are left to transformers' own loop, with the statistics of a call without a draft."""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from .model.anatomy import Anatomy
from .model.plan import LayerPlan
from .stats import GenerationStats
from .verify.stopping import Stopper


def decode_plainly(
    model: PreTrainedModel, input_ids: torch.Tensor, options: dict[str, Any], why: str
) -> tuple[Any, GenerationStats]:
    """Decodes without any part of ours.

    Args:
        model: the model.
        input_ids: ``[b, s]`` the prompts.
        options: all other arguments that a ``custom_generate`` callable gets.
        why: why the call is left to transformers.

    Returns:
        What ``generate`` returns, and the statistics.
    """
    begun = perf_counter()
    output = type(model)._sample(model, input_ids, **options)
    seconds, eos_tokens = perf_counter() - begun, Stopper(options["stopping_criteria"]).eos_tokens
    ids, width = output if isinstance(output, torch.Tensor) else output.sequences, input_ids.shape[1]
    pad = getattr(options["generation_config"], "_pad_token_tensor", None)
    padding = None if pad is None or not eos_tokens else int(pad)
    counts = [_generated(row, eos_tokens, padding) for row in ids[:, width:].tolist()]
    tokens, rounds = sum(counts), sum(counts) - len(counts)
    return output, GenerationStats(
        tokens=tokens,
        rounds=rounds,
        accepted_lengths=Counter({0: rounds}),
        total_seconds=seconds,
        from_draft=[[False] * count for count in counts],
        plan=LayerPlan(Anatomy.of(model).num_layers).picture(),
        drafts=False,
        left_to_generate=why,
        timeline=[(tokens, seconds)],
    )


def _generated(row: list[int], eos_tokens: frozenset[int], padding: int | None) -> int:
    """Returns how many tokens of a row were generated: up to its end-of-text token, or to the padding after it."""
    for index, token in enumerate(row, start=1):
        if token in eos_tokens:
            return index
    count = len(row)
    while count and row[count - 1] == padding:
        count -= 1
    return count
