"""Kernels of a forward that CUDA has captured, to be run again by one launch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..forks import new_lock
from .traceable import capturing

# Forwards before a capture, in which libraries choose their kernels.
_WARM_UPS = 2

Run = Callable[..., Sequence[torch.Tensor]]


class Shared:
    """What captured forwards of a model share: memory, which each of them overwrites, so that one runs at a time."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.lock = pool, new_lock()
        self.stream: Any = None  # the one of the last run

    @contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        with self.lock:
            stream, before = torch.cuda.current_stream(device), self.stream
            if before is not None and before != stream:  # of another thread
                stream.wait_stream(before)
            self.stream = stream
            yield


class Captured:
    """The kernels of a forward, which read its inputs from memory of their own, and all of which one launch runs."""

    def __init__(self, function: Run, inputs: Sequence[torch.Tensor], fixed: int, shared: Shared) -> None:
        self._shared, self._device, self._graph = shared, inputs[0].device, torch.cuda.CUDAGraph()
        changing, rest = inputs[: len(inputs) - fixed], inputs[len(inputs) - fixed :]
        stream = torch.cuda.Stream(self._device)
        with shared.alone(self._device), capturing.during(True):
            self._inputs = [value.clone() for value in changing]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        function(*self._inputs, *rest)
            finally:  # whatever has failed, kernels of its first part read the inputs, whose memory others get next
                torch.cuda.current_stream(self._device).wait_stream(stream)
            try:
                with self._capture(self._graph, stream):
                    self._results = function(*self._inputs, *rest)
            except Exception:  # whatever it is, it goes on to the caller
                # One that is completed, since torch's generator of random numbers waits for the end of the other.
                shared.pool = torch.cuda.graph_pool_handle()  # the other one may be closed with the capture
                with suppress(RuntimeError), self._capture(torch.cuda.CUDAGraph(), stream):
                    self._inputs[0].clone()
                raise

    @contextmanager
    def _capture(self, graph: Any, stream: Any) -> Iterator[None]:
        """In which work of other threads goes on, and is no part of it."""
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),  # to which torch does not return after an error
            torch.cuda.graph(graph, pool=self._shared.pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with self._shared.alone(self._device):
            for mine, value in zip(self._inputs, inputs, strict=False):
                mine.copy_(value)
            self._graph.replay()
            return [value.clone() for value in self._results]


def reserved_bytes(device: torch.device) -> int:
    """Returns what torch has taken of a GPU's memory, 0 elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
