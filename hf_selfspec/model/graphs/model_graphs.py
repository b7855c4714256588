"""The captured forwards of a model on a GPU: which there are, when one is made, and when there are enough."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import brief, warn_once
from ..forks import new_lock
from ..internals import attention_implementation
from ..kernels.experts import has_grouped_kernel
from ..module_tools import all_modules, forward_of_others
from .captures import BufferPool, Captured, CapturePool, NoGraphError, Run

# Graphs of a model at most, before those that were not used for longest go, and shapes that fail before no more are
# tried. Of a kernel a graph has about a kilobyte, and its inputs and results.
_MOST, _FAILURES = 32, 4
# Tokens of a forward that cost a GPU about as much as one. SmolLM2-135M in bfloat16 on an H200, 256 slots, captured:
# 3.2 ms for one, 4.0 for 32. For 8B an H200 computes 128 as fast as it reads the weights (computed).
_CHEAP_TOKENS = 128
# A chat of a model from so many parameters on has room for its first turns at once, so that few graphs serve it: beside
# the weights, attention over empty slots costs little there.
_LARGE, _FEWEST_SLOTS = 10**9, 1024
# A capture leaves at least this share of a device's memory free.
_FREE = 1 / 16
# Replays whose results are compared, after the forward before the capture: for the inputs of that, numbers and results
# that became constants are still right.
COMPARISONS = 2
# Sets of weights and settings whose graphs a model keeps, such as those of adapters that calls switch between.
_STATES = 4
# Generations of a model whose graphs have memory at the same time. Each graph is recorded once for each of them.
POOLS = 4
# Module attributes with values of these types are constants of a graph, and so are functions.
_PLAIN, _FUNCTIONS = {bool, int, float, str, type(None)}, (FunctionType, BuiltinFunctionType)
# What all modules have, such as hooks, with which there are no graphs, and weights and forwards, which are looked at by
# themselves.
_OF_ALL = {*vars(torch.nn.Module()), "forward", "_is_hf_initialized"} - {"training"}

_logger = logging.getLogger(__name__)
_capturing = new_lock()  # CUDA takes one capture at a time


@dataclass(eq=False)
class Graph:
    """A graph, and how far it is known to be right."""

    run: Run | None = None  # maps the inputs to the results, ``None`` where there is none yet
    compared: int = 0  # how many of its replays had the results of the model's own code
    is_over: bool = False  # whether forwards of this shape are better without
    leaves: dict[Hashable, Any] = field(default_factory=dict)  # which are kernels of ours, as its first forward showed


@dataclass(eq=False)
class Pools:
    """The memory of a model's graphs, whatever its weights and settings."""

    all: tuple[BufferPool, ...] = field(default_factory=lambda: tuple(BufferPool() for _ in range(POOLS)))
    captures: CapturePool | None = None
    lock: Any = field(default_factory=new_lock)

    def __post_init__(self) -> None:
        self.free = list(self.all)  # those that no generation uses now, the last one that was left at the end


@dataclass(eq=False)
class ModelGraphs:
    """The graphs of one model with its weights and settings."""

    state: tuple[Any, ...] = field(repr=False)  # properties of the model that they depend on
    whose: str  # name of the model, for messages
    cheap_tokens: int = 0  # up to which a forward costs about as much as one over a single token
    fewest_slots: int = 0  # of a capacity
    refused: str = ""  # why no graphs are made or used
    has_room: bool = True  # in memory, as far as the running calls know
    pools: Pools = field(default_factory=Pools)
    token: object = field(default_factory=object)  # in the keys of its graphs
    _failures: int = 0

    @property
    def count(self) -> int:
        graphs = [each for pool in self.pools.all for each in list(pool.graphs.items())]
        return sum(token is self.token and graph.run is not None for (token, _), graph in graphs)

    def find(self, key: Hashable, pool: BufferPool, device: torch.device) -> Graph | None:
        """The graph for ``key``, all that its forward depends on but the values of inputs, which may be still to be
        made (:meth:`make`); ``None`` if there is to be none."""
        whole_key = self.token, key
        with self.pools.lock:
            if (graph := pool.graphs.pop(whole_key, None)) is None:
                if not (self.has_room and self._takes_room(device)):
                    return None
                graph = Graph()
            pool.graphs[whole_key] = graph  # at the end, as the last one that was used
        return None if graph.is_over else graph

    def _takes_room(self, device: torch.device) -> bool:
        """Whether there may be one graph more; beyond a bound it takes the place of another."""
        free, total = torch.cuda.mem_get_info(device)
        if free < _FREE * total:
            torch.cuda.empty_cache()  # which is not done while something is captured
            free = torch.cuda.mem_get_info(device)[0]
        self.has_room = free >= _FREE * total
        if not self.has_room:
            warn_once(f"{self.whose} makes no more graphs while so little memory of its device is free.")
            return False
        if sum(len(pool.graphs) for pool in self.pools.all) >= _MOST:
            graphs = max((pool.graphs for pool in self.pools.all), key=len)
            del graphs[next(iter(graphs))]
        return True

    def make(self, graph: Graph, function: Run, inputs: Sequence[torch.Tensor]) -> None:
        """Makes the graph of a ``function`` that has run over ``inputs`` before, in which libraries choose kernels.
        What else it reads and writes is in the pool, which no other thread uses meanwhile."""
        name, began, pools = f"a forward of {[tuple(value.shape) for value in inputs]}", perf_counter(), self.pools
        try:
            with _capturing:
                others = (other.run for pool in pools.all for other in list(pool.graphs.values()))
                if pools.captures is None or not any(others):  # torch closes the memory with the last graph
                    pools.captures = CapturePool(inputs[0].device)
                graph.run = Captured(function, inputs, pools.captures)
        except BaseException:  # an interrupt, too, leaves memory that no graph has
            pools.captures = None  # its memory may be closed
            raise
        _logger.info(f"{self.whose}: graph of {name}: {perf_counter() - began:.1f} s.")

    def failed(self, error: Exception, graph: Graph) -> None:
        """Makes what could not be captured or replayed again without kernels of ours; what has none runs without a
        graph from now on."""
        chosen = [form for form in graph.leaves.values() if form is not None and not isinstance(form, dict)]
        had_leaves = bool(chosen) and not isinstance(error, NoGraphError)
        graph.run, graph.compared, graph.is_over = None, 0, not had_leaves
        graph.leaves = dict.fromkeys(graph.leaves)
        if isinstance(error, NoGraphError):
            _logger.info(f"{self.whose}: no graph: {error}.")
            return
        warn_once(
            f"{self.whose} runs some forwards without {'fused kernels' if had_leaves else 'graphs'}, since torch could "
            f"not make or run one of them ({brief(error)}). The output is the same.",
            ignore_numbers=True,
        )
        with self.pools.lock:
            self._failures += graph.is_over
            if self._failures >= _FAILURES and not self.count:
                self.refused = brief(error)


# Those of a model that were used last, the last one at the end.
_of_models: weakref.WeakKeyDictionary[PreTrainedModel, list[ModelGraphs]] = weakref.WeakKeyDictionary()
_lock = new_lock()


def graphs_of(model: PreTrainedModel, modules: Sequence[torch.nn.Module] = ()) -> ModelGraphs:
    """Returns the graphs of a model, which live as long as it has the weights that they were made with; ``modules`` are
    those of the model, where they were listed before."""
    state = _state_of(model, modules or all_modules(model))
    with _lock:
        all_graphs = _of_models.setdefault(model, [])
        graphs = next((graphs for graphs in all_graphs if graphs.state == state), None)
        if graphs is None:
            # Without a kernel for groups of tokens, the weights of an expert are gathered for each token.
            experts = [module for module in model.modules() if hasattr(module, "num_experts")]
            gathers = not all(has_grouped_kernel(weight) for module in experts for weight in module.parameters())
            fewest = _FEWEST_SLOTS if model.num_parameters() >= _LARGE else 0
            graphs = ModelGraphs(state, type(model).__name__, 0 if gathers else _CHEAP_TOKENS, fewest)
            graphs.pools = all_graphs[0].pools if all_graphs else graphs.pools
        graphs.has_room = True
        all_graphs[:] = [*(other for other in all_graphs if other is not graphs), graphs][-_STATES:]
        tokens = {kept.token for kept in all_graphs}
        with graphs.pools.lock:
            for of_pool in (pool.graphs for pool in graphs.pools.all):
                for key in [key for key in list(of_pool) if key[0] not in tokens]:
                    of_pool.pop(key, None)  # which its call may have cleared
    return graphs


def _state_of(model: PreTrainedModel, modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """What graphs depend on in a model: where its weights are, its settings, and plain values of its modules."""
    state, values, tensors = list[Any](), list[Any](), list[torch.Tensor | None]()
    for module in modules:  # hundreds
        attributes = module.__dict__
        names = _own_names(tuple(attributes))
        state += type(module).forward, names  # many activations have no values
        values += map(attributes.get, names)  # other threads change some
        if "forward" in attributes and (forward := forward_of_others(module)) is not None:
            state.append(id(forward))
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    state += [value if type(value) in _PLAIN else _constant(value) for value in values]
    weights = [tensor for tensor in tensors if tensor is not None]
    state += map(id, weights)
    state += [each.data_ptr() if type(each) is torch.nn.Parameter else _memory_of(each) for each in weights]
    return state, _settings_of(model.config), attention_implementation(model.config)


def _settings_of(config: PreTrainedConfig) -> str:
    """All settings, in a sixth of the time of ``to_dict``, which copies them."""
    values = vars(config).items()
    return str([(name, _settings_of(of) if isinstance(of, PreTrainedConfig) else of) for name, of in values])


@lru_cache(4096)
def _own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _OF_ALL)


def _constant(value: Any) -> Any:
    """What a graph depends on in an attribute of a module, of most objects their class alone."""
    type_ = type(value)  # a model's config answers `isinstance` slowly
    if type_ in _PLAIN:
        return value
    if issubclass(type_, torch.Tensor):
        return _memory_of(value)
    if type_ in _FUNCTIONS:
        return id(value)
    if type_ is dict:
        return list(map(_constant, list(value.items())))
    return list(map(_constant, value)) if type_ in (list, tuple) else type_


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor is: one of packed weights (torchao's) has no memory, but tensors, of its own."""
    if type(tensor) is torch.nn.Parameter or not hasattr(tensor, "__tensor_flatten__"):
        return id(tensor), tensor.data_ptr()
    names = tensor.__tensor_flatten__()[0]
    return id(tensor), tensor.data_ptr(), *(_memory_of(getattr(tensor, name)) for name in names)
