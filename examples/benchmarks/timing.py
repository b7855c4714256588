"""What the scripts of this folder share: variants timed in turn, prompts, peak memory, Markdown tables."""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_selfspec import GenerationStats, SelfSpec
from hf_selfspec.bench.compare import machine
from hf_selfspec.model.attention import without_cudnn_attention
from hf_selfspec.model.transfer import wait_for

DEMO = str(Path(__file__).parent.parent / "demo_model")
# Tokens of a text that are the prompt of a trained model.
PROMPT = 64


@dataclass
class Sample:
    """One timed generation: seconds to the first token, seconds from it to the last, and tokens of a row after it."""

    prefill: float
    decode: float
    steps: int
    result: Any = None

    @property
    def per_token(self) -> float:
        return self.decode / max(self.steps, 1)


@dataclass
class Timings:
    """The samples of one variant."""

    samples: list[Sample] = field(default_factory=list)

    def median(self, what: Callable[[Sample], float] = lambda sample: sample.per_token) -> float:
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

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, []

    def put(self, value: torch.Tensor) -> None:
        wait_for(self.device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def timed_generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Sample:
    """Runs ``generate`` once and times its two phases."""
    clock = _Clock(model.device)
    wait_for(model.device)
    start = time.perf_counter()
    with without_cudnn_attention():
        model.generate(**inputs, streamer=clock, **kwargs)
    wait_for(model.device)
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


# Whole calls on trained models ------------------------------------------------------------------------------------


@dataclass
class Speed:
    """One method over many prompts: medians of seconds, new tokens, statistics, and whether ids are the first's."""

    seconds: list[float] = field(default_factory=list)
    ids: list[torch.Tensor] = field(default_factory=list)
    runs: list[GenerationStats] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Milliseconds per token over all prompts."""
        return 1e3 * sum(self.seconds) / sum(ids.shape[1] for ids in self.ids)

    @property
    def alpha(self) -> float:
        drafted = sum(run.drafted for run in self.runs)
        return sum(run.accepted for run in self.runs) / drafted if drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens of a round."""
        rounds = sum(run.rounds for run in self.runs)
        return sum(run.tokens - len(run.from_draft) for run in self.runs) / rounds if rounds else 1.0


Way = Callable[[torch.Tensor], torch.Tensor] | SelfSpec | dict[str, Any]


def compare(
    model: PreTrainedModel,
    ways: dict[str, Way],
    prompts: Sequence[torch.Tensor],
    options: dict[str, Any],
    repeats: int = 1,
    warm_up: bool = True,
) -> dict[str, Speed]:
    """Times all ways on all prompts ``[1, s]``, in turn, each prompt ``repeats`` times.

    A way is a ``SelfSpec``, further arguments of ``generate`` (none for plain), or a function of a prompt. Without
    ``warm_up`` only the first one runs once before, so that the others learn in the stream.
    """
    found = {name: Speed() for name in ways}

    def run(way: Way, ids: torch.Tensor) -> torch.Tensor:
        if callable(way) and not isinstance(way, SelfSpec):
            return way(ids)
        given = {"assistant": way} if isinstance(way, SelfSpec) else way
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options, **given)

    for way in list(ways.values())[: None if warm_up else 1]:
        run(way, prompts[0])
    for ids in prompts:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        results = {}
        for turn in range(repeats):
            for name, way in ways.items():
                torch.manual_seed(turn)
                begun = time.perf_counter()
                results[name] = run(way, ids)
                wait_for(ids.device)
                seconds[name].append(time.perf_counter() - begun)
        for name, speed in found.items():
            way = ways[name]
            speed.seconds.append(statistics.median(seconds[name]))
            speed.ids.append(results[name][:, ids.shape[1] :])
            speed.same.append(torch.equal(results[name], results[next(iter(ways))]))
            if isinstance(way, SelfSpec) and way.stats is not None:
                speed.runs.append(way.stats)
    return found


def early_exit(model: PreTrainedModel, layer: int, num_draft: int, options: dict[str, Any]) -> Way:
    """Transformers' ``assistant_early_exit`` with drafts of one length."""
    config: Any = model.generation_config
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")

    def run(ids: torch.Tensor) -> torch.Tensor:
        kept = {name: getattr(config, name) for name in names}
        for name, value in zip(names, (num_draft, "constant", 0.0), strict=True):
            setattr(config, name, value)
        try:
            return model.generate(ids, attention_mask=torch.ones_like(ids), assistant_early_exit=layer, **options)
        finally:
            for name, value in kept.items():
                setattr(config, name, value)

    return run


def best_early_exit(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], options: dict[str, Any]
) -> tuple[int, int]:
    """The exit and the draft length with which transformers' early exit is fastest on two prompts."""
    layers = model.config.num_hidden_layers
    exits = sorted({min(3, layers - 1), min(4, layers - 1), -(-layers // 4), -(-layers // 3)})
    grid = {f"{layer} {length}": (layer, length) for layer in exits for length in (1, 2, 4)}
    ways = {name: early_exit(model, *case, options) for name, case in grid.items()}
    speeds = compare(model, ways, prompts[:2], options)
    return grid[min(grid, key=lambda name: speeds[name].ms)]


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model in float32 on the CPU; it never ends a text early, so that all runs have as many tokens."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(name)


def prompts_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[torch.Tensor]:
    """The first 64 tokens, ``[1, 64]``, of ``count`` texts that have at least as many."""
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"][:PROMPT] for text in texts)
    found = [torch.tensor([ids]) for ids in islice((ids for ids in encoded if len(ids) == PROMPT), count)]
    if len(found) < count:
        sys.exit(
            f"{count} prompts of {PROMPT} tokens are needed, but the texts have {len(found)}. Give fewer --prompts."
        )
    return found


def add_trained(parser: argparse.ArgumentParser, prompts: int) -> None:
    """Options of figures on a trained model."""
    parser.add_argument("--model", default=DEMO, help="folder or name of the model")
    parser.add_argument("--data", nargs="*", default=[], help=".jsonl or .txt files of prompts, each a kind")
    parser.add_argument("--prompts", type=int, default=prompts, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    parser.add_argument("--threads", type=int, default=1)


# Tables --------------------------------------------------------------------------------------------------------------


def print_head(device: str = "cpu", *about: str) -> None:
    """Prints the machine, the conditions and the command of a figure."""
    print("; ".join([machine(torch.device(device)), *about]))
    print(f"\n`python {' '.join(sys.argv)}`\n", flush=True)


def print_table_head(*names: str) -> None:
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|", flush=True)


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


# Peak memory ---------------------------------------------------------------------------------------------------------


def peak_mib(device: torch.device) -> float:
    """Peak of the allocated memory on a GPU, of the resident memory of this process on a CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # ``ru_maxrss`` starts with the size of the parent process on Linux, so the kernel's status file is read there.
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    if found is not None:
        return int(found[1]) / 2**10
    import resource  # not all systems have it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def peak_of(variant: str, *words: str) -> float:
    """Runs the same script for one variant in a process of its own, as peaks never fall; it prints one number."""
    command = [sys.executable, *sys.argv, *words, "--peak-of", variant]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])
