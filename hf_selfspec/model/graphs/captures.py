"""Kernels of a forward that CUDA has captured, to be run again by one launch, and what such forwards keep to: few
sizes, memory that stays where it is, and no numbers that change.

Kernels keep the addresses that they were captured with. Inputs, results and what is between have memory of the graphs'
own. A library's scratch memory belongs to a stream: torch allocates it when the library first works there, and frees it
when, say, its compiler captures something; a graph that was captured with such memory would then write to that of
others (an 8B model on an H200 ended so, by an illegal access after a static cache was compiled in the process). So
warm-ups run on the caller's stream and captures on one where nothing else runs, and such memory is the graphs' as well.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ..forks import new_lock
from ..patching import PerThread
from ..transfer import Pending, Sent, in_bytes

# Sizes of forwards in tokens; other numbers are padded to the next size.
SIZES = (1, 2, 4, 8, 16, 32)
# Of these there are few where further tokens cost next to nothing: each is a capture, and forwards beside it.
_FEW = (1, 8, 32)
# Capacities are powers of two up to 4,096 slots, then multiples of that, and above 65,536 an eighth more at each step.
# Attention over 4,096 empty slots reads 0.5 GiB for nothing in an 8B model (32 layers, 8 heads of 128, bfloat16;
# computed).
_FEWEST_SLOTS, _STEP, _LEAST_SHARE = 128, 4096, 8

# Returns tensors, one :class:`Pending` among them at most, and ``None``.
Run = Callable[..., Sequence[Any]]

# Held while numbers are drawn, and while a device has another generator of them.
drawing = new_lock()
# Streams on which something was captured. Torch gives out 32 of a priority in turn.
_taken = set[int]()
# In a thread that runs a forward to capture its kernels: which leaves of the graph are kernels of ours.
capturing = PerThread[dict[Hashable, Any]]()


class NoGraphError(RuntimeError):
    """A forward of this shape is better without a graph; others can be graphs."""


class ChangingNumber:
    """A number that a graph must not hold: whatever is computed with it ends the capture."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("the forward computes with the number of tokens in the cache")

    __eq__ = __ne__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __mod__ = __truediv__ = __int__ = __index__ = __float__ = __bool__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = object.__hash__


def size_for(count: int, cheap: int = 0) -> int | None:
    """Returns the smallest size of a forward that fits ``count`` tokens, ``None`` if they are too many; up to ``cheap``
    tokens cost as much as one, so that of the smaller sizes only some and the largest are there."""
    return next((size for size in SIZES if size >= count and (size in _FEW or 2 * size > cheap)), None)


def step_above(slots: int) -> int:
    """Returns the smallest capacity that is at least ``slots``: few capacities make few shapes."""
    power = 1 << (slots - 1).bit_length()
    step = max(_STEP, power // 2 // _LEAST_SHARE)
    return max(_FEWEST_SLOTS, power) if power <= _STEP else -(-slots // step) * step


class BufferPool:
    """Memory for one generation at a time, in which buffers of one name and shape have the same address each time, and
    the graphs that were captured with these addresses."""

    def __init__(self) -> None:
        self._pieces: dict[Hashable, list[torch.Tensor]] = {}  # from small to large
        self.graphs: dict[Any, Any] = {}  # the one that was used last at the end
        self._left: Any = None  # the moment at which the last generation's work there is done

    @property
    def bytes(self) -> int:
        return sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)

    def take(self, device: torch.device) -> None:
        """Lets this thread's work begin after the last generation's, which may be that of another stream."""
        if self._left is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._left)
            for piece in itertools.chain(*self._pieces.values()):
                piece.record_stream(stream)  # else torch could give it away too early

    def leave(self, device: torch.device) -> None:
        """Ends a generation."""
        self._left = torch.cuda.current_stream(device).record_event()

    def clear(self) -> None:
        """Frees the memory."""
        self._pieces.clear()
        self.graphs.clear()

    def buffer(self, name: Hashable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Returns a buffer of zeros, of which the generation uses only the last one of a name."""
        pieces, size = self._pieces.setdefault((name, like.dtype, like.device), []), math.prod(shape)
        piece = next((piece for piece in pieces if len(piece) >= size), None)
        if piece is None:
            while sum(map(len, pieces)) > size:
                del pieces[0]
                self.graphs.clear()
            with torch.inference_mode(False):  # other calls could not write to an inference tensor
                piece = torch.empty(size, dtype=like.dtype, device=like.device)
            pieces.append(piece)
        return piece[:size].view(shape).zero_()


class CapturePool:
    """What captured forwards of a model share: memory, which each of them overwrites, so that one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.handle, self.lock, self.device = torch.cuda.graph_pool_handle(), new_lock(), device
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
    """The kernels of a forward, which has run before, so that libraries have chosen them and have their memory. They
    read its inputs from memory of their own, and one launch runs all of them."""

    def __init__(self, function: Run, inputs: Sequence[torch.Tensor], pool: CapturePool) -> None:
        self._pool, self._device, self._graph = pool, pool.device, torch.cuda.CUDAGraph()
        self._packed: Any = None  # what the host gets, as bytes, and its place there, of pinned memory
        self._on_host: Any = None
        self._sent: Sent | None = None
        with pool.alone(self._device):
            with torch.cuda.stream(pool.captures):
                self._begin()
                try:
                    self._inputs = [torch.empty_like(value) for value in inputs]
                    self._results = function(*self._inputs)
                    for pending in (result for result in self._results if isinstance(result, Pending)):
                        self._packed = in_bytes(pending.tensors)
                finally:
                    self._graph.capture_end()
            if self._packed is not None:
                self._on_host = torch.empty(self._packed.shape, dtype=torch.uint8, device="cpu", pin_memory=True)

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

    def __call__(self, *inputs: torch.Tensor, needed: Sequence[bool] | None = None) -> list[Any]:
        """The results, those that are ``needed``, ``None`` in the place of others; inputs may be on the host."""
        if self._sent is not None:
            self._sent.arrays  # noqa: B018 (reads them, if nobody has, before others take their place)
        with self._pool.alone(self._device):
            for memory, value in zip(self._inputs, inputs, strict=True):
                memory.copy_(value, non_blocking=True)
            self._graph.replay()
            kept = zip(self._results, needed or [True] * len(self._results), strict=True)
            return [self._kept(result) if is_kept else None for result, is_kept in kept]

    def _kept(self, result: Any) -> Any:
        """A result apart from the graph's memory, to which others may write next."""
        if not isinstance(result, Pending):
            return None if result is None else result.clone()
        self._on_host.copy_(self._packed, non_blocking=True)
        self._sent = Sent(self._on_host, result.tensors, self._device)
        return self._sent
