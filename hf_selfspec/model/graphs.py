"""Forwards of fixed shape as compiled graphs.

Our own forward runs once under a tracer, with the rows' cursors as a tensor, keys and values written by index into
buffers of fixed capacity, and masks over all of it. What comes out is one graph of operations without any Python: plans
and hooks of a forward are constants of its graph. ``torch.compile`` makes a kernel sequence of it (a CUDA graph with
``mode="reduce-overhead"``).
"""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.nn as nn
from transformers import CompileConfig, PreTrainedModel

from ..errors import SettingError
from ..notices import warn_once
from .faster import Faster
from .tracing import NotTraceableError, Turns, tracing

# Tokens in a forward; fewer are filled up.
SIZES = (1, 2, 4, 8, 16, 32)
_FEWEST_SLOTS = 128
# A graph is worth its compilation for what comes again and again: not for a set of blocks that is only tried, nor for
# the last draft of a text, cut by its end.
_USES = 8
# Choices against graphs, without one for them, after which no more are made.
_LOST = 2
# Attributes of modules with values of these types are constants of a graph.
_PLAIN = (bool, int, float, str, type(None))

Run = Callable[..., Sequence[torch.Tensor]]
Result = TypeVar("Result")

_logger = logging.getLogger(__name__)
_turns = Turns()


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
            self._spare.clear()  # of other shapes, for which there is no use now
        buffer = like.new_zeros(shape)
        if buffer.is_cuda:
            torch._dynamo.mark_static_address(buffer)
        return buffer

    def give(self, buffers: list[torch.Tensor]) -> None:
        """Leaves the buffers of a generation for the next one, in the place of those before."""
        with self._lock:
            self._spare = buffers


@dataclass
class Graph:
    """One graph, and whether it is taken.

    Attributes:
        run: takes the inputs, and returns the results.
        what: it is of, for messages.
        on_cpu: there a graph may be slower than the model's own code, whose linear layers are chosen by times; on GPUs
            it never waits for Python.
    """

    run: Run
    what: str
    on_cpu: bool
    choices: dict[int, Faster] = field(default_factory=dict)

    def faster_of(self, count: int, by_graph: Callable[[], Result], eager: Callable[[], Result]) -> Result:
        """The result for ``count`` tokens, by the graph or without it."""
        if not self.on_cpu:
            return by_graph()
        return self.choices.setdefault(count, Faster()).run(by_graph, eager)


@dataclass
class Graphs:
    """The graphs of one model.

    Attributes:
        config: how they are compiled.
        state: what else of the model they depend on.
        whose: the model, for messages.
        seconds: spent on tracing and compiling.
        refused: why no (further) graphs are made, empty as long as they are.
        spare: buffers of keys and values.
        beside: what others keep as long as the graphs last.
    """

    config: CompileConfig
    state: Hashable
    whose: str
    seconds: float = 0.0
    refused: str = ""
    spare: SpareBuffers = field(default_factory=SpareBuffers)
    beside: dict[str, Any] = field(default_factory=dict)
    _graphs: dict[Hashable, Graph] = field(default_factory=dict)
    _uses: dict[Hashable, int] = field(default_factory=dict)
    _told: tuple[int, float] = (0, 0.0)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def find(self, key: Hashable, function: Run, inputs: Sequence[torch.Tensor], what: str) -> Graph | None:
        """The graph of ``function``, ``None`` as long as there is none.

        Args:
            key: what the graph depends on beside its inputs.
            function: takes the inputs, and returns tensors.
            inputs: an example; the graph is for their shapes.
            what: the forward, for messages.
        """
        with self._lock:
            if key in self._graphs or self.refused:
                return self._graphs.get(key)
            self._uses[key] = self._uses.get(key, 0) + 1
            if self._uses[key] < _USES or self._are_slower():
                return None
            return self._made(key, function, inputs, what)

    def report(self) -> None:
        """Tells how many graphs were made since the last time, how long that took, and whether no more are made."""
        count, seconds = self.count - self._told[0], self.seconds - self._told[1]
        if count:
            self._told = self.count, self.seconds
            _logger.warning(f"{self.whose}: {count} {'graph' if count == 1 else 'graphs'} made in {seconds:.1f} s.")
        with self._lock:
            self._are_slower()

    def _made(self, key: Hashable, function: Run, inputs: Sequence[torch.Tensor], what: str) -> Graph | None:
        if not self._graphs:
            _logger.warning(
                f"{self.whose}: making compiled graphs, one for each shape that comes again; each takes a second to a "
                "minute, once in a process."
            )
        began = perf_counter()
        try:
            with _turns.alone():
                run = self._compiled(function, inputs)
        except torch.OutOfMemoryError:
            raise
        except (NotTraceableError, RuntimeError, TypeError) as error:
            self.refused = _first_line(error)
            warn_once(
                f"{self.whose} runs without compiled graphs, since none could be made of its forward: {self.refused} "
                "The output is the same."
            )
            return None
        finally:
            self.seconds += perf_counter() - began
        _logger.info(f"{self.whose}: graph of {what}: {perf_counter() - began:.1f} s.")
        graph = self._graphs[key] = Graph(run, what, inputs[0].device.type == "cpu")
        return graph

    def _are_slower(self) -> bool:
        """Whether graphs have turned out to be slower than the model's own code, and so no more are made."""
        choices = [
            (graph.what, choice)
            for graph in self._graphs.values()
            for choice in list(graph.choices.values())  # other threads add to it
            if choice.is_first is not None
        ]
        if self.refused or len(choices) < _LOST or any(choice.is_first for _, choice in choices):
            return False
        what, choice = choices[-1]
        mine, other = choice.shortest
        self.refused = f"they are slower than its own code on this machine ({what}: {mine:.2g} s to {other:.2g} s)."
        _logger.warning(f"{self.whose}: no more graphs are made, since {self.refused}")
        return True

    def _compiled(self, function: Run, inputs: Sequence[torch.Tensor]) -> Run:
        # Imported here: it takes a second, and most programs do not compile.
        from torch.fx.experimental.proxy_tensor import make_fx

        if inputs[0].device.type == "cpu":
            function(*inputs)  # linear layers choose how they multiply so many tokens, which needs values
        with warnings.catch_warnings(), tracing():
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
        known.append(Graphs(config, state, type(model).__name__))
        return known[-1]


def _state_of(model: PreTrainedModel) -> Hashable:
    """What graphs have taken from a model: where its weights are, its settings, and plain values of its modules."""
    values = itertools.chain(model.parameters(), model.buffers())
    weights = tuple((id(value), value.data_ptr()) for value in values)
    plain = tuple(
        (name, found)
        for module in model.modules()
        for name, value in vars(module).items()
        if (found := _constant(value)) is not None
    )
    patched = tuple(id(forward) for module in model.modules() if (forward := _own_forward(module)) is not None)
    return weights, plain, patched, str(model.config.to_dict()), model.config._attn_implementation


def _own_forward(module: nn.Module) -> Any:
    """The forward that somebody else has given this one module."""
    forward = vars(module).get("forward")
    is_ours = str(getattr(forward, "__module__", "")).startswith(f"{__package__.partition('.')[0]}.")
    return None if is_ours else forward


def _constant(value: Any) -> Hashable | None:
    """What a graph takes from an attribute of a module, ``None`` where that is nothing."""
    if type(value) in _PLAIN:
        return (value,)
    if isinstance(value, torch.Tensor):
        return id(value), value.data_ptr()
    if type(value) in (list, tuple):
        return tuple(map(_constant, value))
    if type(value) is dict:
        return tuple((str(name), _constant(one)) for name, one in value.items())
    return None


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


def step_above(slots: int) -> int:
    """The smallest of 128, 256, 512, ... that is at least ``slots``: few capacities, so that few shapes are met."""
    return max(_FEWEST_SLOTS, 1 << (slots - 1).bit_length())
