"""Temporary changes: values that the forwards of a thread obey, and changes that threads share until all have left."""

import copyreg
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.nn as nn

from ..errors import warn_once
from .forks import in_children, new_lock

_T = TypeVar("_T")
_P = ParamSpec("_P")
Forward = Callable[..., Any]
_ABSENT: Any = object()

_per_thread: list["PerThread[Any]"] = []


class PerThread(threading.local, Generic[_T]):
    """What the forwards of a thread obey, ``None`` for nothing; other threads are not affected."""

    now: _T | None = None

    def __new__(cls) -> "PerThread[_T]":
        _per_thread.append(new := super().__new__(cls))
        return new

    def during(self, value: _T | None) -> "_During":
        return _During(self, value)


class _During(ContextDecorator, AbstractContextManager[None]):
    """Not a generator, which would go on, and restore what was before, when it is collected after an interrupt."""

    def __init__(self, values: PerThread[Any], value: Any) -> None:
        self._values, self._value = values, value

    def __enter__(self) -> None:
        self._before, self._values.now = self._values.now, self._value

    def __exit__(self, *error: object) -> None:
        self._values.now = self._before


@contextmanager
def as_before() -> Iterator[None]:
    """Restores at its end what this thread's forwards obeyed before, also where an interrupt came between."""
    before = [(values, values.now) for values in _per_thread]
    try:
        yield
    finally:
        for values, now in before:
            values.now = now


class InstanceForward(partial[Any]):
    """What a module calls in place of its forward, or of another of its functions.

    A subclass of ``partial``, since that takes as long as a function, and an object with ``__call__`` longer.
    """

    run: Forward  # what it does, referred to here as another thread may be in it at its end
    original: Forward  # what the module called before
    before: Any  # the attribute of the module that this was, if it was none of its class
    is_over = False

    @property
    def of_others(self) -> Any:
        """The first below that is not ours."""
        below = self.before
        while isinstance(below, InstanceForward):
            below = below.before
        return below

    def end(self) -> Any:
        """Leaves calls, of whoever still has it, to the original; returns the first below that is not over."""
        self.is_over, before = True, self.before
        self.__setstate__((self.original, (), {}, vars(self)))  # type: ignore[attr-defined]  # of functools.partial
        while isinstance(before, InstanceForward) and before.is_over:
            before = before.before
        return before

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For classes that copy their attributes themselves: their copies have what is below it."""
        return operator.getitem, ((self.original,), 0)


class HookOfOurs(partial[Any]):
    """A hook of ours, which does nothing in copies by classes that copy their attributes themselves."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HookOfOurs, (_do_nothing,)


def _do_nothing(*args: Any) -> None: ...


def _reduced(module: nn.Module) -> Any:
    """What copies and pickles a module: without forwards and hooks of ours, which are those of the original."""
    reduced: Any = module.__reduce_ex__(4)
    function, arguments, state, *items = reduced
    if isinstance(state, dict):
        hooks = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
        ours, kept = {key for key, hook in hooks if isinstance(hook, HookOfOurs)}, dict[str, Any]()
        for name, value in state.items():
            kept[name] = value.of_others if isinstance(value, InstanceForward) else value
            if ours and name.startswith("_forward_"):  # hooks, and which of them get keywords
                kept[name] = OrderedDict((key, hook) for key, hook in value.items() if key not in ours)
        state = {name: value for name, value in kept.items() if value is not _ABSENT}
    return function, arguments, state, *items


class InstanceForwards:
    """Replaces forwards and other values; :meth:`close` restores earlier ones (accelerate sets forwards, too), and goes
    on where it was interrupted when it is called again."""

    def __init__(self) -> None:
        self.users: dict[object, int] = {}  # of a change that threads share, with their threads
        self._wrapped: set[tuple[nn.Module, Any]] = set()
        self._undoing: list[tuple[Any, ...]] = []  # functions with their arguments
        self._classes: set[type] = set()  # of the modules that have something of it, which copies leave out

    def wrap(self, module: nn.Module, wrapper: Callable[[nn.Module], Forward]) -> None:
        """Makes what ``wrapper`` returns for a module what ``module(...)`` calls, once."""
        if (module, wrapper) not in self._wrapped:
            self._wrapped.add((module, wrapper))
            self.replace(module, wrapper(module))

    def replace(self, module: nn.Module, forward: Forward, name: str = "forward") -> None:
        self._leave_out_of_copies(type(module))
        attributes, ours = module.__dict__, InstanceForward(forward)
        ours.run, ours.original, ours.before = forward, getattr(module, name), attributes.get(name, _ABSENT)
        self.put(attributes, name, ours)

    def hook(self, register: Any, function: Callable[..., Any], **options: Any) -> None:
        """Registers a hook by a method of a module."""
        self._leave_out_of_copies(type(register.__self__))
        self.enter_context(register(HookOfOurs(function), **options))

    def _leave_out_of_copies(self, module_class: type) -> None:
        if module_class not in self._classes:
            with _lock:
                _changing.add(self)
                self._classes.add(module_class)
                copyreg.dispatch_table.setdefault(module_class, _reduced)  # type: ignore[arg-type]  # of a class by its name

    def put(self, values: MutableMapping[str, Any], name: str, value: Any) -> None:
        self.callback(_restore, values, name, value, values.get(name, _ABSENT))
        values[name] = value

    def callback(self, *function: Any) -> None:
        """Calls a function with arguments at the end, again where it was interrupted."""
        self._undoing.append(function)

    def enter_context(self, context: AbstractContextManager[Any]) -> None:
        self.callback(context.__exit__, None, None, None)
        context.__enter__()

    def close(self) -> None:
        while self._undoing:
            function, *args = self._undoing[-1]
            function(*args)
            del self._undoing[-1:]  # now, not before: it may be interrupted
        with _lock:
            _changing.discard(self)
            for module_class in self._classes.difference(*(other._classes for other in _changing)):
                if copyreg.dispatch_table.get(module_class) is _reduced:
                    del copyreg.dispatch_table[module_class]
        self._classes.clear()
        self._wrapped.clear()


_changing: weakref.WeakSet[InstanceForwards] = weakref.WeakSet()  # those that copies leave something out of


def _restore(values: MutableMapping[str, Any], name: str, ours: Any, before: Any) -> None:
    """Restores a value, unless others have replaced ours meanwhile."""
    if isinstance(ours, InstanceForward):
        before = ours.end()
    if values.get(name, _ABSENT) is ours:
        if before is _ABSENT:
            values.pop(name, None)
        else:
            values[name] = before


Change = Callable[[InstanceForwards], None]
# A single lock for all changes. Its holder waits for nothing else, so an interrupted change may end whenever it is
# collected, in whatever code that is.
_lock = new_lock()


class SharedChange:
    """A change that threads share: the first one makes it, the last one to leave undoes it."""

    def __init__(self) -> None:
        self.owners: weakref.WeakKeyDictionary[Any, InstanceForwards] = weakref.WeakKeyDictionary()
        in_children(self._end_lost)

    @contextmanager
    def of(self, owner: Any, make: Change | None = None, add: Change | None = None) -> Iterator[None]:
        """Keeps ``owner`` changed until the last thread leaves: the first makes what ``make`` changes, each what
        ``add`` changes. A change that fails half-way is undone."""
        use = object()
        try:
            with _lock:
                forwards = self.owners.setdefault(owner, InstanceForwards())
                is_first = not forwards.users
                forwards.users[use] = threading.get_ident()
                if is_first and make is not None:
                    make(forwards)
                if add is not None:
                    add(forwards)
            yield
        finally:
            try:
                self._leave(owner, use)
            except KeyboardInterrupt:  # which ends the call when the change has ended
                self._leave(owner, use)
                raise

    def _leave(self, owner: Any, use: object) -> None:
        with _lock:
            if (forwards := self.owners.get(owner)) is not None:
                forwards.users.pop(use, None)
                if not forwards.users:
                    forwards.close()
                    self.owners.pop(owner, None)

    def _end_lost(self) -> None:
        """Ends, in a forked process, the uses of threads that only its parent has."""
        for owner, forwards in list(self.owners.items()):
            for use, thread in list(forwards.users.items()):
                if thread != threading.get_ident():
                    self._leave(owner, use)


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
def without_checkpointing(forwards: InstanceForwards, model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Suspends gradient checkpointing in a model's ``modules``, with which layers drop the KV cache, and warns of it;
    training mode stays."""
    checkpointing = [module for module in modules if does_checkpoint(module)]
    if checkpointing:
        warn_once(
            f"{type(model).__name__} is in training mode with gradient checkpointing, where its layers drop the KV "
            "cache and generate alone sees only the last token. With `assistant`, checkpointing is suspended "
            "meanwhile, so the tokens are those of generate(use_cache=False). Call model.eval() before generating."
        )
    for module in checkpointing:
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


def autocast_on(device: torch.device) -> Autocast | None:
    """Returns the autocast that is currently on for a device, ``None`` if none is."""
    name = device.type
    return (name, torch.get_autocast_dtype(name)) if torch.is_autocast_enabled(name) else None


def within(autocast: Autocast | None) -> AbstractContextManager[Any]:
    """Returns a context in which ``autocast`` is on again."""
    return nullcontext() if autocast is None else torch.autocast(*autocast)


def states_of(output: Any) -> torch.Tensor:
    """Returns the states ``[b, s, d]`` in the output of a layer, or of a stack of layers."""
    if isinstance(output, torch.Tensor):
        return output
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
    return states


def with_states(output: Any, states: torch.Tensor) -> Any:
    """Returns the output of a layer, or of a stack of layers, with other states."""
    if isinstance(output, torch.Tensor):
        return states
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
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    parameters = code.co_varnames[1 : 1 + len(args)] if code is not None else ()
    return args[parameters.index("residual")] if "residual" in parameters else None
