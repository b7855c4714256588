"""Forwards of fixed shape as graphs.

Our own forward runs with the rows' cursors as a tensor, keys and values written by index into buffers of fixed
capacity, and masks over the whole capacity; plans and hooks of a forward are constants of its graph. On CUDA its
kernels are captured and replayed with one launch. Where that is asked for, a tracer and ``torch.compile`` fuse them
before; on a CPU these alone make the graph.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from ...errors import SettingError, brief, muted, warn_once
from ..forks import in_children, new_lock
from ..internals import attention_implementation
from ..module_tools import forward_of_others
from ..transfer import FasterWay, device_clock
from .captures import Captured, Run, Shared
from .shapes import NoGraphError, Place, tracing

# A graph is worth its compilation for forwards that recur often: not for a set of blocks that is only tried, nor for
# the last draft of a text, which is cut by its end. A capture takes about as long as ten forwards.
_USES, _USES_CAPTURED = 8, 3
# Graphs of a model at most, and shapes that fail before no more are tried.
_MOST, _FAILURES = 128, 4
# Tokens of a forward that cost a GPU about as much as one. SmolLM2-135M in bfloat16 on an H200, 256 slots, captured:
# 3.2 ms for one, 4.0 for 32.
_CHEAP_TOKENS = 64
# A captured graph makes room for others after so many forwards without it; then captures take little of all time.
_UNUSED = 4096
# A capture leaves at least this share of a device's memory free.
_FREE = 1 / 16
# How many forwards are counted that are no graphs yet, those that came last.
_COUNTED = 512
# After this many choices against graphs, and none for them, no more graphs are made, and only one in so many forwards
# still asks for one: that takes work, and what was chosen may change.
_LOST, _ASKED = 2, 17
# How often results are compared, after a first run in which numbers and results that became constants are still right.
COMPARISONS = 2
# Generations of a model whose graphs have memory at the same time. Each graph is recorded once for each of them.
PLACES = 4
# Module attributes with values of these types are constants of a graph.
_PLAIN = (bool, int, float, str, type(None))
# What all modules have, such as hooks, with which there are no graphs, and weights, which are looked at by themselves.
_OF_ALL = set(vars(torch.nn.Module())) - {"training"}

_logger = logging.getLogger(__name__)


# Graphs of a CPU run concurrently, so many at a time. But they are made one at a time, while none runs, since torch's
# tracer changes process-wide state; CUDA takes one capture at a time.
_AT_ONCE = 16
_running, _making = threading.Semaphore(_AT_ONCE), new_lock()


def _let_all_run() -> None:
    """For processes that were forked while graphs ran."""
    global _running
    _running = threading.Semaphore(_AT_ONCE)


in_children(_let_all_run)


@dataclass(eq=False)
class Graph(FasterWay):
    """One graph, and for each number of tokens padded to it whether it is faster than the model's own code."""

    run: Run = field(kw_only=True)  # maps the inputs to the results
    name: str = field(kw_only=True)  # what it is a graph of, for messages
    compared: int = field(default=-1, kw_only=True)  # how often its results were those of the model's code, -1: not run


@dataclass
class Graphs:
    """The graphs of one model."""

    config: CompileConfig | None  # of torch.compile, ``None`` for captures alone
    state: Hashable  # properties of the model that they depend on
    whose: str  # name of the model, for messages
    cheap_tokens: int = 0  # up to which a forward costs about as much as one over a single token
    refused: str = ""  # why no graphs are made or used
    slower: str = ""  # why no further graphs are made, empty if they are
    # The memory that no generation uses now, the last one that was left at the end.
    places: list[Place] = field(default_factory=lambda: [Place() for _ in range(PLACES)])
    _graphs: dict[Hashable, Graph | None] = field(default_factory=dict)  # ``None``: better without
    _uses: dict[Hashable, int] = field(default_factory=dict)
    _asked: int = 0  # forwards that have asked for a graph
    _last: dict[Hashable, int] = field(default_factory=dict)  # of these the last one for each graph
    _unasked: int = 0  # forwards that have not asked for a graph, since none is faster
    _new: list[float] = field(default_factory=list)  # seconds that each graph has taken since the last report
    _failures: int = 0
    _captured: Any = None  # what captures share
    _lock: Any = field(default_factory=new_lock)

    @property
    def count(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    @property
    def _wanted_uses(self) -> int:
        return _USES if self.config else _USES_CAPTURED

    def find(
        self, key: Hashable, function: Run, inputs: Sequence[torch.Tensor], name: Callable[[], str], fixed: int = 0
    ) -> Graph | None:
        """The graph for these shapes and ``key``, what else it depends on; ``None`` if there is none. The last
        ``fixed`` inputs are always in the same memory."""
        with self._lock:
            self._asked += 1
            if self.refused:
                return None
            if key in self._graphs:
                self._last[key] = self._asked
                return self._graphs[key]
            uses = self._uses[key] = self._uses.pop(key, 0) + 1
            if len(self._uses) > _COUNTED:
                del self._uses[next(iter(self._uses))]
            if uses < self._wanted_uses or self._are_slower() or self._are_enough(inputs[0]):
                return None
            self._graphs[key], self._last[key] = None, self._asked  # other threads run without it until it is there
        graph = self._made(function, inputs, fixed, name)
        with self._lock:
            if not self.refused and key in self._graphs:
                self._graphs[key] = graph
            return self._graphs.get(key)

    def are_awaited(self, key: Hashable) -> bool:
        """Whether a graph will be made for ``key`` once it has come often enough; where it has, there is no room."""
        is_counted = 0 < self._uses.get(key, 0) < self._wanted_uses and key not in self._graphs
        return is_counted and not (self.refused or self.slower)

    def forget(self, is_over: Callable[[Any], bool]) -> None:
        """Leaves graphs to be collected by their keys."""
        with self._lock:
            for key in [key for key in self._graphs if is_over(key)]:
                del self._graphs[key], self._last[key]

    def _are_enough(self, like: torch.Tensor) -> bool:
        if like.is_cuda:
            free, total = torch.cuda.mem_get_info(like.device)
            if free < _FREE * total:
                warn_once(f"{self.whose} has no further graphs while so little of its device's memory is free.")
                return True
        if len(self._graphs) < _MOST:
            return False
        oldest = min(self._graphs, key=lambda key: self._last[key])
        if self.config or self._asked - self._last[oldest] < _UNUSED:
            return True
        del self._graphs[oldest], self._last[oldest]
        return False

    def report(self) -> None:
        """Logs how many graphs were made since the last report, how long that took, and whether no more are made."""
        with self._lock:
            if count := len(self._new):
                graphs = "graph" if count == 1 else "graphs"
                _logger.warning(f"{self.whose}: {count} {graphs} made in {sum(self._new):.1f} s.")
                self._new.clear()
            self._are_slower()

    def _made(self, function: Run, inputs: Sequence[torch.Tensor], fixed: int, name: Callable[[], str]) -> Graph | None:
        device = inputs[0].device
        if self.config and not self.count:
            _logger.warning(
                f"{self.whose}: making compiled graphs, one for each shape that recurs; each takes a second to a "
                "minute, once per process."
            )
        began = perf_counter()
        try:
            with _making:
                run = self._compiled(function, inputs) if self.config else function
                if device.type == "cuda":
                    if self._captured is None or not self.count:  # torch closes the memory with the last graph
                        self._captured = Shared(device)
                    run = Captured(run, inputs, fixed, self._captured)
        except NoGraphError as error:
            _logger.info(f"{self.whose}: no graph of {name()}: {error}.")
            return None
        except Exception as error:  # of a compiler or a device, else the model's own code raises it again
            self._captured = None  # its memory may be closed
            self.failed(error)
            return None
        self._new.append(perf_counter() - began)
        graph = Graph(device_clock(device), run=run, name=name())
        _logger.info(f"{self.whose}: graph of {graph.name}: {self._new[-1]:.1f} s.")
        return graph

    def failed(self, error: Exception, key: Hashable | None = None) -> None:
        """Runs what could not be captured, compiled or replayed without a graph from now on."""
        warn_once(
            f"{self.whose} runs some forwards without graphs, since torch could not make or run one of them "
            f"({brief(error)}). The output is the same.",
            ignore_numbers=True,
        )
        with self._lock:
            self._failures += 1
            if key in self._graphs:
                self._graphs[key] = None
            if self._failures >= _FAILURES and not self.count:
                self.refused = brief(error)

    def are_left_out(self) -> bool:
        """Returns whether the next forward need not ask for a graph."""
        self._unasked += bool(self.slower)
        return bool(self.refused) or self._unasked % _ASKED > 0

    def _are_slower(self) -> bool:
        """Whether graphs have turned out to be slower than the model's own code, so that no more are made."""
        made = [graph for graph in self._graphs.values() if graph is not None]
        choices = [(graph, count) for graph in made for count in list(graph.is_faster)]  # other threads add to it
        if self.refused or len(choices) < _LOST or any(graph.is_faster[count] for graph, count in choices):
            self.slower, self._unasked = "", 0
        elif not self.slower:
            graph, count = choices[-1]
            seconds = " to ".join(f"{min(times):.2g} s" for times in graph.seconds[count])
            self.slower = f"they are slower than its own code on this machine ({graph.name}: {seconds})."
            _logger.warning(f"{self.whose}: no more graphs are made, since {self.slower}")
        return bool(self.slower)

    def _compiled(self, function: Run, inputs: Sequence[torch.Tensor]) -> Run:
        # Imported here: it takes a second, and most programs do not compile.
        from torch.fx.experimental.proxy_tensor import make_fx

        assert self.config is not None
        if inputs[0].device.type == "cpu":
            function(*inputs)  # linear layers choose how to multiply this many tokens, for which they need values
        with ExitStack() as stack:
            for _ in range(_AT_ONCE):
                stack.enter_context(_running)
            stack.enter_context(muted())
            stack.enter_context(tracing.during(True))
            graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
            run: Run = torch.compile(graph, **_options(self.config, inputs[0].device))
            run(*inputs)
        return run if inputs[0].is_cuda else partial(_in_turn, run)


def _options(config: CompileConfig, device: torch.device) -> dict[str, Any]:
    options = config.to_dict() | {"fullgraph": True, "dynamic": False}
    if device.type == "cuda" and options.get("mode") == "reduce-overhead":
        options["mode"] = "default"  # its kernels are captured here
    return options


def _in_turn(run: Run, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    with _running:
        return run(*inputs)


_of_models: weakref.WeakKeyDictionary[PreTrainedModel, list[Graphs]] = weakref.WeakKeyDictionary()
_lock = new_lock()


def graphs_of(model: PreTrainedModel, config: CompileConfig | None) -> Graphs:
    """Returns the graphs of a model with these options; they live as long as the model."""
    state = _state_of(model)
    with _lock:
        # Graphs refer to the weights that they were made with.
        of_model = _of_models[model] = [graphs for graphs in _of_models.get(model, []) if graphs.state == state]
        for graphs in of_model:
            if (graphs.config and graphs.config.to_dict()) == (config and config.to_dict()):
                return graphs
        try:
            if config is not None:
                torch.compile(torch.nn.Identity(), **_options(config, model.device))
        except (RuntimeError, TypeError) as error:
            raise SettingError(
                f"torch.compile does not take {config!r} ({brief(error)}). Pass SelfSpec(compile=True), or change the "
                "CompileConfig."
            ) from error
        # Tokens that sizes are filled with would go to further experts, whose weights are read for them.
        has_experts = any(hasattr(module, "num_experts") for module in model.modules())
        cheap_tokens = _CHEAP_TOKENS if model.device.type == "cuda" and not has_experts else 0
        of_model.append(Graphs(config, state, type(model).__name__, cheap_tokens))
        return of_model[-1]


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
