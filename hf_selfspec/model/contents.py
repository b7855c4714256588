"""What functions, hooks and modules of others hold: whether that has changed, and how to put it back."""

from __future__ import annotations

import dis
import itertools
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from ..errors import only_warned
from .modules import ROW_BLIND, library_of

_DEPTH, _MOST = 3, 64
# How far numbers are moved on that forwards count: no multiple of a usual period.
_FAR = 1009
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_NUMBERS = (bool, int, float, str, type(None))
_READ: Any = (*_NUMBERS, torch.Tensor, dict, list, set, deque, np.ndarray, Iterator)


def contents_of(thing: Any, depth: int = _DEPTH) -> Hashable:
    """Returns what a function or an object holds that may change what it does, a few levels deep: numbers, texts, and
    how large tensors are. Of lists, which hooks fill with what they see, only that there are some."""
    if isinstance(thing, (*_NUMBERS, CodeType)):
        return thing
    if isinstance(thing, torch.Tensor):
        return _magnitude(thing)
    if not depth:
        return type(thing).__name__
    return type(thing).__name__, tuple(contents_of(part, depth - 1) for part in _parts(thing))


def _parts(thing: Any) -> Iterator[Any]:
    """What is directly inside of a function or an object."""
    if isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, FunctionType):
        yield thing.__code__
        for cell in thing.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield cell.cell_contents
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        yield from vars(thing).values()
        named = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        yield from (value for value in named if isinstance(value, _READ) or _is_of_others(value))
    elif isinstance(thing, (dict, tuple)):
        yield from list(thing.values() if isinstance(thing, dict) else thing)[:_MOST]
    elif isinstance(thing, nn.Module):
        # Its modules, hooks and forward are looked at on their own.
        yield from (value for value in list(vars(thing).values()) if isinstance(value, (*_NUMBERS, torch.Tensor)))
        yield from thing._buffers.values()
        yield from (weight._version for weight in thing._parameters.values() if weight is not None)
    elif not isinstance(thing, (type, list)):
        for holder in (vars(type(thing)), getattr(thing, "__dict__", {}), _slots_of(thing)):
            yield from (value for value in list(holder.values()) if isinstance(value, _READ))
    elif isinstance(thing, type):
        yield from (value for value in vars(thing).values() if isinstance(value, _READ))


def _magnitude(values: torch.Tensor) -> Hashable:
    """Roughly how large a few values of a tensor are."""
    with suppress(Exception):  # of dtypes and layouts without such operations
        few = values.detach().reshape(-1)[:: max(1, values.numel() // 8)]
        largest = float(few.to(torch.float32).abs().max())
        return None if not math.isfinite(largest) else (largest > 0, math.frexp(largest)[1])
    return str(values.dtype)


# How numbers are read, by names, how one is set, and what they were.
_Numbers = tuple[Callable[[], dict[Any, Any]], Callable[[Any, Any], object], dict[Any, Any]]


class Snapshot:
    """What some functions and objects hold now."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._undo: list[tuple[Callable[[], object], Callable[[], bool]]] = []
        self._numbers, self._lists = list[_Numbers](), list[tuple[list[Any], list[Any]]]()
        self._seen: set[int] = set()
        self.moves = False  # whether forwards change what is there
        self.is_opaque = False  # whether what may steer has a state that cannot be put back
        self._things = tuple(things)
        self._contents = tuple(map(contents_of, self._things))
        for thing in self._things:
            self._steers = _may_steer(thing)
            self._keep(thing, _DEPTH)

    def _keep(self, thing: Any, depth: int) -> None:
        if id(thing) in self._seen or isinstance(thing, (*_NUMBERS, CodeType)):
            return
        self._seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            with suppress(Exception):  # of layouts without such operations
                before = thing.detach().clone()
                self._undo.append((partial(_copy, thing, before), lambda: not torch.equal(thing, before)))
        elif isinstance(thing, (set, deque)):
            items, steers = list(thing), self._steers
            self._undo.append((partial(_refill, thing, items), lambda: steers and _differ_in(thing, items)))
        elif isinstance(thing, np.ndarray):
            numbers, steers = thing.copy(), self._steers
            restored, differ = partial(np.copyto, thing, numbers), lambda: not np.array_equal(thing, numbers)
            self._undo.append((restored, lambda: steers and differ()))
        elif isinstance(thing, Iterator):
            self.is_opaque = self.is_opaque or self._steers
        elif isinstance(thing, list):
            self._lists.append((thing, list(thing)))
        elif type(thing) in _DICTS:
            entries = dict(thing)
            self._undo.append((partial(_refill, thing, entries), partial(_differ, thing, entries)))
        elif not isinstance(thing, type) and isinstance(values := getattr(thing, "__dict__", None), dict):
            attributes = {name: value for name, value in values.items() if isinstance(value, (*_NUMBERS, torch.Tensor))}
            self._undo.append((partial(_reset, values, attributes), partial(_differ, values, attributes)))
            inside = [*values.values()] if not isinstance(thing, nn.Module) else [thing._buffers]
            for value in inside if depth else ():
                if isinstance(value, _READ):
                    self._keep(value, depth - 1)
        self._numbers += [(read, write, _only_numbers(read())) for read, write in _numbers_of(thing)]
        for part in list(thing if isinstance(thing, list) else _parts(thing))[:_MOST] if depth else ():
            self._keep(part, depth - 1)

    @property
    def has_changed(self) -> bool:
        """Whether a tensor is another one now; numbers and lists may be counts without any effect."""
        return any(differs() for _, differs in self._undo)

    def look(self) -> None:
        """Notes whether anything has changed."""
        self.moves = tuple(map(contents_of, self._things)) != self._contents

    def count_on(self) -> bool:
        """Makes numbers and lists, where forwards have changed them, what many forwards more would have made of them.
        Returns whether there are any."""
        longer = [values for values, before in self._lists if len(values) > len(before)]
        for values in longer:
            values.extend(values[-1:] * _FAR)
        has_moved = bool(longer)
        for read, write, before in self._numbers:
            for name, value in _only_numbers(read()).items():
                if name not in before or value != before[name]:
                    has_moved = True
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        write(name, value + _FAR)
        return has_moved

    def restore(self) -> None:
        steps: list[Callable[[], object]] = [partial(_write_again, *numbers) for numbers in self._numbers]
        steps += [partial(values.__setitem__, slice(None), items) for values, items in self._lists]
        for put_back in (*steps, *(undo for undo, _ in self._undo)):
            with only_warned("putting back what a hook or a module holds"):  # some objects allow no change
                put_back()


def _numbers_of(thing: Any) -> Iterator[tuple[Callable[[], dict[Any, Any]], Callable[[Any, Any], object]]]:
    """Where a function, a dictionary or an object has numbers, to read and to set them."""
    if isinstance(thing, FunctionType):
        cells, variables, names = thing.__closure__ or (), thing.__globals__, thing.__code__.co_names
        yield partial(_contents_of_cells, cells), lambda index, value: setattr(cells[index], "cell_contents", value)
        yield lambda: {name: variables[name] for name in names if name in variables}, variables.__setitem__
        yield lambda: vars(thing), partial(setattr, thing)
    elif type(thing) in _DICTS:
        yield lambda: thing, thing.__setitem__
    elif isinstance(thing, type):
        yield lambda: dict(vars(thing)), partial(setattr, thing)
    elif _slots_of(thing):
        yield lambda: _slots_of(thing), partial(setattr, thing)
    elif isinstance(values := getattr(thing, "__dict__", None), dict):
        yield lambda: values, values.__setitem__
        yield lambda: dict(vars(type(thing))), partial(setattr, type(thing))


def _slots_of(thing: Any) -> dict[str, Any]:
    names = itertools.chain.from_iterable(vars(base).get("__slots__", ()) for base in type(thing).__mro__)
    return {name: getattr(thing, name) for name in names if isinstance(name, str) and hasattr(thing, name)}


def _is_of_others(value: Any) -> bool:
    """Whether a global variable is an object, or a class, of code that is not a library's."""
    if isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)):
        return False
    return library_of(value) not in {*ROW_BLIND, "builtins", "typing", "peft", "numpy"}


def _may_steer(thing: Any) -> bool:
    """Whether a function, perhaps of a hook, may return something, or write to what it gets."""
    while isinstance(thing, partial):
        thing = thing.func
    called = getattr(thing, "__func__", thing)
    if not isinstance(called, FunctionType):
        called = next((vars(base)["__call__"] for base in type(called).__mro__ if "__call__" in vars(base)), None)
    if isinstance(thing, nn.Module) or not isinstance(called, FunctionType) or hasattr(called, "__wrapped__"):
        return True
    before = None
    for step in dis.get_instructions(called):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return True
        if step.opname == "RETURN_VALUE" and not (before and before.opname == "LOAD_CONST" and before.argval is None):
            return True
        if step.opname == "STORE_SUBSCR":
            return True
        before = step
    return any(name.endswith("_") and not name.endswith("__") for name in called.__code__.co_names)


def _contents_of_cells(cells: tuple[Any, ...]) -> dict[Any, Any]:
    contents = {}
    for index, cell in enumerate(cells):
        with suppress(ValueError):  # an empty one
            contents[index] = cell.cell_contents
    return contents


def _only_numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in list(values.items()) if isinstance(value, _NUMBERS)}


def _write_again(
    read: Callable[[], dict[Any, Any]], write: Callable[[Any, Any], object], before: dict[Any, Any]
) -> None:
    now = read()
    for name, value in before.items():
        if now.get(name) != value:
            write(name, value)


def _copy(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(tensor, before):  # a graph of gradients may need it as it is
            tensor.copy_(before)


def _differ(values: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether tensors are others now, or new."""
    return any(
        isinstance(value, torch.Tensor) and value is not before.get(name, values)
        for name, value in list(values.items())
    )


def _reset(values: dict[str, Any], before: dict[str, Any]) -> None:
    """Gives an object its numbers and tensors again; new numbers hide those of its class."""
    for name in _only_numbers(values).keys() - before.keys():
        del values[name]
    values.update(before)


def _refill(values: Any, before: Any) -> None:
    values.clear()
    (values.extend if isinstance(values, deque) else values.update)(before)


def _differ_in(values: Any, items: list[Any]) -> bool:
    """Whether a container has other items now, by which objects they are."""
    return list(map(id, values)) != list(map(id, items))
