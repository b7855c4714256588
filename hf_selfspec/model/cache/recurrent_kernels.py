"""Replaces transformers' functions for recurrences and convolutions, so that our cache keeps their states.

A model's file calls its recurrence, and its convolutions, by the name of a function. While a model speculates, that
name refers to a function that passes the call on to the state whose turn it is in this thread; if there is none, to the
original function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from ...errors import unsupported
from ..patching import InstanceForwards, PerThread, shared_change
from .recurrence import GatedDelta, KimiDelta, Recurrence, SelectiveScan, StateSpace

RECURRENCES: tuple[type[Recurrence], ...] = (GatedDelta, KimiDelta, StateSpace, SelectiveScan)

# Takes the original function and the arguments of a call, and returns what that function would.
Run = Callable[..., Any]

CONVOLUTION = "causal_conv1d_fn"
_FIRST_OF_CONVOLUTION = ("hidden_states", "weight", "bias")


# What handles the next calls of functions, by their names, in this thread's forward: those of a recurrence until it
# ends, one of a convolution.
Turns = dict[str, Run]
_turns = PerThread[Turns]()


def current_turns() -> Turns:
    """Returns those of this thread's forward."""
    assert _turns.now is not None, "states are updated outside of a forward"
    return _turns.now


def check_convolution(turns: Turns) -> None:
    """Checks that what was to handle a convolution has done so."""
    if CONVOLUTION in turns:
        raise unsupported(
            "the model computes a convolution in a way that is not known here, such as a kernel of its own, so "
            "drafted siblings cannot be told apart"
        )


@contextmanager
def turns() -> Iterator[None]:
    """Encloses a forward: whatever happens inside, later calls go to the original functions."""
    with _turns.during(of_forward := Turns()):
        yield
        check_convolution(of_forward)


@dataclass(frozen=True)
class Kernels:
    """The functions in a model's Python file that compute its recurrent states."""

    file: Any
    recurrence: type[Recurrence] | None  # whose function it is, None for convolutions alone

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> Kernels | None:
        """Finds the functions by names and parameters in the file of these layers, ``None`` without convolutions."""
        names = {base.__module__ for layer_class in set(map(type, layers)) for base in layer_class.__mro__}
        modules, first = map(sys.modules.get, sorted(names)), len(_FIRST_OF_CONVOLUTION)
        files = [file for file in modules if _parameters(file, CONVOLUTION)[:first] == _FIRST_OF_CONVOLUTION]
        if len(files) != 1:
            return None
        fitting = (each for each in RECURRENCES if _parameters(files[0], each.kernel) == each.parameters)
        return cls(files[0], next(fitting, None))

    def served(self) -> AbstractContextManager[None]:
        """Returns a context in which calls of the functions are redirected, for all threads that use them."""
        return _redirecting(self.file, self.recurrence)


@shared_change
def _redirecting(forwards: InstanceForwards, file: Any, recurrence: type[Recurrence] | None) -> None:
    for name in (CONVOLUTION, *([] if recurrence is None else [recurrence.kernel])):
        forwards.put(file.__dict__, name, _redirected(getattr(file, name), name))


def _parameters(module: Any, name: str) -> tuple[str, ...]:
    function = getattr(module, name, None)
    return () if function is None else tuple(inspect.signature(function).parameters)


def _redirected(kernel: Run, name: str) -> Run:
    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        turns = _turns.now or {}
        run = turns.pop(name, None) if name == CONVOLUTION else turns.get(name)
        return kernel(*args, **kwargs) if run is None else run(kernel, *args, **kwargs)

    return call
