"""What forwards that become graphs keep to: few sizes, memory that stays where it is, and no numbers that change."""

import itertools
import math
from collections.abc import Hashable
from typing import Any, NoReturn

import torch

from ..patching import PerThread

# Sizes of forwards in tokens; other numbers are padded to the next size.
SIZES = (1, 2, 4, 8, 16, 32)
# Of these there are few where further tokens cost next to nothing: each is a capture, and forwards before it.
_FEW = (1, 8, 32)
# Capacities are powers of two up to 4,096 slots, then multiples of that, and above 65,536 an eighth more at each step.
# Attention over 4,096 empty slots reads 0.5 GiB for nothing in an 8B model (32 layers, 8 heads of 128, bfloat16;
# computed).
_FEWEST_SLOTS, _STEP, _LEAST_SHARE = 128, 4096, 8

capturing = PerThread[bool]()  # whether this thread runs a forward to capture its kernels


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
    tokens cost as much as one."""
    return next((size for size in SIZES if size >= count and (size in _FEW or size > cheap)), None)


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
        self.graphs: dict[Hashable, Any] = {}
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
