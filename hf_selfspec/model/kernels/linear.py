"""Linear layers over a handful of tokens in float32 on a CPU.

Drafting and verification run one to 32 tokens at once. Most of the time then goes into streaming the weights, and how
well a library does that depends on the processor, the shape and the number of tokens. One thread of an AMD EPYC (Zen 4)
with MKL 2024.2 and oneDNN 3.12, a 1536 x 576 weight that is not in any cache: one token takes 0.53 of the time of
``torch.nn.functional.linear`` with ``blas_transposed``, eight take 2.35 times as long, and 1.33 with ``onednn``. On an
Intel Xeon the order is different. So :class:`LinearAutotuner` times the ways where they are needed, and chooses the
fastest. bfloat16 and GPUs need none of this.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeGuard

import torch
import torch.nn as nn
from torch.nn.functional import linear as blas
from transformers.pytorch_utils import Conv1D

from ..forks import new_lock
from ..graphs.shapes import tracing
from ..instance_forward import Forward
from ..internals import ADAPTED
from ..module_tools import all_modules
from ..patching import InstanceForwards, SharedChange

# Weights with fewer numbers stay with BLAS: a 344 x 128 one takes 10 to 30 µs, of which the best way would save less
# than the choice costs; of a 192 x 576 one (46 µs) it saves a third.
_SMALLEST = 2**16
# Token counts for which ways are timed; other counts use the way of the next larger one.
_COUNTS = (1, 2, 3, 4, 8, 16, 32)
# How often each way runs before one is chosen; the first run does not count.
_TURNS = 3
# Ways are timed again, since what ran beside them may have decided, once the chosen one was in use for so long that it
# costs such a share of the time; then after twice as long, and so on. In twelve calls of 120 tokens (SmolLM2-135M,
# float32, one thread of a busy Intel Xeon) 20 looks took 0.12 % of the time, and three of 35 choices changed.
_PRICE = 0.01
# How many of a weight's numbers one timed run multiplies per thread (1 ms), and the factor of which its number of rows
# is a multiple, as in most weights. A third of a 2688 x 1024 weight takes less than a third of the time with BLAS and
# more than that with oneDNN.
_PIECE = 3 * 2**20
_ROWS = 64


def blas_transposed(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """BLAS with the tokens as the right-hand matrix, so that it does not pack the weight for them."""
    out, width = weight.shape
    if input.shape[0] == 1 and out % 2 == 0:
        # For a single column BLAS would be called for a vector, which takes up to twice as long; two halves avoid that.
        product = torch.bmm(weight.view(2, out // 2, width), input.t().expand(2, width, 1)).view(1, out)
    else:
        product = torch.mm(weight, input.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


def _onednn(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


# The same as an operation that graphs call unchanged: inductor takes torch's own only for weights that it has packed.
# It lives as long as the process, even if this module is imported or reloaded again: torch takes each name once.
_ops: Any = torch.ops.hf_selfspec
if not hasattr(_ops, "library"):
    _ops.library = _library = torch.library.Library("hf_selfspec", "FRAGMENT")
    _library.define("onednn(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
    _library.impl("onednn", _onednn, "CPU")

    @torch.library.register_fake("hf_selfspec::onednn", lib=_library)
    def _onednn_shape(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return input.new_empty(input.shape[0], weight.shape[0])


def onednn(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's kernels for few rows, which torch uses only for bfloat16."""
    product: torch.Tensor = (_ops.onednn if tracing.now else _onednn)(input, weight, bias)
    return product


def onednn_transposed(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN with the two matrices swapped: the weight is read once, in order, for up to 16 tokens."""
    # With gaps in the right-hand matrix it takes a hundred times as long.
    product = onednn(weight, input.contiguous(), None).t().contiguous()
    return product if bias is None else product.add_(bias)


# Maps input [n, i], weight [o, i] and bias [o] or None to [n, o], contiguous.
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# The ways that this build of torch has.
WAYS: tuple[Way, ...] = (blas, blas_transposed)
if torch.backends.mkldnn.is_available():
    WAYS += (onednn, onednn_transposed)


@dataclass
class ChosenWay:
    """The fastest way for a shape of weight, a number of tokens and of threads, by the shortest times so far."""

    seconds: dict[Way, float] = field(default_factory=dict)
    way: Way = blas
    left: int = 0  # uses until ways are timed again; counted without a lock
    times: int = 0  # how often they were


class LinearAutotuner:
    """Knows the fastest way for each shape of weight, number of tokens and of threads. It is replaced only by a way
    that was faster than it has ever been, and ways are seldom timed: equal calls have equal results."""

    def __init__(self, ways: Sequence[Way] = WAYS, clock: Callable[[], float] = perf_counter) -> None:
        self._ways = ways
        self._clock = clock
        self._lock = new_lock()
        self._choices: dict[tuple[torch.Size, int, int], ChosenWay] = {}

    def choice(self, count: int, weight: torch.Tensor, alike: Sequence[torch.Tensor]) -> ChosenWay:
        """Returns the choice for 1 to 32 tokens, of which this is a use; ``alike`` are all weights of this shape, in
        order of use."""
        with self._lock:
            key = _key(count, weight)
            choice = self._choices.get(key) or ChosenWay()
            if choice.left <= 0:
                choice.left = 1 << 62  # other threads use it meanwhile
                try:
                    choice.left = self._time(choice, alike[0].new_ones(key[1], alike[0].shape[1]), weight, alike)
                except BaseException:  # interrupts, too
                    choice.left = 0
                    raise
                self._choices[key] = choice
            choice.left -= 1
        return choice

    def way_for(self, count: int, weight: torch.Tensor) -> Way | None:
        choice = self._choices.get(_key(count, weight))
        return None if choice is None else choice.way

    def _time(self, choice: ChosenWay, input: torch.Tensor, weight: torch.Tensor, alike: Sequence[torch.Tensor]) -> int:
        """Chooses a way, and returns after how many uses to time again."""
        place = next((place for place, other in enumerate(alike, start=1) if other is weight), 0)
        pieces = itertools.cycle(_pieces([*alike[place:], *alike[:place]]))
        for turn in range(_TURNS):
            for way in self._ways:
                piece = next(pieces)
                begun = self._clock()
                way(input, piece, None)
                if turn:  # the first run of a shape takes longer: oneDNN compiles (0.3 to 0.5 ms)
                    # Disturbances only make a run longer.
                    choice.seconds[way] = min(self._clock() - begun, choice.seconds.get(way, math.inf))
        choice.way = min(self._ways, key=lambda way: choice.seconds[way])
        choice.times += 1
        seconds_of_use = max(choice.seconds[choice.way], 1e-9) * weight.numel() / piece.numel()
        return int(_TURNS * sum(choice.seconds.values()) / (_PRICE * seconds_of_use)) << choice.times - 1


def _key(count: int, weight: torch.Tensor) -> tuple[torch.Size, int, int]:
    return weight.shape, _COUNTS[bisect_left(_COUNTS, count)], torch.get_num_threads()


def _pieces(weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields one block of rows after another, as in a forward: at a weight's turn no cache holds it any more."""
    out, width = weights[0].shape
    rows = min(out, max(1, _PIECE * torch.get_num_threads() // width // _ROWS) * _ROWS)
    for weight in weights:
        for start in range(0, out - rows + 1, rows):
            yield weight[start : start + rows]


_fastest = LinearAutotuner()


def linear_layers(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Names ("index.path in it") and modules of all linear layers in these, but not of those that PEFT has added."""
    for index, layer in layers.items():
        tuned = [path for path, module in layer.named_modules() if hasattr(module, ADAPTED)]
        for path, module in layer.named_modules():
            outer = next((inside for inside in tuned if path.startswith(f"{inside}.")), None)
            if isinstance(module, (nn.Linear, Conv1D)) and (outer is None or path == f"{outer}.base_layer"):
                yield f"{index}.{path}", module


def is_served(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether ``module`` is a large enough float32 linear layer in CPU memory, unchanged by other code."""
    return type(module) is nn.Linear and "forward" not in module.__dict__ and _has_ways(module.weight)


def are_faster(modules: Iterable[nn.Module], count: int) -> bool:
    """Returns whether some of ``modules`` have a faster way than their own forward for ``count`` tokens."""
    if not 0 < count <= _COUNTS[-1]:
        return False
    return any(_fastest.way_for(count, module.weight) not in (None, blas) for module in filter(is_served, modules))


_installed = SharedChange()


def few_token_linears(model: nn.Module, is_active: Callable[[], bool]) -> AbstractContextManager[None]:
    """Returns a context in which the linear layers of ``model`` are faster for few tokens, see :func:`is_served`."""
    first = next(model.parameters())
    if not first.is_cpu or first.dtype is torch.bfloat16:
        return nullcontext()  # without looking at each layer

    def install(forwards: InstanceForwards) -> None:
        for module, forward in few_token_forwards(all_modules(model), is_active):
            forwards.replace(module, forward)

    return _installed.of(model, install)


def few_token_forwards(modules: Iterable[nn.Module], is_active: Callable[[], bool]) -> list[tuple[nn.Linear, Forward]]:
    """Returns forwards for those of ``modules`` that are served, faster for up to 32 tokens while ``is_active``."""
    modules = list(modules)
    parameters = (parameter for module in modules for parameter in module._parameters.values())
    if any(type(parameter) is not nn.Parameter and hasattr(parameter, "device_mesh") for parameter in parameters):
        return []  # whole weights exist only during a forward
    served = list(filter(is_served, modules))
    alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for module in served:
        alike[module.weight.shape].append(module.weight)
    return [(module, _few_tokens(module, module.forward, alike[module.weight.shape], is_active)) for module in served]


def _few_tokens(
    module: nn.Linear, original: Forward, alike: Sequence[torch.Tensor], is_active: Callable[[], bool]
) -> Callable[[torch.Tensor], torch.Tensor]:
    # Called for each layer of each forward, so everything possible is computed in advance.
    parameters, (out, width) = module._parameters, module.weight.shape
    most, chosen = _COUNTS[-1] * width, dict[tuple[int, int], ChosenWay]()
    threads = torch.get_num_threads

    def forward(input: torch.Tensor) -> torch.Tensor:
        choice, weight = chosen.get(key := (input.numel(), threads())), parameters.get("weight")
        if choice is not None:
            choice.left -= 1
            if choice.way is blas and choice.left >= 0 and weight is not None:
                # As the layer itself does, whoever calls it, without looking up its two attributes, which is slow.
                return blas(input, weight, parameters["bias"])
        if not is_active() or not 0 < key[0] <= most or input.dtype is not torch.float32:
            return original(input)
        if weight is None or not weight.is_cpu or not input.is_cpu or torch.is_autocast_enabled("cpu"):
            return original(input)
        if choice is None or choice.left < 0:
            if not tracing.now:  # a tensor without values cannot be timed
                choice = chosen[key] = _fastest.choice(key[0] // width, weight, alike)
            elif choice is None:
                return original(input)
        return choice.way(input.reshape(-1, width), weight, parameters["bias"]).view(*input.shape[:-1], out)

    return forward


class FewTokenLinear(nn.Linear):
    """A linear layer that is faster over few tokens where no gradients are needed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _has_ways(self.weight):
            return super().forward(input)
        return _few_tokens(self, super().forward, [self.weight], lambda: True)(input)


def _has_ways(weight: torch.Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.is_cpu and weight.dtype is torch.float32
    return plain and weight.is_contiguous() and weight.numel() >= _SMALLEST
