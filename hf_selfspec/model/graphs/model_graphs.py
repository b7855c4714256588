"""The captured forwards of a model on a GPU: which there are, when one is made, and when there are enough."""

import itertools
import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import brief, warn_once
from ..forks import new_lock
from ..internals import attention_implementation
from ..module_tools import forward_of_others
from .captures import BufferPool, Captured, CapturePool, NoGraphError, Run

# A capture takes about as long as ten forwards, so it is worth it for forwards that recur: not for a set of blocks that
# is only tried, nor for the last draft of a text, which is cut by its end.
_USES = 3
# Graphs of a model at most, before all are made anew, and shapes that fail before no more are tried.
_MOST, _FAILURES = 128, 4
# Tokens of a forward that cost a GPU about as much as one. SmolLM2-135M in bfloat16 on an H200, 256 slots, captured:
# 3.2 ms for one, 4.0 for 32.
_CHEAP_TOKENS = 64
# A capture leaves at least this share of a device's memory free.
_FREE = 1 / 16
# How many forwards are counted that are no graphs yet, those that came last.
_COUNTED = 512
# How often results are compared. In a first run numbers and results that became constants are still right.
COMPARISONS = 3
# Generations of a model whose graphs have memory at the same time. Each graph is recorded once for each of them.
POOLS = 4
# Module attributes with values of these types are constants of a graph.
_PLAIN = (bool, int, float, str, type(None))
# What all modules have, such as hooks, with which there are no graphs, and weights, which are looked at by themselves.
_OF_ALL = set(vars(torch.nn.Module())) - {"training"}

_logger = logging.getLogger(__name__)
_capturing = new_lock()  # CUDA takes one capture at a time


@dataclass(eq=False)
class Graph:
    """A graph, and how far it is known to be right."""

    run: Run | None = None  # maps the inputs to the results, ``None``: better without
    compared: int = 0  # how often its results were those of the model's own code


@dataclass
class ModelGraphs:
    """The graphs of one model."""

    state: Hashable  # properties of the model that they depend on
    whose: str  # name of the model, for messages
    cheap_tokens: int = 0  # up to which a forward costs about as much as one over a single token
    refused: str = ""  # why no graphs are made or used
    pools: tuple[BufferPool, ...] = field(default_factory=lambda: tuple(BufferPool() for _ in range(POOLS)))
    _uses: dict[Hashable, int] = field(default_factory=dict)
    _failures: int = 0
    _captures: CapturePool | None = None
    _lock: Any = field(default_factory=new_lock)

    def __post_init__(self) -> None:
        self.free = list(self.pools)  # those that no generation uses now, the last one that was left at the end

    @property
    def count(self) -> int:
        return sum(graph.run is not None for pool in self.pools for graph in list(pool.graphs.values()))

    def find(
        self, key: Hashable, pool: BufferPool, function: Run, inputs: Sequence[torch.Tensor], device: torch.device
    ) -> Graph | None:
        """The graph of a ``function`` for ``key``, all that it depends on but the values of ``inputs``; ``None`` if
        there is none. What else it reads and writes is in ``pool``, which no other thread uses meanwhile."""
        with self._lock:
            if (graph := pool.graphs.get(key)) is None:
                uses = self._uses[key] = self._uses.pop(key, 0) + 1
                if len(self._uses) > _COUNTED:
                    del self._uses[next(iter(self._uses))]
                if uses < _USES or not self._has_room(device):
                    return None
        if graph is None:
            graph = pool.graphs[key] = self._made(function, inputs, device)
        return None if graph.run is None else graph

    def are_awaited(self, key: Hashable) -> bool:
        """Whether a graph will be made for ``key`` once it has come often enough; where it has, there is no room."""
        return 0 < self._uses.get(key, 0) < _USES and not self.refused

    def _has_room(self, device: torch.device) -> bool:
        """Whether there may be one graph more; beyond a bound that takes the place of all."""
        free, total = torch.cuda.mem_get_info(device)
        if free < _FREE * total:
            warn_once(f"{self.whose} has no further graphs while so little of its device's memory is free.")
            return False
        if sum(len(pool.graphs) for pool in self.pools) >= _MOST:
            self._failures = 0
            self._uses.clear()
            for pool in self.pools:
                pool.graphs.clear()
        return True

    def _made(self, function: Run, inputs: Sequence[torch.Tensor], device: torch.device) -> Graph:
        name, began = f"a forward over {tuple(inputs[0].shape)} tokens", perf_counter()
        graph = Graph()
        try:
            with _capturing:
                if self._captures is None or not self.count:  # torch closes the memory with the last graph
                    self._captures = CapturePool(device)
                graph.run = Captured(function, inputs, self._captures)
        except NoGraphError as error:
            _logger.info(f"{self.whose}: no graph of {name}: {error}.")
        except BaseException as error:  # an interrupt, too, leaves memory that no graph has
            self._captures = None  # its memory may be closed
            if not isinstance(error, Exception):  # an interrupt: the next forward tries it again
                raise
            self.failed(error, graph)  # the model's own code raises it again, unless it is that of a capture
        else:
            _logger.info(f"{self.whose}: graph of {name}: {perf_counter() - began:.1f} s.")
        return graph

    def failed(self, error: Exception, graph: Graph) -> None:
        """Runs what could not be captured or replayed without a graph from now on."""
        warn_once(
            f"{self.whose} runs some forwards without graphs, since torch could not make or run one of them "
            f"({brief(error)}). The output is the same.",
            ignore_numbers=True,
        )
        with self._lock:
            self._failures, graph.run = self._failures + 1, None
            if self._failures >= _FAILURES and not self.count:
                self.refused = brief(error)


_of_models: weakref.WeakKeyDictionary[PreTrainedModel, ModelGraphs] = weakref.WeakKeyDictionary()
_lock = new_lock()


def graphs_of(model: PreTrainedModel) -> ModelGraphs:
    """Returns the graphs of a model, which live as long as it has the weights that they were made with."""
    state = _state_of(model)
    with _lock:
        if (graphs := _of_models.get(model)) is None or graphs.state != state:
            # Tokens that sizes are filled with would go to further experts, whose weights are read for them.
            has_experts = any(hasattr(module, "num_experts") for module in model.modules())
            cheap_tokens = 0 if has_experts else _CHEAP_TOKENS
            graphs = _of_models[model] = ModelGraphs(state, type(model).__name__, cheap_tokens)
        return graphs


def _state_of(model: PreTrainedModel) -> Hashable:
    """What graphs depend on in a model: where its weights are, its settings, and plain values of its modules."""
    weights = tuple(map(_memory_of, itertools.chain(model.parameters(), model.buffers())))
    plain = tuple(
        (name, constant)
        for module in model.modules()
        for name, value in list(vars(module).items())  # other threads change some
        if name not in _OF_ALL and (constant := _constant(value)) is not None
    )
    patched = tuple(id(forward) for module in model.modules() if (forward := forward_of_others(module)) is not None)
    return weights, plain, patched, str(model.config.to_dict()), attention_implementation(model.config)


def _constant(value: Any) -> Hashable | None:
    """What a graph depends on in an attribute of a module, ``None`` for nothing."""
    if type(value) in _PLAIN:
        return (value,)
    if isinstance(value, torch.Tensor):
        return _memory_of(value)
    if type(value) is dict:
        value = list(value.items())
    return tuple(map(_constant, value)) if type(value) in (list, tuple) else None


def _memory_of(tensor: torch.Tensor) -> Hashable:
    """Where a tensor is: one of packed weights (torchao's) has no memory, but tensors, of its own."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return id(tensor), tensor.data_ptr(), *(_memory_of(getattr(tensor, name)) for name in names)
