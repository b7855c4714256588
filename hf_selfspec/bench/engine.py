"""The efficiency of the engine, whatever the draft: what speculation costs besides the model's own forwards."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..selfspec import SelfSpec
from ..stats import GenerationStats
from .measure import Sample, Timings, interleave, timed_generate
from .resident import peak_resident_bytes
from .synthetic import random_prompt


@dataclass(frozen=True)
class EngineFigures:
    """Plain ``generate`` and speculation with this package, side by side.

    Attributes:
        plain_ms, ours_ms: milliseconds per token of one row, decoding only (medians).
        spread: the larger of the two variants' half quartile ranges, as a share of the median.
        speedup: plain / ours.
        acceptance_rate, mean_generated_length: α and M.
        draft_cost: c, time of a drafting step / time of a one-token step of plain ``generate``.
        verify_cost: time of a verification pass / time of a one-token step of plain ``generate``.
        expected: speed-up by SWIFT's equation 6 with this c.
        outside: share of decoding time outside the model's forwards (on a GPU: outside of launching them).
    """

    plain_ms: float
    ours_ms: float
    spread: float
    speedup: float
    acceptance_rate: float
    mean_generated_length: float
    draft_cost: float
    verify_cost: float
    expected: float
    outside: float

    @property
    def efficiency(self) -> float:
        """Measured / expected speed-up."""
        return self.speedup / self.expected


def engine_figures(
    model: PreTrainedModel, spec: SelfSpec, rows: int, prompt: int, tokens: int, repeats: int
) -> EngineFigures:
    """Compares greedy generation with drafts of ``spec`` with plain ``generate``."""
    inputs = random_prompt(model, rows, prompt)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}

    def ours() -> Sample:
        sample = timed_generate(model, inputs, assistant=spec, **options)
        sample.result = spec.stats
        return sample

    timings = interleave({"plain": lambda: timed_generate(model, inputs, **options), "ours": ours}, repeats)
    return _figures(timings["plain"], timings["ours"])


def _figures(plain: Timings, ours: Timings) -> EngineFigures:
    runs: list[GenerationStats] = [sample.result for sample in ours.samples]
    one_token = plain.median()
    stats = runs[-1]
    draft = statistics.median(run.draft_seconds / run.draft_steps for run in runs) / one_token
    verify = statistics.median(run.verify_seconds / run.verify_passes for run in runs) / one_token
    m, alpha = stats.mean_generated_length, stats.acceptance_rate
    return EngineFigures(
        plain_ms=one_token * 1e3,
        ours_ms=ours.median() * 1e3,
        spread=max(plain.spread(), ours.spread()),
        speedup=one_token / ours.median(),
        acceptance_rate=alpha,
        mean_generated_length=m,
        draft_cost=draft,
        verify_cost=verify,
        expected=m * alpha / ((m - 1) * draft + alpha),
        outside=statistics.median(1 - run.forward_seconds / run.total_seconds for run in runs),
    )


def peak_memory(model: PreTrainedModel, spec: SelfSpec | None, rows: int, prompt: int, tokens: int) -> float:
    """Peak memory in MiB of one generation: allocated memory on a GPU, resident memory of this process on a CPU.

    The peak of resident memory never falls, so on a CPU each variant needs a process of its own.

    Args:
        model: the model.
        spec: how to draft, ``None`` for plain ``generate``.
        rows, prompt, tokens: batch size, prompt length and new tokens.
    """
    extra = {} if spec is None else {"assistant": spec}
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model.generate(**random_prompt(model, rows, prompt), max_new_tokens=tokens, do_sample=False, **extra)
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_resident_bytes() / 2**20
