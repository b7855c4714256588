"""Ids of tiny models of many types beside plain ``generate``'s, on a device; part of ``gpu.py``."""

from __future__ import annotations

import re
from itertools import product
from typing import Any
from unittest import SkipTest

import torch
from transformers import PreTrainedModel

from helpers import architectures, models, multimodal
from hf_selfspec import SelfSpec
from hf_selfspec.tools.audits import Difference, difference_at

# Rows have so much text.
ROWS = ((9,), (9, 5, 7))


def types() -> list[str]:
    """All types, those that differ most first."""
    names = [*architectures.ARCHITECTURES, *multimodal.MODELS]
    return sorted(names, key=lambda name: re.fullmatch(architectures.EVERY_RUN, name) is None)


def near_ties_of(name: str, device: torch.device, tokens: int, calls: int = 2) -> int:
    """How many rows of calls with each dtype part from plain's at a near tie.

    Raises:
        ValueError: a row parts elsewhere.
        SkipTest: this transformers does not have the type, or plain ``generate`` fails.
    """
    is_text, near_ties, wrong, without_plain = name in architectures.ARCHITECTURES, 0, [], ""
    for dtype, texts in product((torch.float32, torch.bfloat16), ROWS):
        model = (architectures if is_text else multimodal).build(name).to(device, dtype)
        values = models.ragged_batch(texts, seed=5) if is_text else multimodal.prompt_of(name, texts)
        prompt = {key: value.to(device) for key, value in values.items()}
        prompt = {key: value.to(dtype) if value.is_floating_point() else value for key, value in prompt.items()}
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
        try:
            plain = model.generate(**prompt, **options, return_dict_in_generate=True, output_scores=True)
        except Exception as error:  # of transformers' own code
            without_plain = f"plain generate fails in {dtype}: {error}"
            continue
        spec = SelfSpec()
        for call in range(calls):
            ours = model.generate(**prompt, **options, assistant=spec)
            for difference in differences_of(model, prompt, plain, ours):
                near_ties += difference.is_near_tie
                wrong += [] if difference.is_near_tie else [f"{dtype}, {len(texts)} rows, call {call}: {difference}"]
    if wrong:
        raise ValueError("; ".join(wrong))
    if without_plain:
        raise SkipTest(without_plain)
    return near_ties


def differences_of(model: PreTrainedModel, prompt: Any, plain: Any, ours: torch.Tensor) -> list[Difference]:
    """Where texts diverge, by the scores of plain ``generate``, which has seen images too."""
    differences = []
    for row in (plain.sequences != ours).any(1).nonzero().flatten().tolist():
        expected, ids = plain.sequences[row], ours[row]
        column, start = int((expected != ids).nonzero()[0]), int(prompt["attention_mask"][row].argmax())
        scores = plain.scores[column - prompt["input_ids"].shape[1]][row]
        for module in model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None  # of the images of all rows
        pair, text = (int(expected[column]), int(ids[column])), expected[None, start:column]
        differences.append(difference_at(row, column, *pair, model, text, scores))
    return differences
