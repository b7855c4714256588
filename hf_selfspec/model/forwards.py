"""Replaces forwards and attributes of single modules temporarily."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

Forward = Callable[..., Any]
_MISSING = object()
# Rounds without need after which a context is left. Entering and leaving that of partial forwards takes as long as
# these cost in 1.4 rounds (0.27 ms, 0.19 a round; 12 layers of width 256, bfloat16, one thread of a shared AMD EPYC).
_KEPT_ROUNDS = 3


class InstanceForwards:
    """Replaces attributes and remembers the earlier ones, so that :meth:`restore` leaves no trace.

    An existing instance ``forward`` (accelerate sets one) is restored, too.
    """

    def __init__(self) -> None:
        self.saved: list[tuple[Any, str, Any]] = []

    def replace(self, module: nn.Module, forward: Forward) -> None:
        """Makes ``forward`` what ``module(...)`` calls."""
        self.set(module, "forward", forward)

    def set(self, module: Any, name: str, value: Any) -> None:
        """Sets an attribute of ``module`` that is not a parameter, buffer or module."""
        self.saved.append((module, name, module.__dict__.get(name, _MISSING)))
        module.__dict__[name] = value

    def restore(self) -> None:
        """Restores everything, the last change first."""
        for module, name, value in reversed(self.saved):
            if value is _MISSING:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value
        self.saved.clear()


@dataclass
class _Shared:
    forwards: InstanceForwards = field(default_factory=InstanceForwards)
    users: int = 0


class SharedChange:
    """One kind of change to models, shared by threads: the first one makes it, the last one to leave undoes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()

    @contextmanager
    def of(
        self,
        model: Any,
        make: Callable[[InstanceForwards], None],
        add: Callable[[InstanceForwards], None] | None = None,
    ) -> Iterator[None]:
        """Keeps ``model`` changed, even if another thread leaves first; the change is undone after an exception, too.

        Args:
            model: the model, or a Python module.
            make: makes the change; a change that fails half-way is undone.
            add: makes what further changes this thread needs besides, which last as long.
        """
        with self._lock:
            shared = self._models.setdefault(model, _Shared())
            shared.users += 1
            with ExitStack() as undo:  # a half-made change is undone
                undo.callback(self._leave, model, shared)
                if shared.users == 1:
                    make(shared.forwards)
                if add is not None:
                    add(shared.forwards)
                undo.pop_all()
        try:
            yield
        finally:
            with self._lock:
                self._leave(model, shared)

    def _leave(self, model: Any, shared: _Shared) -> None:
        shared.users -= 1
        if shared.users == 0:
            shared.forwards.restore()
            self._models.pop(model, None)


class WhileNeeded:
    """A context that is entered when it is needed, and left after several rounds in a row that did not need it.

    Used as a context manager itself, it leaves the other one at its end.

    Args:
        make: returns the context.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[Any] | None = None
        self._unused = 0

    def need(self) -> None:
        """Enters the context, unless that was done."""
        self._unused = 0
        if self._entered is None:
            context = self._make()
            context.__enter__()
            self._entered = context

    def end_round(self) -> None:
        """Leaves the context if it has not been needed for a while."""
        if self._entered is not None:
            self._unused += 1
            if self._unused > _KEPT_ROUNDS:
                self._leave()

    def _leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)

    def __enter__(self) -> WhileNeeded:
        return self

    def __exit__(self, *error: Any) -> None:
        self._leave()


def states_of(output: Any) -> torch.Tensor:
    """Returns the states ``[b, s, d]`` in the output of a stack of layers."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return states


def with_states(output: Any, states: torch.Tensor) -> Any:
    """Returns the output of a stack of layers with other states."""
    if isinstance(output, tuple):
        return (states, *output[1:])
    return type(output)(**{**output, "last_hidden_state": states})


def with_arity(hidden: torch.Tensor, arity: int | None) -> Any:
    """Returns states as a block does whose output is a tuple of ``arity`` values, or, with ``None``, the states."""
    return hidden if arity is None else (hidden, *[None] * (arity - 1))


def residual_of(args: tuple[Any, ...], kwargs: dict[str, Any], forward: Callable[..., Any]) -> torch.Tensor | None:
    """Returns the residual among the arguments of a block, ``None`` if it takes none."""
    if "residual" in kwargs:
        return kwargs["residual"]
    names = getattr(getattr(forward, "__func__", forward), "__code__", None)
    parameters = names.co_varnames[1 : 1 + len(args)] if names is not None else ()
    return args[parameters.index("residual")] if "residual" in parameters else None
