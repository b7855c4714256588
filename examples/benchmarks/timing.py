"""What the scripts of this folder share: options, prompts, calls timed in turn, peak memory, Markdown tables."""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_selfspec import GenerationStats, SelfSpec
from hf_selfspec.model.transfer import wait_for
from hf_selfspec.tools.compare import machine

DEMO = str(Path(__file__).parent.parent / "demo_model")
# Tokens of a text that are the prompt of a trained model.
PROMPT = 64
# What the numbers that several scripts take stand for.
HELP = {"tokens": "new tokens", "prompt": "tokens of a prompt", "rows": "batch size", "repeats": "timings of each way"}
Name = TypeVar("Name", bound=Hashable)


def parser_with(description: str | None, **numbers: int | list[int]) -> argparse.ArgumentParser:
    """A parser with an option for each number, whose default it is; for a list the option takes several."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_numbers(parser, **numbers)
    return parser


def add_numbers(parser: argparse.ArgumentParser, **numbers: int | list[int]) -> None:
    for name, number in numbers.items():
        several: dict[str, Any] = {"nargs": "+"} if isinstance(number, list) else {}
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=number, help=HELP.get(name), **several)


def add_trained(parser: argparse.ArgumentParser, prompts: int) -> None:
    """Options of figures on a trained model."""
    parser.add_argument("--model", default=DEMO, help="folder or name of the model")
    parser.add_argument("--data", nargs="*", default=[], help=".jsonl or .txt files of prompts, each a kind")
    parser.add_argument("--prompts", type=int, default=prompts, help="prompts of each kind")
    add_numbers(parser, tokens=128, threads=1)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line's options; from here on torch has the number of threads that they say."""
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def now(device: torch.device) -> float:
    """Seconds, once the device has done its work: CPU time of one thread on a CPU, otherwise wall time."""
    wait_for(device)
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if is_alone else time.perf_counter()


def medians(
    runs: Mapping[Name, Callable[[], object]],
    repeats: int,
    device: torch.device,
    context: Callable[[Name], AbstractContextManager[object]] = lambda name: nullcontext(),
) -> dict[Name, float]:
    """Median seconds of functions that are called in turn, each in its context; the first of all turns warms up."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(1 + repeats):
        for name, run in runs.items():
            with context(name):
                begun = now(device)
                run()
                seconds[name].append(now(device) - begun)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


@dataclass
class Sample:
    """One timed generation: seconds from the first token to the last, tokens of a row after the first, and the rest."""

    decode: float
    steps: int
    ids: torch.Tensor
    stats: GenerationStats | None = None

    @property
    def per_token(self) -> float:
        return self.decode / max(self.steps, 1)


@dataclass
class Timings:
    """The samples of one way."""

    samples: list[Sample] = field(default_factory=list)

    def median(self) -> float:
        """Seconds a token."""
        return statistics.median(sample.per_token for sample in self.samples)


class _Clock(BaseStreamer):
    """Records when tokens came."""

    is_stateless = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(now(self.device))

    def end(self) -> None:
        pass


def timed_generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> Sample:
    """Calls ``generate`` once and times what follows the first token."""
    clock = _Clock(model.device)
    ids = model.generate(**inputs, streamer=clock, **options)
    # The first call of `put` is for the prompt.
    spec = options.get("assistant")
    return Sample(now(model.device) - clock.times[1], len(clock.times) - 2, ids, spec.stats if spec else None)


def interleave(ways: dict[str, Callable[[], Sample]], repeats: int, warmup: int = 1) -> dict[str, Timings]:
    """Calls the functions in turn, ``repeats`` times each, after ``warmup`` calls that do not count."""
    timings = {name: Timings() for name in ways}
    for turn in range(warmup + repeats):
        for name, run in ways.items():
            sample = run()
            if turn >= warmup:
                timings[name].samples.append(sample)
    return timings


@dataclass
class Speed:
    """One way over many prompts: medians of seconds, new tokens, statistics, and whether ids are the first way's."""

    seconds: list[float] = field(default_factory=list)
    ids: list[torch.Tensor] = field(default_factory=list)
    runs: list[GenerationStats] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(ids.shape[1] for ids in self.ids)

    @property
    def ms(self) -> float:
        """Milliseconds per token over all prompts."""
        return 1e3 * sum(self.seconds) / self.tokens

    @property
    def alpha(self) -> float:
        drafted = sum(run.drafted for run in self.runs)
        return sum(run.accepted for run in self.runs) / drafted if drafted else 0.0

    @property
    def length(self) -> float:
        """Tokens of a round."""
        rounds = sum(run.rounds for run in self.runs)
        return sum(run.tokens - len(run.from_draft) for run in self.runs) / rounds if rounds else 1.0


Way = Callable[[torch.Tensor], tuple[torch.Tensor, GenerationStats | None]] | SelfSpec | dict[str, Any]


def compare(
    model: PreTrainedModel,
    ways: Mapping[Name, Way],
    prompts: Sequence[torch.Tensor],
    options: dict[str, Any],
    repeats: int = 1,
    warm_up: Sequence[torch.Tensor] | None = None,
) -> dict[Name, Speed]:
    """Times all ways on all prompts ``[1, s]``, in rotating order, each prompt ``repeats`` times.

    A way is a ``SelfSpec``, further arguments of ``generate`` (none for plain), or a function of a prompt. Prompts of
    ``warm_up``, by default the first one, come before and do not count.
    """
    names, speeds = list(ways), {name: Speed() for name in ways}

    def run(way: Way, ids: torch.Tensor) -> tuple[torch.Tensor, GenerationStats | None]:
        if callable(way) and not isinstance(way, SelfSpec):
            return way(ids)
        further = {"assistant": way} if isinstance(way, SelfSpec) else way
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **further)
        return output, way.stats if isinstance(way, SelfSpec) else None

    for ids in prompts[:1] if warm_up is None else warm_up:
        for way in ways.values():
            run(way, ids)
    for number, ids in enumerate(prompts):
        seconds: dict[Name, list[float]] = {name: [] for name in ways}
        for turn in range(repeats):
            first = (number + turn) % len(names)
            for name in (*names[first:], *names[:first]):
                torch.manual_seed(turn)
                begun = now(ids.device)
                output, stats = run(ways[name], ids)
                seconds[name].append(now(ids.device) - begun)
                if turn == repeats - 1:
                    speeds[name].ids.append(output[:, ids.shape[1] :])
                    speeds[name].runs += [] if stats is None else [stats]
        for name, speed in speeds.items():
            speed.seconds.append(statistics.median(seconds[name]))
            speed.same.append(torch.equal(speed.ids[-1], speeds[names[0]].ids[-1]))
    return speeds


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model in float32 on the CPU; it never ends a text early, so that all runs have as many tokens."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(name)


def prompts_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, count: int) -> list[torch.Tensor]:
    """The first 64 tokens, ``[1, 64]``, of ``count`` texts that have at least as many."""
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"][:PROMPT] for text in texts)
    prompts = [torch.tensor([ids]) for ids in islice((ids for ids in encoded if len(ids) == PROMPT), count)]
    if len(prompts) < count:
        sys.exit(f"{count} prompts of {PROMPT} tokens are needed, but texts have {len(prompts)}. Give fewer --prompts.")
    return prompts


def print_head(device: str = "cpu", *about: str) -> None:
    """Prints the machine, the conditions and the command of a figure."""
    print("; ".join([machine(torch.device(device)), *about]))
    print(f"\n`python {' '.join(sys.argv)}`\n", flush=True)


class Table:
    """A Markdown table that is printed row by row."""

    def __init__(self, *columns: str) -> None:
        self.row(*columns)
        print("|---" * len(columns) + "|", flush=True)

    def row(self, *cells: str) -> None:
        print(f"| {' | '.join(cells)} |", flush=True)


def peak_mib(device: torch.device) -> float:
    """Peak of the allocated memory on a GPU, of the resident memory of this process on a CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # ``ru_maxrss`` starts with the size of the parent process on Linux, so the kernel's status file is read there.
    status = Path("/proc/self/status")
    line = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    if line is not None:
        return int(line[1]) / 2**10
    import resource  # not all systems have it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def peak_of(variant: str, *words: str) -> float:
    """Runs the same script for one variant in a process of its own, as peaks never fall; it prints one number."""
    command = [sys.executable, *sys.argv, *words, "--peak-of", variant]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])
