"""Forwards of fixed shape as compiled graphs.

Our own forward runs once under a tracer, with the rows' cursors as a tensor, keys and values written by index into
buffers of fixed capacity, and masks over all of it. What comes out is one graph of operations without any Python: plans
and hooks of a forward are constants of its graph. ``torch.compile`` makes a kernel sequence of it (a CUDA graph with
``mode="reduce-overhead"``).
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NoReturn

import torch
from transformers import CompileConfig, PreTrainedModel

from ..notices import warn_once

# Tokens in a forward; fewer are filled up.
SIZES = (1, 2, 4, 8, 16, 32)
# A graph is worth its compilation for what comes again and again.
_USES = 2

Run = Callable[..., Sequence[torch.Tensor]]


class _Current(threading.local):
    is_tracing: bool = False


_current = _Current()


def is_tracing() -> bool:
    """Whether this thread runs a forward to trace it, with tensors that have no values."""
    return _current.is_tracing


@contextmanager
def _tracing() -> Iterator[None]:
    _current.is_tracing = True
    try:
        yield
    finally:
        _current.is_tracing = False


class NotTraceableError(RuntimeError):
    """A forward reads a number that changes from round to round."""


class ChangingNumber:
    """A number that a graph must not hold: whatever is computed with it ends the trace."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NotTraceableError("the forward computes with the number of tokens in the cache")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __floordiv__ = __mod__ = __truediv__ = __int__ = __index__ = __float__ = __bool__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


class SpareBuffers:
    """The buffers of keys and values that the last generation has left.

    A CUDA graph writes where it was recorded, so the next generation has to have the same ones.
    """

    def __init__(self) -> None:
        self._spare: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A buffer of zeros."""
        with self._lock:
            for index, buffer in enumerate(self._spare):
                if (buffer.shape, buffer.dtype, buffer.device) == (shape, like.dtype, like.device):
                    return self._spare.pop(index).zero_()
        buffer = like.new_zeros(shape)
        if buffer.is_cuda:
            torch._dynamo.mark_static_address(buffer)
        return buffer

    def give(self, buffers: list[torch.Tensor]) -> None:
        """Leaves the buffers of a generation for the next one, in the place of those before."""
        with self._lock:
            self._spare = buffers


@dataclass
class Graphs:
    """The graphs of one model.

    Attributes:
        config: how they are compiled.
        state: what else of the model they depend on.
        seconds: spent on tracing and compiling.
        refused: why the model's forwards cannot be traced, empty as long as they can.
        spare: buffers of keys and values.
    """

    config: CompileConfig
    state: Hashable
    seconds: float = 0.0
    refused: str = ""
    spare: SpareBuffers = field(default_factory=SpareBuffers)
    _runs: dict[Hashable, Run] = field(default_factory=dict)
    _uses: dict[Hashable, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, key: Hashable, function: Run, inputs: Sequence[torch.Tensor], whose: str) -> Run | None:
        """The graph of ``function``, ``None`` as long as there is none.

        Args:
            key: what the graph depends on beside its inputs.
            function: takes the inputs, and returns tensors.
            inputs: an example; the graph is for their shapes.
            whose: the model, for messages.
        """
        with self._lock:
            if key in self._runs or self.refused:
                return self._runs.get(key)
            self._uses[key] = self._uses.get(key, 0) + 1
            if self._uses[key] < _USES:
                return None
            began = perf_counter()
            try:
                self._runs[key] = self._compiled(function, inputs)
            except (NotTraceableError, RuntimeError, TypeError) as error:
                self.refused = str(error).splitlines()[0]
                warn_once(
                    f"{whose} runs without compiled graphs, which its forward does not allow: {self.refused}. The "
                    "output is the same."
                )
                return None
            finally:
                self.seconds += perf_counter() - began
            return self._runs[key]

    def _compiled(self, function: Run, inputs: Sequence[torch.Tensor]) -> Run:
        # Imported here: it takes a second, and most programs do not compile.
        from torch.fx.experimental.proxy_tensor import make_fx

        with warnings.catch_warnings(), _tracing():
            warnings.simplefilter("ignore")
            graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            options: dict[str, Any] = self.config.to_dict() | {"fullgraph": True, "dynamic": False}
            run: Run = torch.compile(graph, **options)
            run(*inputs)
        return _copied(run) if inputs[0].is_cuda else run


def _copied(run: Run) -> Run:
    """The same with results of their own: those of a CUDA graph lie where its next run puts its own."""

    def copied(*inputs: torch.Tensor) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return [value.clone() for value in run(*inputs)]

    return copied


_of_models: weakref.WeakKeyDictionary[PreTrainedModel, list[Graphs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def graphs_of(model: PreTrainedModel, config: CompileConfig) -> Graphs:
    """The graphs of a model with these options, which last as long as the model."""
    values = itertools.chain(model.parameters(), model.buffers())
    weights = hash(tuple((id(value), value.data_ptr()) for value in values))
    state = weights, model.config._attn_implementation
    with _lock:
        # Graphs hold the weights that they were made with.
        known = _of_models[model] = [one for one in _of_models.get(model, []) if one.state == state]
        for graphs in known:
            if graphs.config.to_dict() == config.to_dict():
                return graphs
        known.append(Graphs(config, state))
        return known[-1]


def size_for(count: int) -> int | None:
    """The smallest size that takes so many tokens."""
    return next((size for size in SIZES if size >= count), None)
