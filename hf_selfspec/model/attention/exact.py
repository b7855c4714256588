"""Forwards over several tokens with the results of one token after another, bit for bit, in bfloat16 too.

Kernels may round a token's results differently when others go through with it: attention over several queries does, and
linear layers do, depending on processor, shape and number of tokens. So each query has the keys and the mask that
``generate`` gives it, in a call of its own, and linear layers take no more tokens at once than leave the results of
each as they are alone. Other modules with matrices, such as experts, take one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeGuard

import torch
import torch.nn as nn
from torch.nn.functional import linear, pad

from ..layout import StepTokens
from ..transfer import upload

# Tokens that go through together at most; counts up to here are tried out.
MOST_TOKENS = 32
# A weight of up to so many numbers is replaced in trials by a random one, whose products cancel each other.
_SMALL = 2**22
# How many results of a larger weight are compared: on an AMD EPYC one in 4,600 differs.
_COMPARED = 2**15

# A part of the cache's slots, and the mask of the keys in them.
View = tuple[slice | torch.Tensor, torch.Tensor | None]


def views_of(
    step_tokens: StepTokens,
    original: Callable[..., Any],
    offset: int = 0,
    limit: int | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> list[View]:
    """Returns for each token of one row the slots whose keys ``generate`` has when it reaches that token, counted from
    slot ``offset`` of the text and at most ``limit``, and the mask that transformers' ``original`` makes for it."""
    root, nodes, device = step_tokens.starts[0] - step_tokens.first_node, step_tokens.nodes, step_tokens.device
    text_end, end = root if nodes is None else root - nodes.hidden, step_tokens.first_node + step_tokens.shape[1]
    parents = range(-1, end - 1) if nodes is None else nodes.parents[0]
    views: list[View] = []
    for index in range(step_tokens.first_node, end):
        path = [index]  # back to the text
        while (parent := parents[path[-1]]) >= 0:
            path.append(parent)
        length = text_end + len(path)
        kept = min(length - offset, *(size for size in (local_size, limit) if size is not None), length)
        sizes = {"q_length": 1, "kv_length": kept, "q_offset": length - 1, "kv_offset": length - kept}
        mask = original(**kwargs | sizes, local_size=local_size)
        if text_end == root and index < len(path):
            views.append((slice(length - kept - offset, length - offset), mask))
        else:
            slots = torch.cat([torch.arange(offset, text_end, device=device), upload(path[::-1], device) + root])
            views.append((slots[-kept:] - offset, mask))
    return views


def attention_of_each(
    original: Callable[..., Any],
    views: Sequence[View],
    module: nn.Module,
    query: torch.Tensor,  # [1, k*g, s, h]
    key: torch.Tensor,  # [1, k, n, h], as the values
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one token after another by transformers' ``original`` function. (Heads laid out as queries of
    their key head take a sixth of its time in bfloat16 on a CPU, but round differently over 200 keys and more.)"""
    outputs = [
        original(module, token, key[:, :, slots], value[:, :, slots], mask, *args, **kwargs)[0]
        for token, (slots, mask) in zip(query.split(1, dim=2), views, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


# What multiplies the matrices of a device, by torch's names.
_LIBRARIES = {"cuda": "cuda", "cpu": "mkldnn", "xpu": "mkldnn"}
_FULL = "none", "ieee"


def float32_precisions() -> dict[str, str]:
    """How each library may multiply matrices of float32. (Convolutions have flags of their own, but those between
    layers are depthwise, which torch computes itself, and others see the prompt as in plain ``generate``.)"""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
    # Before torch 2.9 there was one precision, whose function is an error once a newer one was set.
    precision = {"highest": "ieee", "high": "tf32", "medium": "bf16"}[torch.get_float32_matmul_precision()]
    return dict.fromkeys(("cuda", "mkldnn"), precision)


def reduced_precision(device: torch.device) -> str:
    """The precision below float32 in which a device may multiply its matrices, empty if there is none. Whether kernels
    make use of it depends on the machine and on shapes."""
    precisions = float32_precisions()
    library = _LIBRARIES.get(device.type)
    names = list(precisions.values()) if library is None else [precisions[library]]
    return next((name for name in names if name not in _FULL), "")


def has_matrices(module: nn.Module) -> bool:
    """Whether a module multiplies by matrices of its own, so that a token's results may depend on the others."""
    if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd)):
        return False
    return any(value is not None and value.dim() > 1 for value in module._parameters.values())


class ExactForward:
    """A module's forward that, while ``when()``, takes no more tokens at once than leave the results of each as they
    are alone."""

    def __init__(self, module: nn.Module, when: Callable[[], bool]) -> None:
        self._module, self._original, self._when = module, module.forward, when

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results for states ``[b, s, ...]`` or ``[s, d]``; other tensors may have a part for each token, too."""
        if not self._when():
            return self._original(*args, **kwargs)
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        dim, module = min(1, first.dim() - 2), self._module
        tokens = first.shape[dim]
        if tokens == 1 or (_is_linear(module) and are_alike(first, dim, module)):
            return self._original(*args, **kwargs)

        def parts_of(value: Any) -> Iterable[Any]:
            is_each = isinstance(value, torch.Tensor) and value.dim() > dim and value.shape[dim] == tokens
            return value.split(size, dim) if is_each else repeat(value)

        size, count = -(-tokens // 2) if _is_linear(module) else 1, len(args)
        calls = zip(*map(parts_of, (*args, *kwargs.values())), strict=False)
        results = [self(*call[:count], **dict(zip(kwargs, call[count:], strict=True))) for call in calls]
        return _joined(results, dim)


def _joined(pieces: list[Any], dim: int) -> Any:
    """Joins results along the tokens; modules that take ``[b, s, d]`` may return ``[b * s, d]``."""
    if isinstance(pieces[0], tuple):
        return tuple(_joined(list(parts), dim) for parts in zip(*pieces, strict=True))
    if not isinstance(pieces[0], torch.Tensor):
        return pieces[0]
    return torch.cat(pieces, dim=min(dim, max(pieces[0].dim() - 2, 0)))


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


# Whether rows have the results of each alone, by the shapes of input and weight, dtype, device, bias and threads.
_alike: dict[tuple[Any, ...], bool] = {}


def are_alike(states: torch.Tensor, dim: int, module: nn.Linear) -> bool:
    """Whether a layer over states of this shape has the results of each token alone."""
    weight, bias = module.weight, module.bias
    key = states.shape, weight.shape, states.dtype, weight.device, bias is None, torch.get_num_threads()
    if key not in _alike:
        added = None if bias is None else torch.zeros_like(bias)
        results = (
            (linear(token, tried, added), linear(token.expand_as(states).contiguous(), tried, added))
            for token, tried in _trials(states, dim, weight)
        )
        _alike[key] = all(torch.equal(together, alone.expand_as(together)) for alone, together in results)
    return _alike[key]


def _trials(states: torch.Tensor, dim: int, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of tokens and weights whose products show a change in the order of additions."""
    out, width = weight.shape
    shape = list(states.shape)
    shape[dim], drawn = 1, partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    if weight.numel() > _SMALL:
        yield from ((drawn(shape).to(states), weight) for _ in range(-(-_COMPARED // out)))
        return
    # Products that cancel each other leave nothing but what rounding has added, in the order of the additions.
    half, is_odd = divmod(width, 2)
    columns, row = drawn(out, half), drawn(*shape[:-1], half)
    doubled = pad(torch.cat([columns, columns], dim=-1), (0, is_odd)).to(weight)
    yield pad(torch.cat([row, -row], dim=-1), (0, is_odd)).to(states), doubled
