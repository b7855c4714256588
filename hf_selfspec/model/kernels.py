"""Transformers' functions for recurrences, which leave to the cache what a state is while it is ours.

A model's file calls its recurrence by the name of a function. While a model speculates, that name stands for a function
that hands the call to the state whose turn it is in this thread; without one it is the original.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from ..errors import UnsupportedModelError
from .forwards import InstanceForwards, SharedChange
from .recurrences.recurrence import Recurrence

# Takes the original function and the arguments of a call, and returns what the function would.
Run = Callable[..., Any]


class _Current(threading.local):
    run: Run | None = None
    calls = 0


_current = _Current()
_kernels = SharedChange()


def expect(run: Run) -> None:
    """Makes ``run`` what serves this thread's next calls of recurrences."""
    _current.run, _current.calls = run, 0


def served() -> int:
    """Ends that, and returns how many calls there were."""
    _current.run = None
    return _current.calls


@contextmanager
def none_expected_after() -> Iterator[None]:
    """Whatever happens inside, calls behind it go to the original functions."""
    try:
        yield
    finally:
        _current.run = None


@contextmanager
def served_kernels(model: nn.Module, recurrence: type[Recurrence] | None) -> Iterator[None]:
    """Puts the functions on, for all threads that use them, and takes them off again."""
    if recurrence is None:
        yield
        return
    (module,) = _modules(model, recurrence)
    with _kernels.of(module, lambda forwards: _serve(module, recurrence.kernel, forwards)):
        yield


def check_kernels(model: nn.Module, recurrence: type[Recurrence] | None) -> None:
    """Checks that the model's file has the one function that we know, as we know it.

    Raises:
        UnsupportedModelError: it has not.
    """
    if recurrence is None:
        return
    modules = _modules(model, recurrence)
    name = type(model).__name__
    if len(modules) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(modules)} files with a function {recurrence.kernel}, of which there has to be one. This "
            "version of transformers computes its recurrent states in a way that is not known here, so they cannot be "
            "taken back. Call generate without `assistant`."
        )
    parameters = tuple(inspect.signature(getattr(modules[0], recurrence.kernel)).parameters)
    if parameters != recurrence.parameters:
        raise UnsupportedModelError(
            f"the recurrence of {name}, {recurrence.kernel}, takes ({', '.join(parameters)}); known is "
            f"({', '.join(recurrence.parameters)}). Its states cannot be taken back. Call generate without `assistant`."
        )


def _modules(model: nn.Module, recurrence: type[Recurrence]) -> Sequence[Any]:
    """The Python modules of the model's parts that have the function."""
    names = {type(part).__module__ for part in model.modules()}
    found = (sys.modules.get(name) for name in sorted(names))
    return [module for module in found if hasattr(module, recurrence.kernel)]


def _serve(module: Any, name: str, forwards: InstanceForwards) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _current.run is None:
            return original(*args, **kwargs)
        _current.calls += 1
        return _current.run(original, *args, **kwargs)

    forwards.set(module, name, kernel)
