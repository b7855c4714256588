"""Kernels of a forward that CUDA has captured, to be run again by one launch.

Kernels keep the addresses that they were captured with. Inputs, results and what is between have memory of the graphs'
own. A library's scratch memory belongs to a stream: torch allocates it when the library first works there, and frees it
when, say, its compiler captures something; a graph that was captured with such memory would then write to that of
others (an 8B model on an H200 ended so, by an illegal access after a static cache was compiled in the process). So
warm-ups run on the caller's stream and captures on one where nothing else runs, and such memory is the graphs' as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..forks import new_lock
from .traceable import capturing

# Forwards before a capture, in which libraries choose their kernels.
_WARM_UPS = 2

Run = Callable[..., Sequence[torch.Tensor]]

# Held while numbers are drawn, and while a device's generator is another one, see :func:`_with_own_generator`.
drawing = new_lock()
# Streams on which something was captured. Torch gives out 32 of a priority in turn.
_taken = set[int]()


class Shared:
    """What captured forwards of a model share: memory, which each of them overwrites, so that one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.pool, self.lock = torch.cuda.graph_pool_handle(), new_lock()
        self.captures = torch.cuda.Stream(device, priority=-1)  # which others hardly use
        if self.captures.cuda_stream in _taken:
            torch._C._cuda_clearCublasWorkspaces()  # of other graphs, which keep the memory itself
        _taken.add(self.captures.cuda_stream)
        self.stream: Any = None  # the one of the last run

    @contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        with self.lock:
            stream = torch.cuda.current_stream(device)
            if self.stream is not None and self.stream != stream:  # of another thread
                stream.wait_stream(self.stream)
            self.stream = stream
            yield


class Captured:
    """The kernels of a forward, which read its inputs from memory of their own, and all of which one launch runs."""

    def __init__(self, function: Run, inputs: Sequence[torch.Tensor], fixed: int, shared: Shared) -> None:
        self._shared, self._device, self._graph = shared, inputs[0].device, torch.cuda.CUDAGraph()
        changing, buffers = inputs[: len(inputs) - fixed], inputs[len(inputs) - fixed :]
        with shared.alone(self._device), capturing.during(True):
            for _ in range(_WARM_UPS):
                function(*inputs)
            with self._capture():
                self._inputs = [torch.empty_like(value) for value in changing]
                self._results = function(*self._inputs, *buffers)

    @contextmanager
    def _capture(self) -> Iterator[None]:
        """In which work of other threads goes on, and is no part of it."""
        torch.cuda.synchronize(self._device)  # as ``torch.cuda.graph`` does, so that memory is free for the graph
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._shared.captures):
            with _with_own_generator(self._device):
                self._graph.capture_begin(self._shared.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                self._graph.capture_end()

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with self._shared.alone(self._device):
            for memory, value in zip(self._inputs, inputs, strict=False):
                memory.copy_(value)
            self._graph.replay()
            return [value.clone() for value in self._results]


@contextmanager
def _with_own_generator(device: torch.device) -> Iterator[None]:
    """Begins a capture, of which torch (2.11; 2.13 no longer) makes the device's generator of random numbers a part,
    with another one. Else draws and replays of all other threads would raise an error until it ends, and those of all
    threads after a capture that failed. Draws that are not ours can meet that one now, for some microseconds."""
    default = torch.cuda.default_generators[device.index]
    usual, own = default.graphsafe_get_state(), default.clone_state()
    own.seed()
    with drawing:
        default.graphsafe_set_state(own)
        try:
            yield
        finally:
            default.graphsafe_set_state(usual)


def reserved_bytes(device: torch.device) -> int:
    """Returns what torch has taken of a GPU's memory, 0 elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
