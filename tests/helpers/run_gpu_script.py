"""Runs all parts of ``examples/benchmarks/gpu.py`` made small, on a pretended device, in this process."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import GenerationMixin

from helpers.pretend_cuda import here, pretended

sys.path.append(str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import gpu
import gpu_parts


def in_thread(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def run_here(thread: threading.Thread) -> None:
        with here():
            run(thread)

    return run_here


def main(out: Path) -> None:
    gpu_parts.LENGTHS = 2
    (out / "results.jsonl").touch()
    with ExitStack() as stack:
        stack.enter_context(pretended())
        for owner, name, value in (
            (threading.Thread, "run", in_thread(threading.Thread.run)),
            (torch.cuda, "get_device_name", lambda device=None: "pretended"),
            (torch._C, "_cuda_clearCublasWorkspaces", lambda: None),
            (GenerationMixin, "_valid_auto_compile_criteria", lambda *_: False),  # there are no kernels to compile
        ):
            stack.enter_context(patch.object(owner, name, value, create=True))
        for part in gpu.SECONDS:
            bench = gpu_parts.Bench(part, "cuda", is_small=True)
            if part == "ids":
                del bench.cases["tests"]  # of a process that would know nothing of this device
            gpu.run_cases(bench, out, time.time(), time.time() + 600)
    gpu.print_summary(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
