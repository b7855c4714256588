"""The memory of keys and values, which stays where it is from one generation to the next: graphs write to addresses."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

# Generations of a model that have such memory at the same time. Each graph is recorded once for each of them.
_PLACES = 2


class Place:
    """The memory of one generation at a time.

    A CUDA graph has to be recorded anew for other addresses, so buffers of one name and shape are always at the same
    one: at the beginning of the smallest piece of memory that they fit into. Only a buffer that is larger than all
    before makes a new piece, and older ones stay as long as they are together no larger than that.
    """

    def __init__(self) -> None:
        self._pieces: dict[Hashable, list[torch.Tensor]] = {}  # from small to large

    def buffer(self, name: Hashable, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Returns a buffer of zeros, of which the generation uses only the last one of a name."""
        pieces, size = self._pieces.setdefault((name, like.dtype, like.device), []), math.prod(shape)
        piece = next((piece for piece in pieces if len(piece) >= size), None)
        if piece is None:
            while sum(map(len, pieces)) > size:
                del pieces[0]
            with torch.inference_mode(False):  # other calls could not write to an inference tensor
                piece = torch.empty(size, dtype=like.dtype, device=like.device)
            pieces.append(piece)
        buffer = piece[:size].view(shape).zero_()
        if buffer.is_cuda:
            torch._dynamo.mark_static_address(buffer)
        return buffer


class Places:
    """The memory of all generations of a model with graphs."""

    def __init__(self) -> None:
        self._free = [Place() for _ in range(_PLACES)]  # threads append and pop, which is atomic

    def take(self) -> Place | None:
        """Returns the memory for a generation, ``None`` while others use all there is."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def leave(self, place: Place) -> None:
        """Ends the use of ``place``; the next generation gets the one that was left last."""
        self._free.append(place)
