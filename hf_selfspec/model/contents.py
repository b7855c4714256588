"""What functions, hooks and modules of others hold: whether it has changed, and how to put it back."""

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
from .module_tools import ROW_BLIND, library_of

# How many levels deep, and how many parts of each object, are looked at.
_DEPTH, _MOST = 3, 64
# How much is added to numbers that forwards count: no multiple of a usual period.
_FAR = 1009
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_NUMBERS = (bool, int, float, str, type(None))
_READ: Any = (*_NUMBERS, torch.Tensor, dict, list, set, deque, np.ndarray, Iterator)


def contents_of(holder: Any, depth: int = _DEPTH) -> Hashable:
    """Returns what a function or an object holds that may change what it does, a few levels deep: numbers, texts, and
    how large tensors are. Of lists, which hooks fill with what they see, only that there are some."""
    if isinstance(holder, (*_NUMBERS, CodeType)):
        return holder
    if isinstance(holder, torch.Tensor):
        return _magnitude(holder)
    if not depth:
        return type(holder).__name__
    return type(holder).__name__, tuple(contents_of(part, depth - 1) for part in _parts(holder))


def _parts(holder: Any) -> Iterator[Any]:
    """What is directly inside of a function or an object."""
    if isinstance(holder, partial):
        yield from (holder.func, *holder.args, *holder.keywords.values())
    elif isinstance(holder, MethodType):
        yield from (holder.__func__, holder.__self__)
    elif isinstance(holder, FunctionType):
        yield holder.__code__
        yield from _contents_of_cells(holder.__closure__ or ()).values()
        yield from (*(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values())
        yield from vars(holder).values()
        named = [holder.__globals__.get(name) for name in holder.__code__.co_names]
        yield from (value for value in named if isinstance(value, _READ) or _is_of_others(value))
    elif isinstance(holder, (dict, tuple)):
        yield from list(holder.values() if isinstance(holder, dict) else holder)[:_MOST]
    elif isinstance(holder, nn.Module):
        # Its modules, hooks and forward are looked at on their own.
        yield from (value for value in list(vars(holder).values()) if isinstance(value, (*_NUMBERS, torch.Tensor)))
        yield from holder._buffers.values()
        yield from (weight._version for weight in holder._parameters.values() if weight is not None)
    elif not isinstance(holder, list):
        for read, _ in _access_to(holder):
            yield from (value for value in list(read().values()) if isinstance(value, _READ))


def _magnitude(values: torch.Tensor) -> Hashable:
    """Roughly how large a few values of a tensor are."""
    with suppress(Exception):  # of dtypes and layouts without such operations
        few = values.detach().reshape(-1)[:: max(1, values.numel() // 8)]
        largest = float(few.to(torch.float32).abs().max())
        return None if not math.isfinite(largest) else (largest > 0, math.frexp(largest)[1])
    return str(values.dtype)


# How to read values by names, and how to set the value of a name.
_Access = tuple[Callable[[], dict[Any, Any]], Callable[[Any, Any], object]]


class Snapshot:
    """What some functions and objects hold now."""

    def __init__(self, holders: Iterable[Any]) -> None:
        # How to put each content back, and whether what it is now may change what a holder does.
        self._undo: list[tuple[Callable[[], object], Callable[[], bool]]] = []
        self._numbers = list[tuple[_Access, dict[Any, Any]]]()
        self._lists = list[tuple[list[Any], list[Any]]]()
        self._kept: set[int] = set()
        self.moves = False  # whether forwards change contents, as of the last `look`
        self.is_opaque = False  # whether what may steer has a state that cannot be put back
        self._holders = tuple(holders)
        self._contents = tuple(map(contents_of, self._holders))
        for holder in self._holders:
            self._keep(holder, _DEPTH, _may_steer(holder))

    def _keep(self, holder: Any, depth: int, steers: bool) -> None:
        if id(holder) in self._kept or isinstance(holder, (*_NUMBERS, CodeType)):
            return
        self._kept.add(id(holder))
        if isinstance(holder, torch.Tensor):
            with suppress(Exception):  # of layouts without such operations
                before = holder.detach().clone()
                self._undo.append((partial(_copy, holder, before), lambda: not torch.equal(holder, before)))
        elif isinstance(holder, (set, deque)):
            items = list(holder)
            ids = list(map(id, items))
            self._undo.append((partial(_refill, holder, items), lambda: steers and list(map(id, holder)) != ids))
        elif isinstance(holder, np.ndarray):
            array = holder.copy()
            restored = partial(np.copyto, holder, array)
            self._undo.append((restored, lambda: steers and not np.array_equal(holder, array)))
        elif isinstance(holder, Iterator):
            self.is_opaque = self.is_opaque or steers
        elif isinstance(holder, list):
            self._lists.append((holder, list(holder)))
        elif type(holder) in _DICTS:
            entries = dict(holder)
            self._undo.append((partial(_refill, holder, entries), partial(_differ, holder, entries)))
        elif not isinstance(holder, type) and isinstance(values := getattr(holder, "__dict__", None), dict):
            attributes = {name: value for name, value in values.items() if isinstance(value, (*_NUMBERS, torch.Tensor))}
            self._undo.append((partial(_reset, values, attributes), partial(_differ, values, attributes)))
            inside = [*values.values()] if not isinstance(holder, nn.Module) else [holder._buffers]
            for value in inside if depth else ():
                if isinstance(value, _READ):
                    self._keep(value, depth - 1, steers)
        self._numbers += [((read, write), _only_numbers(read())) for read, write in _access_to(holder)]
        for part in list(holder if isinstance(holder, list) else _parts(holder))[:_MOST] if depth else ():
            self._keep(part, depth - 1, steers)

    @property
    def has_changed(self) -> bool:
        """Whether a tensor is another one now; numbers and lists may be counts without any effect."""
        return any(differs() for _, differs in self._undo)

    def look(self) -> None:
        """Notes whether anything has changed."""
        self.moves = tuple(map(contents_of, self._holders)) != self._contents

    def count_on(self) -> bool:
        """Makes numbers and lists, where forwards have changed them, what many forwards more would have made of them.
        Returns whether there are any."""
        longer = [values for values, before in self._lists if len(values) > len(before)]
        for values in longer:
            values.extend(values[-1:] * _FAR)
        has_moved = bool(longer)
        for (read, write), before in self._numbers:
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


def _access_to(holder: Any) -> Iterator[_Access]:
    """Where a function, a dictionary or an object has values."""
    if isinstance(holder, FunctionType):
        cells, variables, names = holder.__closure__ or (), holder.__globals__, holder.__code__.co_names
        yield partial(_contents_of_cells, cells), lambda index, value: setattr(cells[index], "cell_contents", value)
        yield lambda: {name: variables[name] for name in names if name in variables}, variables.__setitem__
        yield lambda: vars(holder), partial(setattr, holder)
    elif type(holder) in _DICTS:
        yield lambda: holder, holder.__setitem__
    elif isinstance(holder, type):
        yield lambda: dict(vars(holder)), partial(setattr, holder)
    else:
        attributes: Any = getattr(holder, "__dict__", None)
        if has_slots := bool(_slots_of(holder)):
            yield lambda: _slots_of(holder), partial(setattr, holder)
        if isinstance(attributes, dict):
            yield lambda: attributes, attributes.__setitem__
        if has_slots or isinstance(attributes, dict) or type(holder).__module__ != "builtins":
            yield from _access_to(type(holder))


def _slots_of(holder: Any) -> dict[str, Any]:
    names = itertools.chain.from_iterable(vars(base).get("__slots__", ()) for base in type(holder).__mro__)
    return {name: getattr(holder, name) for name in names if isinstance(name, str) and hasattr(holder, name)}


def _is_of_others(value: Any) -> bool:
    """Whether a global variable is an object, or a class, of code that is not a library's."""
    if isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)):
        return False
    return library_of(value) not in {*ROW_BLIND, "builtins", "typing", "peft", "numpy"}


def _may_steer(holder: Any) -> bool:
    """Whether a function, perhaps of a hook, may return something, or write to what it gets."""
    while isinstance(holder, partial):
        holder = holder.func
    called = getattr(holder, "__func__", holder)
    if not isinstance(called, FunctionType):
        called = next((vars(base)["__call__"] for base in type(called).__mro__ if "__call__" in vars(base)), None)
    if isinstance(holder, nn.Module) or not isinstance(called, FunctionType) or hasattr(called, "__wrapped__"):
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


def _write_again(access: _Access, before: dict[Any, Any]) -> None:
    read, write = access
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
