"""Peak memory of one way on a CPU, in a process of its own: ``python -m hf_selfspec.bench.comparison.memory``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...notices import warn_once
from ..resident import peak_resident_bytes
from .ablations import changed
from .calls import Caller
from .prompts import Batch
from .ways import Way, methods_of, ways_of

# The peak bytes of a way on a batch with given arguments of generate; ``None`` where this could not be measured.
Peaks = Callable[[Way, Batch, Mapping[str, Any]], int | None]


def peaks(model: str, dtype: str, without: Sequence[str] = (), free_verification: bool = False) -> Peaks:
    """Returns what measures the peak memory of a process with the named model and one way, weights included.

    Args:
        model, dtype: see :class:`NamedModel`.
        without, free_verification: see :func:`changed`.
    """

    def peak(way: Way, batch: Batch, options: Mapping[str, Any]) -> int | None:
        job = {
            "model": model,
            "dtype": dtype,
            "way": way.name,
            "ids": batch.ids.tolist(),
            "mask": batch.mask.tolist(),
            "options": options,
            "threads": torch.get_num_threads(),
            "changed": [list(without), free_verification],
        }
        command = [sys.executable, "-m", "hf_selfspec.bench.comparison.memory"]
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout:
            return int(done.stdout.split()[-1])
        why = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
        warn_once(f"peak memory of {way.name} was not measured ({why}). The same command tries again.")
        return None

    return peak


def _main() -> None:
    """Reads what to measure from stdin, and writes the bytes to stdout."""
    from ...loading import NamedModel

    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = NamedModel.find(job["model"]).model(job["dtype"])
    way = ways_of(methods_of([job["way"]]))[-1]
    batch = Batch("", *(torch.tensor(job[name], device="cpu") for name in ("ids", "mask")))
    options = job["options"]
    caller = Caller(model, 0, batch.ids.shape[1] + options["max_new_tokens"])
    with changed(*job["changed"]):
        caller.call(way, batch, (0, 0, 0), options, None if way.make is None else way.make())
    sys.stdout.write(f"{peak_resident_bytes()}\n")


if __name__ == "__main__":
    _main()
