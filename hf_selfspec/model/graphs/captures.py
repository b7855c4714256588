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
from .shapes import capturing

# Forwards before a capture, in which libraries choose their kernels.
_WARM_UPS = 2

Run = Callable[..., Sequence[torch.Tensor]]

# Held while numbers are drawn, and while a device has another generator of them.
drawing = new_lock()
# Streams on which something was captured. Torch gives out 32 of a priority in turn.
_taken = set[int]()


class CapturePool:
    """What captured forwards of a model share: memory, which each of them overwrites, so that one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.handle, self.lock = torch.cuda.graph_pool_handle(), new_lock()
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

    def __init__(self, function: Run, inputs: Sequence[torch.Tensor], pool: CapturePool) -> None:
        self._pool, self._device, self._graph = pool, inputs[0].device, torch.cuda.CUDAGraph()
        with pool.alone(self._device), capturing.during(True):
            for _ in range(_WARM_UPS):
                function(*inputs)
            torch.cuda.empty_cache()  # which is not done while something is captured
            with torch.cuda.stream(pool.captures):
                self._begin()
                try:
                    self._inputs = [torch.empty_like(value) for value in inputs]
                    self._results = function(*self._inputs)
                finally:
                    self._graph.capture_end()

    def _begin(self) -> None:
        """Begins a capture in which work of other threads goes on, and is no part of it. Torch (2.11; 2.13 no longer)
        makes the device's generator of random numbers a part, and until the end, or for good after an error, draws and
        replays of others raise. So another one takes its place meanwhile, which only draws that are not ours can meet.
        """
        device = torch.cuda.default_generators[self._device.index]
        usual, own = device.graphsafe_get_state(), device.clone_state()
        own.seed()
        with drawing:
            device.graphsafe_set_state(own)
            try:
                self._graph.capture_begin(self._pool.handle, capture_error_mode="thread_local")
            finally:
                device.graphsafe_set_state(usual)

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with self._pool.alone(self._device):
            for memory, value in zip(self._inputs, inputs, strict=True):
                memory.copy_(value)
            self._graph.replay()
            return [value.clone() for value in self._results]
