"""Replaces transformers' functions for recurrences and convolutions, so that our cache keeps their states.

A model's file calls its recurrence, and its convolutions, by the name of a function. While a model speculates, that
name refers to a function that passes the call on to the state whose turn it is in this thread; if there is none, to the
original function.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
class Turn:
    """What handles the next calls in a forward: those of a recurrence until it ends, one of a convolution."""

    recurrence: Run | None = None
    convolution: Run | None = None

    def check(self) -> None:
        if self.convolution is not None:
            raise UnsupportedModelError(
                "the model computes a convolution in a way that is not known here, such as a kernel of its own, so "
                "drafted siblings cannot be told apart. Call generate without `assistant`."
            )


_turns = PerThread[Turn]()
_served = SharedChange()


def current_turn() -> Turn:
    """Returns the turn of this thread's forward."""
    assert _turns.now is not None, "states are updated outside of a forward"
    return _turns.now


@contextmanager
def turns() -> Iterator[None]:
    """Encloses a forward: whatever happens inside, later calls go to the original functions."""
    turn = Turn()
    with _turns.during(turn):
        yield
        turn.check()


def served_kernels(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Returns a context in which the functions are installed, for all threads that use them."""
    if model.config.model_type not in SERVED:
        return nullcontext()
    [module] = _modules(model)
    recurrence = SERVED[model.config.model_type]
    names = {"convolution": CONVOLUTION} | ({} if recurrence is None else {"recurrence": recurrence.kernel})

    def serve(forwards: InstanceForwards) -> None:
        for kind, name in names.items():
            forwards.set(module, name, _redirected(getattr(module, name), kind))

    return _served.of(module, serve)


def check_kernels(model: PreTrainedModel) -> None:
    """Checks that the file of a model with recurrent states has the functions and parameters that we support."""
    if model.config.model_type not in SERVED:
        return
    recurrence = SERVED[model.config.model_type]
    modules = _modules(model)
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


def _modules(model: nn.Module) -> list[Any]:
    """The Python modules of the model's parts that have a function for convolutions."""
    names = {type(part).__module__ for part in all_modules(model)}
    found = (sys.modules.get(module) for module in sorted(names))
    return [module for module in found if callable(getattr(module, CONVOLUTION, None))]


def _parameters(module: Any, name: str) -> tuple[str, ...]:
    found = getattr(module, name, None)
    return () if found is None else tuple(inspect.signature(found).parameters)


def _redirected(kernel: Run, kind: str) -> Run:
    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        turn = _turns.now
        if turn is None or (run := getattr(turn, kind)) is None:
            return kernel(*args, **kwargs)
        if kind == "convolution":
            turn.convolution = None
        return run(kernel, *args, **kwargs)

    return call
