"""What code that was not seen holds: attributes, closures, and the global variables that it names."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import only_warned
from .module_tools import is_trusted, library_of

# How many levels deep, how many parts of each object, and how many objects in all are looked at.
_DEPTH, _MOST, _MOST_OBJECTS = 6, 256, 1 << 14
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (*_PLAIN, torch.Tensor, torch.dtype, torch.device, CodeType, ModuleType)
_COLLECTIONS = (dict, list, tuple, deque, set, frozenset, np.ndarray, partial, MethodType)
# What all modules have; their hooks and modules are looked at by themselves.
_OF_ALL = set(vars(nn.Module())) - {"training", "_buffers", "_parameters"}
_serials: Any = WeakIdKeyDictionary()
_numbers = itertools.count()


class Contents:
    """What some functions and objects hold now.

    Attributes:
        key: equal to that of other contents if nothing was set, written or replaced between them.
        is_opaque: whether they cannot be looked at: an iterator would be used up, or there are too many objects.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        self._holders = tuple(holders)
        self._parts: list[tuple[Any, dict[Any, Any]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_opaque = False
        marks: list[Hashable] = []
        waiting, visited = [(holder, _DEPTH) for holder in reversed(self._holders)], set[int]()
        while waiting:
            holder, depth = waiting.pop()
            if id(holder) in visited:
                continue
            visited.add(id(holder))
            self.is_opaque |= issubclass(type(holder), Iterator) or len(visited) > _MOST_OBJECTS
            if self.is_opaque:
                break
            if (parts := _parts(holder)) is None:
                continue
            self._parts.append((holder, parts))
            marks.append(len(parts))
            for name, value in itertools.islice(parts.items(), _MOST):
                marks.append((str(name), _mark(value, is_last=not depth)))
                if depth and not issubclass(type(value), _LEAVES):
                    waiting.append((value, depth - 1))
        self.key: Hashable = tuple(marks)

    def keep(self) -> None:
        """Copies the tensors, so that they can be put back as well."""
        values = {id(value): value for _, parts in self._parts for value in parts.values()}.values()
        tensors = (value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def have_changed(self) -> bool:
        """Whether anything is other than it was; tensors by their values, too, once they were kept."""
        if Contents(self._holders).key != self.key:
            return True
        return any(not torch.equal(tensor, before) for tensor, before in self._tensors)

    def restore(self) -> None:
        """Puts everything back in place, and tensors that were kept."""
        for holder, parts in self._parts:
            with only_warned("putting back what code of others holds"):  # some objects allow no change
                _put_back(holder, parts)
        for tensor, before in self._tensors:
            with only_warned("putting back a tensor of others"), torch.no_grad():
                if not torch.equal(tensor, before):  # a graph of gradients may need it as it is
                    tensor.copy_(before)


def _mark(value: Any, is_last: bool = False) -> Hashable:
    """What tells whether a value is another one, but for the parts of a collection."""
    type_ = type(value)  # a model's config answers `isinstance` slowly
    if issubclass(type_, _PLAIN):
        return type_, value
    if issubclass(type_, torch.Tensor):
        return _serial(value), None if value.is_inference() else value._version
    return (type_,) if not is_last and issubclass(type_, _COLLECTIONS) else _serial(value)


def _serial(value: Any) -> int:
    """A number that no other object has while the process lives, where that can be told."""
    try:
        return int(_serials.setdefault(value, next(_numbers)))
    except TypeError:  # some objects take no weak references
        return -id(value)


def _parts(holder: Any) -> dict[Any, Any] | None:
    """What is directly inside of a function, a class or an object of others, or of a collection, by name; ``None`` for
    what cannot change."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, (list, tuple, deque, set, frozenset)):
        return dict(enumerate(holder))
    if isinstance(holder, np.ndarray):
        return {"": holder.tobytes()}
    if isinstance(holder, partial):
        return {"func": holder.func, "args": holder.args, "keywords": holder.keywords}
    if isinstance(holder, MethodType):
        return {"function": holder.__func__, "owner": holder.__self__}
    if isinstance(holder, FunctionType):
        return _parts_of_function(holder)
    if isinstance(holder, type):
        is_theirs = not is_trusted(library_of(holder))
        names = (name for name in vars(holder) if name[:2] != "__" and name != "_abc_impl")
        return {name: vars(holder)[name] for name in names} if is_theirs else None
    if isinstance(holder, _LEAVES):
        return None
    parts: dict[Any, Any] = {name: getattr(holder, name) for name in _slots_of(type(holder)) if hasattr(holder, name)}
    attributes = getattr(holder, "__dict__", {})
    if isinstance(holder, nn.Module):
        attributes = {name: value for name, value in list(attributes.items()) if name not in _OF_ALL}
    # Ours are there while another thread generates.
    for name, value in list(attributes.items()):
        others = getattr(value, "of_others", value) if callable(value) else value
        if callable(others) == callable(value) and library_of(others) != "hf_selfspec":
            parts[name] = others
    return parts if is_trusted(library_of(type(holder))) else parts | {"its class": type(holder)}


def _parts_of_function(function: Any) -> dict[Any, Any] | None:
    if is_trusted(library_of(function)):
        return None
    variables, names = function.__globals__, function.__code__.co_names
    named = {name: variables[name] for name in names if name in variables}
    modules = {value for value in named.values() if isinstance(value, ModuleType) and not is_trusted(_library(value))}
    cells = {index: cell for index, cell in enumerate(function.__closure__ or ()) if _is_filled(cell)}
    return {
        "code": function.__code__,
        "defaults": (function.__defaults__, function.__kwdefaults__),
        **vars(function),
        **{("cell", index): cell.cell_contents for index, cell in cells.items()},
        **{("global", name): value for name, value in named.items() if not isinstance(value, ModuleType)},
        **{(module, name): vars(module)[name] for module in modules for name in names if name in vars(module)},
    }


def _put_back(holder: Any, parts: dict[Any, Any]) -> None:
    now = _parts(holder) or {}
    if list(now) == list(parts) and all(map(_is_same, now.values(), parts.values())):
        return
    if isinstance(holder, (dict, set)):
        holder.clear()
        holder.update(parts if isinstance(holder, dict) else parts.values())
    elif isinstance(holder, (list, deque)):
        holder.clear()
        holder.extend(parts.values())
    elif isinstance(holder, np.ndarray):
        np.copyto(holder, np.frombuffer(parts[""], holder.dtype).reshape(holder.shape))
    else:
        for name in now.keys() - parts.keys():
            delattr(holder, name)
        for name, value in parts.items():
            if name in now and _is_same(now[name], value):
                continue
            kind, place = name if isinstance(name, tuple) else ("attribute", name)
            if kind == "attribute":
                setattr(holder, place, value)
            elif kind == "cell":
                holder.__closure__[place].cell_contents = value
            elif kind == "global":
                holder.__globals__[place] = value
            else:
                setattr(kind, place, value)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


def _library(module: ModuleType) -> str:
    return module.__name__.partition(".")[0]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _slots_of(kind: type) -> Iterator[str]:
    names = itertools.chain.from_iterable(vars(base).get("__slots__", ()) for base in kind.__mro__)
    return (name for name in names if isinstance(name, str) and name[:2] != "__")
