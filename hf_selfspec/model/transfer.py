"""Moves numbers between host and device in as few transfers as possible (on a GPU each can make the host wait), and
tells when a device has done its work."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from .forks import cached_property

# Devices whose events have times, with the interface of ``torch.cuda``.
TIMED = ("cuda",)

# The types of numbers that the host reads.
_NUMPY = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for dtype in (torch.int64, torch.float32, torch.bool)
}

# Seconds of the host's clock, or an event of a device.
Moment = Any


def upload(numbers: Sequence[Any] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Puts an array, or nested sequences of equal lengths, on a device, without waiting for a GPU's queue to empty."""
    return ready_for(device, numbers).to(device, non_blocking=device.type == "cuda")


def ready_for(device: torch.device, numbers: Sequence[Any] | np.ndarray) -> torch.Tensor:
    """Puts an array, or sequences, where a device can copy them from while the host goes on."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else torch.tensor(numbers, device="cpu")
    return tensor.pin_memory() if device.type == "cuda" else tensor


def wait_for(device: torch.device) -> None:
    """Waits until ``device`` has finished this thread's work: CUDA refuses to wait for all while a capture goes on."""
    if device.type in TIMED:
        torch.get_device_module(device).current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def moment(device: torch.device) -> Moment:
    """Returns now; on a GPU the moment at which it has done what it was handed so far. Nothing waits for that."""
    if device.type not in TIMED:
        return perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def seconds_between(begun: Moment, ended: Moment) -> float:
    """Returns the seconds between two moments; waits for the second one, unless the host has waited for later work."""
    if isinstance(begun, float):
        return float(ended - begun)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a device, or the host, has had no memory left; on a CPU only the message tells."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(re.search(r"out of memory|can't allocate memory", str(error)))


class Pending:
    """Tensors that the host will need: fetched together with others, see :func:`read`, or when they are first used."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        return _on_host(self.tensors)


class Sent(Pending):
    """Tensors that a device copies to the host, as :func:`in_bytes`, to ``memory`` where others will follow them."""

    def __init__(self, memory: torch.Tensor, like: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._memory, self._like, self._copied = memory, like, torch.get_device_module(device).Event()
        self._copied.record(torch.get_device_module(device).current_stream(device))

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        self._copied.synchronize()
        return _from_bytes(self._memory, self._like)


def send(*tensors: torch.Tensor) -> Pending:
    """Lets a GPU copy tensors, which the host will need after it has waited for later work."""
    device = tensors[0].device
    if device.type not in TIMED:
        return Pending(*tensors)
    packed = in_bytes(tensors)
    memory = torch.empty(packed.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
    return Sent(memory.copy_(packed, non_blocking=True), tensors, device)


def read(*tensors: torch.Tensor, along: Pending | None = None) -> list[Any]:
    """Returns integer, boolean and float32 tensors of one device as lists, copied together with those of ``along``."""
    arrays = _on_host(tensors if along is None else [*tensors, *along.tensors])
    if along is not None and along.tensors:
        along.arrays = arrays[len(tensors) :]
    return [array.tolist() for array in arrays[: len(tensors)]]


def in_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All numbers of tensors, one after another."""
    # Torch calls a single number contiguous whatever its stride is, and views none but 1 as bytes.
    flat = (tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in flat])


def _from_bytes(numbers: torch.Tensor, like: Sequence[torch.Tensor]) -> list[np.ndarray]:
    array, end, pieces = numbers.numpy(), 0, list[np.ndarray]()
    for tensor in like:
        begin, end = end, end + tensor.nbytes
        # A number starts at a multiple of its size.
        pieces.append(array[begin:end].copy().view(_NUMPY[tensor.dtype]).reshape(tensor.shape))
    return pieces


def _on_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    if len(tensors) < 2 or tensors[0].device.type == "cpu":
        return [tensor.cpu().numpy() for tensor in tensors]
    return _from_bytes(in_bytes(tensors).cpu(), tensors)


class RowNumbers(tuple[int, ...]):
    """A number for each row of a batch, on the host, and on a device as soon as it is needed there."""

    _make: Callable[[torch.device], torch.Tensor] | None = None

    @classmethod
    def of(cls, numbers: Sequence[int]) -> RowNumbers:
        """Returns ``RowNumbers`` as they are, and turns another sequence into them."""
        return numbers if isinstance(numbers, cls) else cls(numbers)

    @classmethod
    def made(cls, numbers: Sequence[int], make: Callable[[torch.device], torch.Tensor]) -> RowNumbers:
        """Numbers that need no upload, since ``make`` computes them on the device: ``[b, 1]``."""
        row_numbers = cls(numbers)
        row_numbers._make = make
        return row_numbers

    @cached_property
    def are_equal(self) -> bool:
        return min(self) == max(self)

    @cached_property
    def _tensors(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Gives them as a tensor ``[b, 1]``, which so needs no upload."""
        self._tensors[tensor.device] = tensor

    def ahead(self, count: int) -> RowNumbers:
        if not count:
            return self
        return RowNumbers.made([number + count for number in self], lambda device: self.on(device) + count)

    def plus(self, others: RowNumbers) -> RowNumbers:
        sums = [number + other for number, other in zip(self, others, strict=True)]
        return RowNumbers.made(sums, lambda device: self.on(device) + others.on(device))

    def minus(self, others: RowNumbers) -> RowNumbers:
        differences = [number - other for number, other in zip(self, others, strict=True)]
        return RowNumbers.made(differences, lambda device: self.on(device) - others.on(device))

    def of_rows(self, kept: Sequence[int]) -> RowNumbers:
        """The numbers of these rows."""
        return RowNumbers([self[row] for row in kept])

    def onwards(self, count: int, device: torch.device) -> torch.Tensor:
        """``count`` consecutive numbers from each row's on: ``[b, count]``, or ``[1, count]`` if all rows are equal."""
        if self.are_equal:
            return torch.arange(self[0], self[0] + count, device=device)[None]
        return self.on(device) + torch.arange(count, device=device)

    def on(self, device: torch.device) -> torch.Tensor:
        """The numbers as a tensor ``[b, 1]``, or ``[1, 1]`` if all are equal, which needs no upload."""
        if self.are_equal:
            return torch.full((1, 1), self[0], device=device)
        if device not in self._tensors:
            self._tensors[device] = upload(self, device)[:, None] if self._make is None else self._make(device)
        return self._tensors[device]


def at_places(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """The values ``[b, 1, n]`` at each row's place, of ``[b, s, n]``."""
    if min(places) >= values.shape[1] - 1:
        return values[:, -1:]
    index = RowNumbers.of(places).on(values.device)[:, :, None]
    return values.gather(1, index.expand(len(values), 1, values.shape[-1]))
