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

from ..errors import SettingError
from ..notices import warn_once

# Tokens in a forward; fewer are filled up.
SIZES = (1, 2, 4, 8, 16, 32)
# A graph is worth its compilation for what comes again and again.
_USES = 2
# Attributes of modules with values of these types are constants of a graph.
_PLAIN = (bool, int, float, str, type(None))

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


class _Turns:
    """Graphs run side by side, and are made alone: torch's tracer changes modules and flags of the whole process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = self._waiting = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """The others of this kind may run at the same time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing else runs meanwhile."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._running)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()


_turns = _Turns()


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
                if buffer.is_inference() != torch.is_inference_mode_enabled():
                    continue  # torch writes into such a tensor in that mode alone
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
        beside: what others keep as long as the graphs last.
    """

    config: CompileConfig
    state: Hashable
    seconds: float = 0.0
    refused: str = ""
    spare: SpareBuffers = field(default_factory=SpareBuffers)
    beside: dict[str, Any] = field(default_factory=dict)
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
                with _turns.alone():
                    self._runs[key] = self._compiled(function, inputs)
            except torch.OutOfMemoryError:
                raise
            except (NotTraceableError, RuntimeError, TypeError) as error:
                self.refused = _first_line(error)
                warn_once(
                    f"{whose} runs without compiled graphs, since none could be made of its forward: {self.refused} "
                    "The output is the same."
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
            run: Run = torch.compile(graph, **_options(self.config))
            run(*inputs)
        return _copied(run) if inputs[0].is_cuda else _in_turn(run)


def _options(config: CompileConfig) -> dict[str, Any]:
    """Arguments of ``torch.compile``."""
    return config.to_dict() | {"fullgraph": True, "dynamic": False}


def _in_turn(run: Run) -> Run:
    """The same, while no graph is made."""

    def in_turn(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        with _turns.together():
            return run(*inputs)

    return in_turn


def _copied(run: Run) -> Run:
    """The same with results of their own: those of a CUDA graph lie where the next run of any puts its own."""

    def copied(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with _turns.alone():
            torch.compiler.cudagraph_mark_step_begin()
            return [value.clone() for value in run(*inputs)]

    return copied


_of_models: weakref.WeakKeyDictionary[PreTrainedModel, list[Graphs]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def graphs_of(model: PreTrainedModel, config: CompileConfig) -> Graphs:
    """The graphs of a model with these options, which last as long as the model.

    Raises:
        SettingError: torch knows no such options.
    """
    state = _state_of(model)
    with _lock:
        # Graphs hold the weights that they were made with.
        known = _of_models[model] = [one for one in _of_models.get(model, []) if one.state == state]
        for graphs in known:
            if graphs.config.to_dict() == config.to_dict():
                return graphs
        _check(config)
        known.append(Graphs(config, state))
        return known[-1]


def _state_of(model: PreTrainedModel) -> Hashable:
    """What graphs have taken from a model: where its weights are, its settings, and plain values of its modules."""
    values = itertools.chain(model.parameters(), model.buffers())
    weights = tuple((id(value), value.data_ptr()) for value in values)
    plain = tuple(
        (name, value) for module in model.modules() for name, value in vars(module).items() if type(value) in _PLAIN
    )
    return weights, plain, str(model.config.to_dict()), model.config._attn_implementation


def _check(config: CompileConfig) -> None:
    try:
        torch.compile(torch.nn.Identity(), **_options(config))
    except (RuntimeError, TypeError) as error:
        raise SettingError(
            f"torch.compile does not take {config!r}: {_first_line(error)} Pass SelfSpec(compile=True), or change the "
            "CompileConfig."
        ) from error


def _first_line(error: Exception) -> str:
    """The beginning of a message, as a sentence."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


def size_for(count: int) -> int | None:
    """The smallest size that takes so many tokens."""
    return next((size for size in SIZES if size >= count), None)
