"""Times variants in turn in one process."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..model.attention import without_cudnn_attention


@dataclass
class Sample:
    """One timed generation.

    Attributes:
        prefill: seconds to the first token.
        decode: seconds from the first token to the last.
        steps: number of tokens (per row) after the first.
        result: what else the variant returned.
    """

    prefill: float
    decode: float
    steps: int
    result: Any = None

    @property
    def per_token(self) -> float:
        """Seconds per token of one row, without the prefill."""
        return self.decode / max(self.steps, 1)


@dataclass
class Timings:
    """The samples of one variant."""

    samples: list[Sample] = field(default_factory=list)

    def median(self, what: Callable[[Sample], float] = lambda sample: sample.per_token) -> float:
        """Median over the samples, of the seconds per token by default."""
        return statistics.median(map(what, self.samples))

    def spread(self) -> float:
        """Half the range between the quartiles of the seconds per token, as a share of the median."""
        values = sorted(sample.per_token for sample in self.samples)
        if len(values) < 4:
            return (values[-1] - values[0]) / 2 / self.median()
        low, _, high = statistics.quantiles(values, n=4)
        return (high - low) / 2 / self.median()


class _Clock(BaseStreamer):
    """Records when tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if value.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def timed_generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Sample:
    """Runs ``generate`` once and times its two phases."""
    clock = _Clock()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    with without_cudnn_attention():
        model.generate(**inputs, streamer=clock, **kwargs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    end = time.perf_counter()
    # The first call of `put` is for the prompt.
    first = clock.times[1]
    return Sample(first - start, end - first, len(clock.times) - 2)


def interleave(variants: dict[str, Callable[[], Sample]], repeats: int, warmup: int = 1) -> dict[str, Timings]:
    """Runs the variants in turn, ``repeats`` times each, after ``warmup`` runs that do not count."""
    timings = {name: Timings() for name in variants}
    for turn in range(warmup + repeats):
        for name, run in variants.items():
            sample = run()
            if turn >= warmup:
                timings[name].samples.append(sample)
    return timings


def machine(device: torch.device) -> str:
    """Returns one line about the machine and the versions behind a figure."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {versions}"
    return f"{_processor()}, {torch.get_num_threads()} thread(s), {versions}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
