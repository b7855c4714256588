"""Linear layers over a handful of tokens in float32 on a CPU.

Drafting and verification run one to 32 tokens at once. Most of the time then goes into streaming the weights, and how
well a library does that depends on the processor, the shape and the number of tokens. One thread of an AMD EPYC (Zen 4)
with MKL 2024.2 and oneDNN 3.12, a 1536 x 576 weight that is not in any cache: one token takes 0.53 of the time of
``torch.nn.functional.linear`` with ``blas_transposed``, eight take 2.35 times as long, and 1.33 with ``onednn``. On an
Intel Xeon the order is different. So :class:`LinearAutotuner` times the ways where they are needed, once in a process,
and layers for which no way is faster than torch's own are left alone. bfloat16 and GPUs need none of this.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn as nn
from torch.nn.functional import linear as blas
from transformers.pytorch_utils import Conv1D

from .forks import new_lock
from .internals import ADAPTED
from .module_tools import ModelView
from .patching import Forward, InstanceForwards, shared_change

# Weights with fewer numbers stay with BLAS: a 344 x 128 one takes 10 to 30 µs, of which the best way would save less
# than the choice costs; of a 192 x 576 one (46 µs) it saves a third.
_SMALLEST = 2**16
# Shapes whose weights have fewer in all do, too: when such a weight is timed again, caches hold it, unlike in a forward
# (a 4096 x 128 one takes 60 µs then and 131 to 197 otherwise, and another way is the best).
_FEWEST = 2**21
# Token counts for which ways are timed; other counts use the way of the next larger one.
_COUNTS = (1, 2, 3, 4, 8, 16, 32)
# Those for which the seconds of all linear layers of a model are known before its first draft; others lie on lines.
_PRICED = (1, 4, 16)
# The share of one token's time for each further one from which on the next tokens are taken to cost as much.
_STEEP = 0.6
# How many of a weight's numbers one timed run multiplies per thread (1 ms), and the factor of which its number of rows
# is a multiple, as in most weights. A third of a 2688 x 1024 weight takes less than a third of the time with BLAS and
# more than that with oneDNN.
_PIECE = 3 * 2**20
_ROWS = 64
# How often each way is timed. Disturbances, and what libraries prepare in a first run, only make a time longer, so the
# shortest counts.
_TIMES = 3


def blas_transposed(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """BLAS with the tokens as the right-hand matrix, so that it does not pack the weight for them."""
    out, width = weight.shape
    if input.shape[0] == 1 and out % 2 == 0:
        # For a single column BLAS would be called for a vector, which takes up to twice as long; two halves avoid that.
        product = torch.bmm(weight.view(2, out // 2, width), input.t().expand(2, width, 1)).view(1, out)
    else:
        product = torch.mm(weight, input.t()).t().contiguous()
    return product if bias is None else product.add_(bias)


def onednn(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's kernels for few rows, which torch uses only for bfloat16."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
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


class LinearAutotuner:
    """Knows the fastest way for each shape of weight, number of threads and of tokens."""

    def __init__(self, ways: Sequence[Way] = WAYS, clock: Callable[[], float] = perf_counter) -> None:
        self._ways, self._clock, self._lock = tuple(ways), clock, new_lock()
        self._chosen: defaultdict[Any, dict[int, tuple[Way, float]]] = defaultdict(dict)

    def chosen(self, weight: torch.Tensor) -> dict[int, tuple[Way, float]]:
        """Returns the ways that were chosen for such a weight so far, by the numbers of tokens that they are for, each
        with the seconds that it takes."""
        return self._chosen[weight.shape, weight.dtype, torch.get_num_threads()]

    def way(self, count: int, weight: torch.Tensor, alike: Sequence[torch.Tensor]) -> tuple[Way, float]:
        """Returns the way for 1 to 32 tokens, and its seconds; ``alike`` are all weights of this shape, in order of
        use."""
        count, chosen = _COUNTS[bisect_left(_COUNTS, count)], self.chosen(weight)
        with self._lock:
            if count not in chosen:
                input, seconds = weight.new_ones(count, weight.shape[1]), dict.fromkeys(self._ways, math.inf)
                after = next((place for place, other in enumerate(alike, start=1) if other is weight), 0)
                pieces = itertools.cycle(_pieces([*alike[after:], *alike[:after]]))
                for way in self._ways * _TIMES:
                    piece, begun = next(pieces), self._clock()
                    way(input, piece, None)
                    seconds[way] = min(seconds[way], self._clock() - begun)
                best = min(seconds, key=seconds.__getitem__)
                chosen[count] = best, seconds[best] * len(weight) / len(piece)
        return chosen[count]


def _pieces(weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields one block of rows after another, as in a forward: at a weight's turn no cache holds it any more."""
    out, width = weights[0].shape
    rows = min(out, max(1, _PIECE * torch.get_num_threads() // width // _ROWS) * _ROWS)
    for weight in weights:
        for start in range(0, out - rows + 1, rows):
            yield weight[start : start + rows]


_fastest, _usual = LinearAutotuner(), LinearAutotuner((blas,))


def added_seconds(view: ModelView) -> Callable[[int], float] | None:
    """Returns how many seconds longer the linear layers of a model on a CPU run over so many tokens than over one,
    timed once in a process for each shape; ``None`` where most of its weights are in other modules."""
    alike, other = defaultdict[Any, list[torch.Tensor]](list), 0
    for module in view.modules:
        for weight in module.__dict__.get("_parameters", {}).values():
            if type(module) is nn.Linear and type(weight) is nn.Parameter and weight.is_cpu and weight.numel():
                alike[weight.shape, weight.dtype].append(weight)
            elif weight is not None and weight.dim() > 1 and not isinstance(module, nn.Embedding):
                other += weight.numel()
    if torch.is_autocast_enabled("cpu") or sum(len(each) * each[0].numel() for each in alike.values()) <= other:
        return None
    tuners = [(_fastest if _are_timed(weights) else _usual, weights) for weights in alike.values()]
    seconds, slope = list[float](), 0.0
    for before, count in zip((0, *_PRICED), _PRICED, strict=False):
        if slope > _STEEP * sum(seconds[:1]):
            seconds.append(seconds[-1] + slope * (count - before))
            continue
        seconds.append(sum(len(each) * tuner.way(count, each[0], each)[1] for tuner, each in tuners))
        slope = (seconds[-1] - seconds[-2]) / (count - before) if before else 0.0

    def added(tokens: int) -> float:
        beyond = max(tokens - _PRICED[-1], 0) * slope
        return float(np.interp(tokens, _PRICED, seconds)) + beyond - seconds[0]

    return added


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
    return type(module) is nn.Linear and "forward" not in module.__dict__ and _has_ways(module._parameters["weight"])


def _has_ways(weight: Any) -> bool:
    plain = type(weight) is nn.Parameter and weight.is_cpu and weight.dtype is torch.float32
    return plain and weight.numel() >= _SMALLEST and weight.is_contiguous()


def _are_timed(weights: Sequence[torch.Tensor]) -> bool:
    return _has_ways(weights[0]) and sum(weight.numel() for weight in weights) >= _FEWEST


@shared_change
def few_token_linears(
    forwards: InstanceForwards, model: nn.Module, is_active: Callable[[], bool], view: ModelView | None = None
) -> None:
    """Makes the linear layers of ``model`` that are served faster for up to 32 tokens while ``is_active``."""
    first = next(model.parameters())
    if not first.is_cpu or first.dtype is torch.bfloat16:
        return  # without a look at each layer
    view = ModelView(model) if view is None else view
    if any(hasattr(weight, "device_mesh") for weight in view.weights.values()):
        return  # whole weights exist only during a forward
    alike: dict[torch.Size, dict[nn.Module, Any]] = defaultdict(dict)  # layers with their weights
    for module in view.modules:
        if type(module) is nn.Linear and is_served(module):
            weight: Any = module._parameters["weight"]
            alike[weight.shape][module] = weight
    for layers in alike.values():
        weights = list(layers.values())
        if not _are_timed(weights):
            continue
        few_tokens = _few_tokens(weights, is_active)
        # Where none of the ways that were chosen is faster than torch's own, the last layer alone, which all
        # verifications run, chooses for further numbers of tokens.
        is_slower = {way for way, _ in _fastest.chosen(weights[0]).values()} == {blas}
        for layer in list(layers)[-1:] if is_slower else layers:
            forwards.replace(layer, few_tokens(layer._parameters, layer.forward))


def _few_tokens(
    alike: Sequence[torch.Tensor], is_active: Callable[[], bool]
) -> Callable[[dict[str, Any], Forward], Forward]:
    """Returns what makes the forward of a layer, whose weight is one of those that are ``alike``."""
    # Called for each layer of each forward, so everything possible is computed in advance.
    (out, width), chosen, threads = alike[0].shape, dict[tuple[int, int], Way](), torch.get_num_threads
    most = _COUNTS[-1] * width

    def of_layer(parameters: dict[str, Any], original: Forward) -> Forward:
        def forward(input: torch.Tensor) -> torch.Tensor:
            way, weight = chosen.get(key := (input.numel(), threads())), parameters.get("weight")
            if way is blas and weight is not None:
                # As the layer itself does, whoever calls it, without looking up its two attributes, which is slow.
                return blas(input, weight, parameters["bias"])
            if not is_active() or not 0 < key[0] <= most or input.dtype is not torch.float32:
                return original(input)
            if weight is None or not weight.is_cpu or not input.is_cpu or torch.is_autocast_enabled("cpu"):
                return original(input)
            if way is None:
                way, _ = _fastest.way(key[0] // width, weight, alike)
                chosen[key] = way
            return way(input.reshape(-1, width), weight, parameters["bias"]).view(*input.shape[:-1], out)

        return forward

    return of_layer


class FewTokenLinear(nn.Linear):
    """A linear layer that is faster over few tokens where no gradients are needed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _has_ways(self.weight):
            return super().forward(input)
        return _few_tokens([self.weight], lambda: True)(self._parameters, super().forward)(input)
