"""What code that was not seen holds: attributes, closures, and the variables of modules that it names."""

from __future__ import annotations

import io
import itertools
import logging
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import only_warned
from ..model.module_tools import is_trusted, library_of

# How many levels deep, how many objects in one object, and how many in all are looked at.
_DEPTH, _MOST, _MOST_OBJECTS = 6, 1024, 1 << 15
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LEAVES = (*_PLAIN, torch.Tensor, torch.dtype, torch.device, CodeType, ModuleType, logging.Logger, io.IOBase)
_COLLECTIONS = (dict, list, tuple, deque, set, frozenset, bytearray, np.ndarray, partial, MethodType)
# What all modules have; their hooks and modules are looked at by themselves.
_OF_ALL = set(vars(nn.Module())) - {"training", "_buffers", "_parameters"}
_serials: Any = WeakIdKeyDictionary()
_numbers = itertools.count()


class Contents:
    """What some functions and objects hold now.

    Attributes:
        key: equal to that of other contents if nothing was set, written or replaced between them.
        why_opaque: why they cannot be looked at, empty if they can.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        self._holders = tuple(holders)
        self._parts: list[tuple[Any, dict[Any, Any]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.why_opaque = ""
        try:
            self.key: Hashable = tuple(self._marks())
        except Exception as error:  # whatever objects of others raise when they are looked at
            self.key, self.why_opaque = next(_numbers), f"what it holds cannot be looked at: {error!r}"

    def _marks(self) -> Iterator[Hashable]:
        waiting, visited = [(holder, _DEPTH) for holder in reversed(self._holders)], set[int]()
        while waiting:
            holder, depth = waiting.pop()
            if id(holder) in visited:
                continue
            visited.add(id(holder))
            if issubclass(type(holder), Iterator) and library_of(type(holder)) in ("builtins", "itertools"):
                self.why_opaque = "it holds an iterator, which a comparison would use up"
            if (parts := _parts(holder)) is None:
                continue
            self._parts.append((holder, parts))
            yield len(parts)
            inside = []
            for name, value in parts.items():
                yield str(name), _mark(value, is_last=not depth)
                if not issubclass(type(value), _LEAVES):
                    inside.append((value, depth - 1))
            if len(inside) > _MOST or len(visited) > _MOST_OBJECTS:
                self.why_opaque = "it holds more objects than can be looked at"
            waiting += inside if depth else ()

    def keep(self) -> None:
        """Copies the tensors, so that they can be put back as well."""
        values = {id(value): value for _, parts in self._parts for value in parts.values()}.values()
        tensors = (value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def have_changed(self) -> bool:
        """Whether anything is other than it was; tensors by their values, too, once they were kept."""
        if Contents(self._holders).key != self.key:
            return True
        return not all(_is_equal(tensor, before) for tensor, before in self._tensors)

    def restore(self) -> None:
        """Puts everything back in place, and tensors that were kept."""
        for holder, parts in self._parts:
            with only_warned("putting back what code of others holds"):  # some objects allow no change
                _put_back(holder, parts)
        for tensor, before in self._tensors:
            with only_warned("putting back a tensor of others"), torch.no_grad():
                if not _is_equal(tensor, before):  # a graph of gradients may need it as it is
                    tensor.copy_(before)


def _is_equal(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    with suppress(Exception):  # of layouts without such operations, whose versions tell
        return bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())
    return True


def _mark(value: Any, is_last: bool = False) -> Hashable:
    """What tells whether a value is another one, but for the parts of a collection."""
    type_ = type(value)  # a model's config answers `isinstance` slowly
    if issubclass(type_, _PLAIN):
        return type_, value
    if issubclass(type_, torch.Tensor):
        return _serial(value), None if value.is_inference() else value._version
    return (type_,) if issubclass(type_, _COLLECTIONS) and not is_last else _serial(value)


def _serial(value: Any) -> int:
    """A number that no other object has; where objects take no weak references, none that lives at the same time."""
    try:
        return int(_serials.setdefault(value, next(_numbers)))
    except TypeError:
        return -id(value)


def _parts(holder: Any) -> dict[Any, Any] | None:
    """What is directly inside of a function, a class or an object of others, or of a collection, by name; ``None`` for
    what cannot change."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, (list, tuple, deque, set, frozenset)):
        return dict(enumerate(holder))
    if isinstance(holder, bytearray) or (isinstance(holder, np.ndarray) and not holder.dtype.hasobject):
        return {"": bytes(holder)}
    if isinstance(holder, torch.Generator):
        return {"": bytes(holder.get_state().numpy())}
    if isinstance(holder, partial):
        return {"func": holder.func, "args": holder.args, "keywords": holder.keywords}
    if isinstance(holder, (MethodType, staticmethod, classmethod)):
        return {"function": holder.__func__, "owner": getattr(holder, "__self__", None)}
    if isinstance(holder, property):
        return {"getter": holder.fget}
    if isinstance(holder, FunctionType):
        return None if is_trusted(library_of(holder)) else _parts_of_function(holder)
    if isinstance(holder, type):
        theirs = [base for base in holder.__mro__ if not is_trusted(library_of(base))]
        names = [(base, name) for base in theirs for name in vars(base) if name[:2] != "__" and name != "_abc_impl"]
        return {(base, name): vars(base)[name] for base, name in names} if theirs else None
    if isinstance(holder, _LEAVES):
        return None
    parts: dict[Any, Any] = {name: getattr(holder, name) for name in _slots_of(type(holder)) if hasattr(holder, name)}
    attributes = getattr(holder, "__dict__", {})
    if isinstance(holder, nn.Module):
        attributes = {name: value for name, value in list(attributes.items()) if name not in _OF_ALL}
    for name, value in list(attributes.items()):
        # Forwards of ours, which are there while another thread generates, stand for those that they replace.
        others = getattr(value, "of_others", value) if isinstance(value, partial) else value
        if callable(others) == callable(value) and library_of(others) != "hf_selfspec":
            parts[name] = others
    return parts if is_trusted(library_of(type(holder))) else parts | {"its class": type(holder)}


def _parts_of_function(function: Any) -> dict[Any, Any]:
    names, parts = _names_in(function.__code__), dict[Any, Any]()
    owners: list[tuple[Any, dict[str, Any]]] = [("global", function.__globals__)]
    for owner, variables in owners:
        for name in names & variables.keys():
            if not isinstance(value := variables[name], ModuleType):
                parts[owner, name] = value
            elif not is_trusted(value.__name__.partition(".")[0]) and len(owners) < _MOST:
                owners.append((value, vars(value)))
    for index, cell in enumerate(function.__closure__ or ()):
        with suppress(ValueError):  # an empty one
            parts["cell", index] = cell.cell_contents
    parts |= {"code": function.__code__, "defaults": (function.__defaults__, function.__kwdefaults__)}
    return parts | vars(function)


@lru_cache(4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names that a function uses, and those of the functions in it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


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
    elif isinstance(holder, bytearray):
        holder[:] = parts[""]
    elif isinstance(holder, np.ndarray):
        np.copyto(holder, np.frombuffer(parts[""], holder.dtype).reshape(holder.shape))
    elif isinstance(holder, torch.Generator):
        holder.set_state(torch.frombuffer(bytearray(parts[""]), dtype=torch.uint8))
    else:
        for name in now.keys() - parts.keys():
            owner, place = name if isinstance(name, tuple) else (holder, name)
            holder.__globals__.pop(place) if owner == "global" else delattr(owner, place)
        for name, value in parts.items():
            if name in now and _is_same(now[name], value):
                continue
            owner, place = name if isinstance(name, tuple) else (holder, name)
            if owner == "cell":
                holder.__closure__[place].cell_contents = value
            elif owner == "global":
                holder.__globals__[place] = value
            else:
                setattr(owner, place, value)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


def _slots_of(kind: type) -> Iterator[str]:
    for slots in (vars(base).get("__slots__", ()) for base in kind.__mro__):
        names = (slots,) if isinstance(slots, str) else slots
        yield from (name for name in names if isinstance(name, str) and name[:2] != "__")
