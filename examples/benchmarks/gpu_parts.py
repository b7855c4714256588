"""The parts of ``gpu.py``: what each of its processes runs on the device, case by case."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from random import Random
from statistics import median
from threading import Lock
from time import perf_counter, time
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from known_text import KnownText
from torch.autograd import DeviceType

from hf_selfspec import SelfSpec, __version__

ROOT = Path(__file__).parents[2]
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
SHAPES = {
    "135m": (576, 30, 1536, 49152, 9, 3),  # SmolLM2
    "1b": (2048, 22, 5632, 32000, 32, 4),  # TinyLlama, of the soak, too
    "8b": (4096, 32, 14336, 128256, 32, 8),  # Llama 3.1
    "small": (64, 2, 128, 1024, 4, 2),
}
# Tokens in a row of what follows that prompts have: free drafts find nothing, about three tokens a round, and many.
REPEATED = (0, 3, 8)
# How often a probe runs; seconds of a soak, whose prompts have so many lengths in turn, and how much memory in use may
# grow once each of these has come twice.
PROBES, SOAK, LENGTHS, GROWTH = 50, 60.0, 6, 1.02
# Distance of logits from plain's, in the static cache's (3 layers of width 256 behind 512 tokens: a lost key is 4).
ROUNDING = 3.0
STATIC = {"cache_implementation": "static"}  # which transformers compiles on a GPU
Cases = dict[str, Callable[[], None]]


class Bench:
    """The cases of one part on a device; ``tell`` takes lines as keyword arguments, until a time since the epoch."""

    def __init__(self, part: str, device: str, is_small: bool) -> None:
        torch.set_num_threads(1)
        self.part, self.device, self.is_small = part, torch.device(device), is_small
        self.is_cuda = self.device.type == "cuda"
        # New tokens of a call, and calls with each kind of text, of which the first ones capture and learn.
        self.new, self.calls = (8, 2) if is_small else (128, 3)
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else device
        self.machine = f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {__version__}"
        self.cases, self.specs = PARTS[part](self), {repeated: SelfSpec() for repeated in REPEATED}
        self.four_bits = SelfSpec.quantized()

    def now(self) -> float:
        """Seconds, once the device has done the work of this thread; while others capture, nobody may wait for all."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()
        return perf_counter()

    def mib(self) -> int:
        """Memory of the device in use, by whatever."""
        free, total = torch.cuda.mem_get_info() if self.is_cuda else (0, 0)
        return (total - free) >> 20

    @cached_property
    def known(self) -> KnownText:
        """The model of this part."""
        shape = SHAPES["small" if self.is_small else {"soak": "1b"}.get(self.part, self.part)]
        return KnownText(self.device, **dict(zip((*SIZES, "num_key_value_heads"), shape, strict=True)))

    def generated(self, texts: Any, **options: Any) -> dict[str, Any]:
        """Figures of a call whose text has to be the known one."""
        (prompt, expected), times, begun = texts, list[float](), self.now()
        watch: dict[str, Any] = {"put": lambda tokens: times.append(perf_counter()), "end": lambda: None}
        streamer = SimpleNamespace(**watch, is_stateless=True)
        options = {"do_sample": False, "max_new_tokens": expected.shape[1], "streamer": streamer, **options}
        ids = self.known.model.generate(**prompt, **options)[:, prompt["input_ids"].shape[1] :]
        ended = self.now()
        torch.testing.assert_close(ids, expected, msg=lambda why: f"this is not the known text: {why}")
        # The first time is that of the prompt, the second one of the first token.
        ms = 1e3 * (ended - times[1]) / (expected.shape[1] - 1)
        figures: dict[str, Any] = {"ms": round(ms, 3), "seconds": round(ended - begun, 3), "mib": self.mib()}
        if spec := options.get("assistant"):
            seconds, rounds = pairwise(seconds for _, seconds in spec.stats.timeline), defaultdict(list)
            for (nodes, _), (begin, end) in zip(spec.stats.round_sizes[1:], seconds, strict=False):
                rounds[nodes].append(1e3 * (end - begin))
            figures["m"] = round(spec.stats.mean_generated_length, 2)
            figures["ms_by_nodes"] = {nodes: round(median(ms), 2) for nodes, ms in sorted(rounds.items())}
        return figures


def probe(bench: Bench) -> Cases:
    """Microseconds of what has nothing to do with this package: of the host, and until the device has done it."""
    here, numbers = torch.zeros(1, device=bench.device).add_(1), torch.arange(64)
    large, other = (torch.zeros(1 << (20 if bench.is_small else 28), device=bench.device) for _ in range(2))

    def timed(run: Callable[[], object]) -> None:
        for _ in range(2):
            begun = bench.now()
            for _ in range(PROBES):
                run()
            seconds = {"host": perf_counter() - begun, "done": bench.now() - begun}
        bench.tell(**{f"{name}_us": round(1e6 * each / PROBES, 2) for name, each in seconds.items()})

    def replay(kernels: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            for _ in range(kernels):
                here.add_(1)
            graph.capture_end()
        timed(graph.replay)

    cases: Cases = {"launch": partial(timed, partial(here.add_, 1)), "read": partial(timed, here.item)}
    cases[f"copy of {large.nbytes >> 20} MiB"] = partial(timed, partial(other.copy_, large))
    if bench.is_cuda:
        cases["upload"] = partial(timed, lambda: numbers.pin_memory().to(bench.device, non_blocking=True))
        cases["event"] = partial(timed, bench.now)
        cases |= {f"{kernels} kernels": partial(replay, kernels) for kernels in (500, 1300)}
    return cases


def ids(bench: Bench) -> Cases:
    """The tests that need a GPU, and ids of tiny models of many types."""
    from gpu_ids import near_ties_of, types

    names, tokens = (["lfm2", "idefics3"], 5) if bench.is_small else (types(), 40)
    of_types = {
        name: lambda name=name: bench.tell(near_ties=near_ties_of(name, bench.device, tokens)) for name in names
    }
    return {"tests": partial(tests, bench), **of_types}


def tests(bench: Bench) -> None:
    """The tests that need a GPU; ``log.txt`` has what they print."""
    words = ["-m", "pytest", "-vv", "-m", "cuda", "-p", "no:cacheprovider", "tests/model/test_on_cuda.py"]
    words += ["-n", "6"] if find_spec("xdist") and not bench.is_small else []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process, lines = subprocess.Popen([sys.executable, *words], cwd=ROOT, **pipes), [""]
    for line in process.stdout or ():
        print(line, end="", flush=True)
        lines.append(line.strip("= \n"))
    bench.tell(tests=lines[-1])
    if process.wait():
        raise RuntimeError("; ".join(line for line in lines if line.startswith(("FAILED ", "ERROR "))) or lines[-1])


def models(bench: Bench) -> Cases:
    """What a token takes."""
    widths, rows = ((1024, 8192), (1, 8)) if bench.part == "8b" else ((1024,), (1,))
    shapes = product((64,), (1, 2)[: len(rows)]) if bench.is_small else product(widths, rows)
    return {f"{width} x {count}": partial(speed, bench, width, count) for width, count in shapes}


def speed(bench: Bench, width: int, rows: int) -> None:
    """Calls of plain ``generate``, eager and with a compiled static cache, and ours, in turn with other texts."""
    failed: dict[str, str] = {}

    def call(way: str, repeated: int, number: int, **options: Any) -> None:
        if way not in failed:
            texts = bench.known.prompt(rows, width, repeated, bench.new)
            try:
                figures = bench.generated(texts, **options)
                bench.tell(way=way, repeated=repeated, is_first=not number, **figures)
            except Exception as error:  # whatever it is, the other ways can still be timed
                failed[way] = f"{way}, {repeated} repeated, call {number}: {type(error).__name__}: {error}"

    bench.generated(bench.known.prompt(rows, width, 0, 4))  # warms up
    call("plain", 0, 1)
    for number in range(bench.calls - (width > 1024)):
        for repeated, spec in bench.specs.items():
            call("ours", repeated, number, assistant=spec)
        call("static", REPEATED[number], number, **STATIC)
        if bench.part == "8b" and rows == 1 and width <= 1024:  # weights in four bits are a third to read
            call("four bits", 0, number, assistant=bench.four_bits)
    if failed:
        raise RuntimeError("; ".join(failed.values()))
    # How far logits are from plain's at most, in their standard deviations: both ways round in their own manner.
    (prompt, _), new = bench.known.prompt(rows, width, REPEATED[-1], bench.new), bench.new // 8 + 1
    wanted = {"do_sample": False, "max_new_tokens": new, "return_dict_in_generate": True, "output_logits": True}
    outputs = [bench.known.model.generate(**prompt, **wanted, **way) for way in ({}, STATIC, {"assistant": SelfSpec()})]
    plain, *others = (torch.stack(output.logits).float() for output in outputs)
    static, ours = (float((logits - plain).abs().max() / plain.std()) for logits in others)
    bench.tell(logits_static=static, logits_ours=ours)
    for way, options in (("ours", {"assistant": SelfSpec()}), ("static", STATIC)):  # with a share of the prompt's
        with torch.profiler.profile() as profile:
            bench.generated(bench.known.prompt(rows, width, 0, new), **options)
        us = [event.time_range.elapsed_us() for event in profile.events() if event.device_type == DeviceType.CUDA]
        bench.tell(of=way, kernels_a_token=round(len(us) / new), us_a_token=round(sum(us) / new))
    if ours > ROUNDING * static and not bench.is_small:  # whose kernels are a CPU's
        raise ValueError(f"logits are {ours} standard deviations off, those of the static cache {static}")


def soak(bench: Bench) -> None:
    """Calls of two threads, each on a stream of its own; what the second one draws at its temperature is known, too."""
    ways: list[Any] = [{"assistant": SelfSpec()}, {"assistant": SelfSpec(), "do_sample": True, "temperature": 0.1}]
    streams = [torch.cuda.Stream() if bench.is_cuda else None for _ in ways]
    used, lock, pools = list[int](), Lock(), [ThreadPoolExecutor(1) for _ in ways]
    ends = min(bench.until - 5, time() + SOAK)

    def generated(number: int, rows: int, width: int) -> None:
        with torch.cuda.stream(streams[number]):
            with lock:
                texts = bench.known.prompt(rows, width, REPEATED[len(used) % 3], bench.new)
                bench.now()  # when the model is there, which the first thread makes, also for the other
            bench.generated(texts, **ways[number])

    while time() < ends and not (bench.is_small and len(used) > 2 * LENGTHS):
        random, longest = Random(len(used) % LENGTHS), 200 if bench.is_small else 6000
        shapes = [(random.choice((1, 8)), random.randint(100, longest)) for _ in ways]
        calls = [pool.submit(generated, number, *shapes[number]) for number, pool in enumerate(pools)]
        for call in calls:
            call.result()
        if bench.is_cuda:
            torch._C._cuda_clearCublasWorkspaces()  # as torch's compiler does
        used.append(bench.mib())
        bench.tell(turn=len(used), shapes=shapes, mib=used[-1])
    if len(used) <= 2 * LENGTHS or max(used[2 * LENGTHS :]) > GROWTH * max(used[: 2 * LENGTHS]):
        raise ValueError(f"memory in use has grown, or there was no time to see that: {used} MiB")


PARTS: dict[str, Callable[[Bench], Cases]] = {"probe": probe, "ids": ids, "135m": models, "1b": models, "8b": models}
PARTS["soak"] = lambda bench: {"two threads": partial(soak, bench)}
