"""Temporary changes: what a thread obeys, and what threads share, which the last one to leave undoes."""

import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.nn as nn

from ..errors import warn_once
from .modules import all_modules

Forward = Callable[..., Any]
_T = TypeVar("_T")
_P = ParamSpec("_P")


class PerThread(threading.local, Generic[_T]):
    """What the forwards of a thread obey, ``None`` for nothing; other threads are not affected."""

    now: _T | None = None

    @contextmanager
    def during(self, value: _T | None) -> Iterator[None]:
        before, self.now = self.now, value
        try:
            yield
        finally:
            self.now = before


class InstanceForwards(ExitStack):
    """Replaces forwards and other values; :meth:`close` restores earlier ones (accelerate sets forwards, too)."""

    users = 0  # of a change that threads share

    def __init__(self) -> None:
        super().__init__()
        self._wrapped: set[tuple[nn.Module, Any]] = set()

    def wrap(self, module: nn.Module, wrapper: Callable[[nn.Module], Forward]) -> None:
        """Makes what ``wrapper`` returns for a module what ``module(...)`` calls, once."""
        if (module, wrapper) not in self._wrapped:
            self._wrapped.add((module, wrapper))
            self.replace(module, wrapper(module))

    def replace(self, module: nn.Module, forward: Forward) -> None:
        self.put(module.__dict__, "forward", forward)

    def put(self, values: MutableMapping[str, Any], name: str, value: Any) -> None:
        is_new = name not in values
        self.callback(partial(values.pop, name, None) if is_new else partial(values.__setitem__, name, values[name]))
        values[name] = value


Change = Callable[[InstanceForwards], None]


class SharedChange:
    """One kind of change, shared by threads: the first one makes it, the last one to leave undoes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: weakref.WeakKeyDictionary[Any, InstanceForwards] = weakref.WeakKeyDictionary()

    @contextmanager
    def of(self, owner: Any, make: Change | None = None, add: Change | None = None) -> Iterator[None]:
        """Keeps ``owner`` changed until the last thread leaves: the first makes what ``make`` changes, each what
        ``add`` changes. A change that fails half-way is undone."""
        with self._lock:
            shared = self._owners.setdefault(owner, InstanceForwards())
            shared.users += 1
            with ExitStack() as undo:
                undo.callback(self._leave, owner, shared)
                if shared.users == 1 and make is not None:
                    make(shared)
                if add is not None:
                    add(shared)
                undo.pop_all()
        try:
            yield
        finally:
            with self._lock:
                self._leave(owner, shared)

    def _leave(self, owner: Any, shared: InstanceForwards) -> None:
        shared.users -= 1
        if shared.users == 0:
            shared.close()
            self._owners.pop(owner, None)


def shared_change(
    change: Callable[Concatenate[InstanceForwards, _P], None],
) -> Callable[_P, AbstractContextManager[None]]:
    """Makes a context, which threads share, of a function that changes the first of its further arguments."""
    shared = SharedChange()

    @wraps(change)
    def changed(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[None]:
        return shared.of(args[0] if args else change, lambda forwards: change(forwards, *args, **kwargs))

    return changed


_FLAG = "gradient_checkpointing"


def does_checkpoint(module: nn.Module) -> bool:
    """Returns whether a module would checkpoint now: it is switched on, and in training mode."""
    return module.training and bool(getattr(module, _FLAG, False))


@shared_change
def without_checkpointing(forwards: InstanceForwards, model: nn.Module) -> None:
    """Suspends gradient checkpointing, with which layers drop the KV cache, and warns of it; training mode stays."""
    found = [module for module in all_modules(model) if does_checkpoint(module)]
    if found:
        warn_once(
            f"{type(model).__name__} is in training mode with gradient checkpointing, where its layers drop the KV "
            "cache and generate alone sees only the last token. With `assistant`, checkpointing is suspended "
            "meanwhile, so the tokens are those of generate(use_cache=False). Call model.eval() before generating."
        )
    for module in found:
        forwards.put(module.__dict__, _FLAG, False)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, and restores the mode of each of its modules afterwards."""
    was_training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in was_training:
            module.training = True


@shared_change
def eagerly(forwards: InstanceForwards) -> None:
    """Bypasses compiled graphs, which would be traced again for each plan and each shape, in the whole process."""
    forwards.enter_context(torch.compiler.set_stance("force_eager"))


# The autocast that was on in a forward. Mixed precision of accelerate, and so of ``Trainer``, is wrapped around the
# model's forward; code that calls a part of the model has to do the same, for keys and values of the same dtype.
Autocast = tuple[str, torch.dtype]


def autocast_around(states: torch.Tensor) -> Autocast | None:
    """Returns the autocast that is currently on for the device of ``states``, ``None`` if none is."""
    kind = states.device.type
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def within(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """Returns a context in which ``autocast`` is on again."""
    return nullcontext() if autocast is None else torch.autocast(*autocast)


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


def residual_of(args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward) -> torch.Tensor | None:
    """Returns the residual among the arguments of a block, ``None`` if it takes none."""
    if "residual" in kwargs:
        return kwargs["residual"]
    names = getattr(getattr(forward, "__func__", forward), "__code__", None)
    parameters = names.co_varnames[1 : 1 + len(args)] if names is not None else ()
    return args[parameters.index("residual")] if "residual" in parameters else None
