"""Leaves of captured forwards as one kernel each: RMSNorms, the rotation of queries and keys, and what is between the
linear layers of an MLP. They are most of the kernels of a forward, whose number is what a small model's takes.

When a graph's forward first runs, each leaf is compared with what the model's own code makes of the same input. Where
it rounds as that does, one of :mod:`.triton_leaves` runs in its place in the graph. Everything else, and every other
forward, runs the model's own code.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.nn as nn

from ..graphs.captures import capturing
from ..module_tools import ModelView
from ..patching import Forward, InstanceForwards, shared_change
from ..transfer import read

_ROTATION, _MLP = "apply_rotary_pos_emb", ("gate_proj", "act_fn", "up_proj", "down_proj")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Results of 16 bits that lie between two numbers may round otherwise with another order of a sum: none of 2,000 of a
# norm does, and with one rounding less a quarter. The share that may, by how many roundings; those of float32; and the
# share of the largest result that counts for nothing.
_TIES, _ROUNDINGS, _OF_FLOAT32, _NOTHING = 1 / 64, 2.0, 16.0, 2.0**-22

_logger = logging.getLogger(__name__)


@contextmanager
def fused_leaves(model: nn.Module, view: ModelView) -> Iterator[None]:
    """Encloses a forward that is captured, whose leaves are single kernels if there is Triton."""
    with _fused(model, view):
        yield
    leaves = capturing.now or {}
    if compared := {called: forms for called, forms in leaves.items() if isinstance(forms, dict)}:
        agree = iter(read(torch.stack([is_equal for forms in compared.values() for is_equal in forms.values()]))[0])
        for called, forms in compared.items():
            leaves[called] = next(iter([form for form in forms if next(agree)]), None)


@shared_change
def _fused(forwards: InstanceForwards, model: nn.Module, view: ModelView) -> None:
    try:
        kernels = importlib.import_module(".triton_leaves", __package__)
    except Exception as error:  # also where an installed Triton does not work
        _logger.info(f"{type(model).__name__}: leaves are not fused, since Triton cannot be imported: {error!r}.")
        return
    for name in {type(module).__module__ for module in view.modules}:
        if hasattr(file := sys.modules.get(name), _ROTATION):
            forwards.enter_context(_fused_rotation(file, kernels))
    for module in view.modules:
        if module._modules.keys() == set(_MLP):
            forwards.replace(module, _mlp(module, kernels))
        elif (epsilon := _epsilon_of(module)) is not None:
            norm = partial(kernels.norm, module.weight, epsilon)
            forwards.replace(module, _leaf(id(module), module.forward, norm, kernels.NORMS))


@shared_change
def _fused_rotation(forwards: InstanceForwards, file: Any, kernels: Any) -> None:
    """Of all models of a file."""
    original = getattr(file, _ROTATION)
    forwards.put(vars(file), _ROTATION, wraps(original)(_leaf(original, original, kernels.rotate, (True, False))))


def _mlp(module: nn.Module, kernels: Any) -> Forward:
    """What its parts give: first to see whether it consists of them, with a product of theirs that is a leaf."""
    gate, activation, up, down = (module.get_submodule(name) for name in _MLP)

    def multiplied(gated: torch.Tensor, other: torch.Tensor) -> Any:
        return activation(gated) * other

    is_silu = type(activation).__name__.startswith("SiLU")
    product = _leaf((id(module), _MLP), multiplied, kernels.activate, (is_silu,))
    return _leaf(id(module), module.forward, lambda _, x: down(product(gate(x), up(x))), (True,))


def _epsilon_of(module: nn.Module) -> float | None:
    """Returns the epsilon of what may be an RMSNorm, ``None`` for other modules, and torch's own, which is a kernel."""
    if module._parameters.keys() != {"weight"} or module._buffers or module._modules or isinstance(module, nn.RMSNorm):
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _leaf(key: Hashable, original: Forward, fused: Callable[..., Any], forms: Iterable[Any]) -> Forward:
    """What calls ``original``; in a forward that is captured ``fused``, with that of the ``forms`` as its first
    argument that agreed in the graph's first forward, wherever the leaf ``key`` was called with such shapes. No key is
    a module, since graphs of weights that a model no longer has would keep them."""

    def leaf(*args: Any, **kwargs: Any) -> Any:
        leaves = capturing.now
        if leaves is None or kwargs or not all(map(_is_served, args)):
            return original(*args, **kwargs)
        called = (key, *(x.shape for x in args))
        if not isinstance(form := leaves.get(called, {}), dict):
            return original(*args) if form is None else fused(form, *args)
        results, are_equal = original(*args), form
        if not torch.cuda.is_current_stream_capturing():  # where nothing can be compared
            for form in forms:
                are_equal[form] = _agree(partial(fused, form, *args), results) & are_equal.get(form, True)
            leaves[called] = are_equal
        return results

    return leaf


def _is_served(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cuda and x.dtype in _DTYPES and x.numel() > 0 and x.stride(-1) == 1


def _agree(fused: Callable[[], Any], expected: Any) -> torch.Tensor:
    """Whether the results of a kernel are those expected, but for ties."""
    expected = expected if isinstance(expected, tuple) else (expected,)
    try:
        results = fused()
        pairs = zip(results if isinstance(results, tuple) else (results,), expected, strict=True)
        return torch.stack([_is_equal(*pair) for pair in pairs]).all()
    except Exception as error:  # for these inputs, or of Triton and what that needs of a machine
        _logger.debug(f"A kernel does not run: {error!r}.")
        return expected[0].new_zeros((), dtype=torch.bool)


def _is_equal(values: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    if (values.shape, values.dtype) != (expected.shape, expected.dtype):
        raise ValueError("the results are of another kind")
    apart, size = (values.float() - expected.float()).abs(), expected.float().abs()
    is_float32, eps = expected.dtype is torch.float32, torch.finfo(expected.dtype).eps
    near = apart <= (_OF_FLOAT32 if is_float32 else _ROUNDINGS) * eps * size + _NOTHING * size.max()
    return near.all() if is_float32 else near.all() & ((apart > 0).sum() <= max(_TIES * apart.numel(), 1))
