"""Replaces transformers' functions for recurrences and convolutions, so that our cache keeps their states.

A model's file calls its recurrence, and its convolutions, by the name of a function. While a model speculates, that
name refers to a function that passes the call on to the state whose turn it is in this thread; if there is none, to the
original function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ..modules import all_modules
from ..patching import InstanceForwards, PerThread, SharedChange
from . import SERVED

# Takes the original function and the arguments of a call, and returns what the function would return.
Run = Callable[..., Any]

CONVOLUTION = "causal_conv1d_fn"
_FIRST_OF_CONVOLUTION = ("hidden_states", "weight", "bias")


@dataclass
class _Turn:
    """What handles the next calls in a forward: those of a recurrence until it ends, one of a convolution."""

    recurrence: Run | None = None
    calls = 0
    convolution: Run | None = None


_turns = PerThread[_Turn]()
_served = SharedChange()


def expect_recurrence(run: Run) -> None:
    """Makes ``run`` handle the next calls of recurrences in this thread's forward."""
    turn = _turn()
    turn.recurrence, turn.calls = run, 0


def end_recurrence() -> int:
    """Passes further calls to the original function, and returns how many calls there were."""
    turn = _turn()
    turn.recurrence = None
    return turn.calls


def expect_convolution(run: Run) -> None:
    """Makes ``run`` handle the next call of a convolution; it is an error if the last one that was expected is due."""
    turn = _turn()
    _check_convolution(turn)
    turn.convolution = run


def _turn() -> _Turn:
    assert _turns.now is not None, "states are updated outside of a forward"
    return _turns.now


def _check_convolution(turn: _Turn) -> None:
    if turn.convolution is not None:
        raise UnsupportedModelError(
            "the model computes a convolution in a way that is not known here, such as a kernel of its own, so drafted "
            "siblings cannot be told apart. Call generate without `assistant`."
        )


@contextmanager
def turns() -> Iterator[None]:
    """Encloses a forward: whatever happens inside, later calls go to the original functions."""
    turn = _Turn()
    with _turns.during(turn):
        yield
        _check_convolution(turn)


@contextmanager
def served_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Installs the functions, for all threads that use them, and removes them afterwards."""
    with ExitStack() as stack:
        if model.config.model_type in SERVED:
            recurrence = SERVED[model.config.model_type]
            for module in _modules(model, CONVOLUTION):
                stack.enter_context(_served.of(module, functools.partial(_serve, module, recurrence)))
        yield


def check_kernels(model: PreTrainedModel) -> None:
    """Checks that the file of a model with recurrent states has the functions and parameters that we support."""
    if model.config.model_type not in SERVED:
        return
    recurrence = SERVED[model.config.model_type]
    modules = _modules(model, CONVOLUTION)
    first = _FIRST_OF_CONVOLUTION
    known = len(modules) == 1 and _parameters(modules[0], CONVOLUTION)[: len(first)] == first
    if known and recurrence is not None:
        known = _parameters(modules[0], recurrence.kernel) == recurrence.parameters
    if not known:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its recurrent states in a way that is not known here: this version of "
            "transformers has other functions for it, or functions with other parameters. So they cannot be rolled "
            "back when a draft is rejected. Call generate without `assistant`."
        )


def _modules(model: nn.Module, name: str) -> list[Any]:
    """The Python modules of the model's parts that have a function of that name."""
    names = {type(part).__module__ for part in all_modules(model)}
    found = (sys.modules.get(module) for module in sorted(names))
    return [module for module in found if callable(getattr(module, name, None))]


def _parameters(module: Any, name: str) -> tuple[str, ...]:
    found = getattr(module, name, None)
    return () if found is None else tuple(inspect.signature(found).parameters)


def _serve(module: Any, recurrence: Any, forwards: InstanceForwards) -> None:
    convolution = getattr(module, CONVOLUTION)

    @functools.wraps(convolution)
    def convolve(*args: Any, **kwargs: Any) -> Any:
        turn = _turns.now
        if turn is None or turn.convolution is None:
            return convolution(*args, **kwargs)
        run, turn.convolution = turn.convolution, None
        return run(convolution, *args, **kwargs)

    forwards.set(module, CONVOLUTION, convolve)
    if recurrence is None:
        return
    kernel = getattr(module, recurrence.kernel)

    @functools.wraps(kernel)
    def recur(*args: Any, **kwargs: Any) -> Any:
        turn = _turns.now
        if turn is None or turn.recurrence is None:
            return kernel(*args, **kwargs)
        turn.calls += 1
        return turn.recurrence(kernel, *args, **kwargs)

    forwards.set(module, recurrence.kernel, recur)
