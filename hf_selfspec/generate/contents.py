"""What code that was not seen holds: attributes, closures, and the variables of modules that it names."""

from __future__ import annotations

import io
import itertools
import logging
import operator
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

# How many levels deep, and how many parts in all are looked at, thoroughly or briefly (16,000 take 45 ms of an AMD EPYC
# core). Briefly, a collection of more entries, or an array of more kilobytes, is known by its size alone.
_DEPTH, _MOST, _MOST_BRIEFLY, _LONG = 6, 1 << 17, 1 << 14, 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LEAVES = (*_PLAIN, torch.Tensor, torch.dtype, torch.device, CodeType, ModuleType, logging.Logger, io.IOBase)
_SIZED = (dict, list, tuple, deque, set, frozenset)
_COLLECTIONS = (*_SIZED, np.ndarray, partial, MethodType)
# What a comparison would use up, or could not put back.
_OPAQUE = (Iterator, bytearray, torch.Generator)
# What a partial, a method and a property hold.
_INSIDE = ("func", "args", "keywords", "__func__", "__self__", "fget")
# What all modules have; their hooks and modules are looked at by themselves.
_OF_ALL = set(vars(nn.Module())) - {"training", "_buffers", "_parameters"}
_serials: Any = WeakIdKeyDictionary()
_numbers = itertools.count()

# A part of an object: what has it (a dictionary, or what has it as an attribute), its name there, and the part.
_Part = tuple[Any, Any, Any]


class Contents:
    """What some functions and objects hold now; ``briefly``, without what long lists and large arrays hold.

    Attributes:
        key: equal to that of other contents if nothing was set, written or replaced between them.
        why_opaque: why they cannot be looked at, empty if they can.
    """

    def __init__(self, holders: Iterable[Any], briefly: bool = False) -> None:
        self.holders, self._is_brief = tuple(holders), briefly
        self._parts: list[tuple[Any, list[_Part]]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.key: Hashable = None
        self.why_opaque = ""
        try:
            self.key = tuple(self._marks())
        except Exception as error:  # whatever objects of others raise when they are looked at
            self.why_opaque = f"what it holds cannot be looked at: {error!r}"

    def _marks(self) -> Iterator[Hashable]:
        waiting, visited, count = [(holder, _DEPTH) for holder in reversed(self.holders)], set[int](), 0
        most = _MOST_BRIEFLY if self._is_brief else _MOST
        while waiting:
            holder, depth = waiting.pop()
            if id(holder) in visited:
                continue
            visited.add(id(holder))
            if issubclass(type(holder), _OPAQUE) and library_of(type(holder)) in ("builtins", "itertools", "torch"):
                self.why_opaque = f"it holds a {type(holder).__name__}, which a comparison would change"
            if self._is_brief and (size := _size_of(holder)) > _LONG:
                yield size
                continue
            if (parts := _parts(holder)) is None:
                continue
            if (count := count + len(parts)) > most:
                self.why_opaque = "it holds more than can be looked at"
                return
            self._parts.append((holder, parts))
            yield len(parts)
            for _, name, value in parts:
                yield str(name), _mark(value, is_last=not depth)
                if depth and not issubclass(type(value), _LEAVES):
                    waiting.append((value, depth - 1))

    def keep(self) -> None:
        """Copies the tensors, so that they can be put back as well."""
        values = {id(value): value for _, parts in self._parts for *_, value in parts}.values()
        tensors = (value for value in values if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def have_changed(self) -> bool:
        """Whether anything is other than it was; tensors by their values, too, once they were kept."""
        now = Contents(self.holders)
        if now.why_opaque or now.key != self.key:
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


def _mark(value: Any, is_last: bool) -> Hashable:
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


def _size_of(holder: Any) -> int:
    """The entries of a collection, or the kilobytes of an array."""
    if isinstance(holder, np.ndarray):
        return holder.nbytes >> 10
    return len(holder) if isinstance(holder, _SIZED) else 0


def _parts(holder: Any) -> list[_Part] | None:
    """What is directly inside of a function, class or object of others, or of a collection; ``None`` for what cannot
    change."""
    if isinstance(holder, dict):
        return [(holder, name, value) for name, value in list(holder.items())]
    if isinstance(holder, FunctionType):
        return None if is_trusted(library_of(holder)) else _parts_of_function(holder)
    if isinstance(holder, type):
        theirs = [base for base in holder.__mro__ if not is_trusted(library_of(base))]
        names = [(base, name) for base in theirs for name in vars(base) if name[:2] != "__" and name != "_abc_impl"]
        return [(base, name, vars(base)[name]) for base, name in names] if theirs else None
    if isinstance(holder, (list, tuple, deque, set, frozenset)):
        return [(holder, index, value) for index, value in enumerate(list(holder))]
    if isinstance(holder, np.ndarray) and not holder.dtype.hasobject:
        return [(holder, "", bytes(holder))]
    if isinstance(holder, (partial, MethodType, staticmethod, classmethod, property)):
        return [(holder, name, getattr(holder, name)) for name in _INSIDE if hasattr(holder, name)]
    return None if isinstance(holder, _LEAVES) else _parts_of_object(holder)


def _parts_of_object(holder: Any) -> list[_Part]:
    type_, attributes = type(holder), getattr(holder, "__dict__", {})
    slots = [vars(base).get("__slots__", ()) for base in type_.__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each) if name[:2] != "__"]
    parts = [(holder, name, getattr(holder, name)) for name in names if hasattr(holder, name)]
    for name, value in list(attributes.items()):
        # Forwards of ours, which are there while another thread generates, stand for those that they replace.
        others = getattr(value, "of_others", value) if isinstance(value, partial) else value
        is_usual = name in _OF_ALL and isinstance(holder, nn.Module)
        if not is_usual and callable(others) == callable(value) and library_of(others) != "hf_selfspec":
            parts.append((attributes, name, others))
    return parts if is_trusted(library_of(type_)) else [*parts, (holder, "__class__", type_)]


def _parts_of_function(function: Any) -> list[_Part]:
    names = _names_in(function.__code__)
    parts = [(function, name, getattr(function, name)) for name in ("__code__", "__defaults__", "__kwdefaults__")]
    modules = [function.__globals__]
    for variables in modules:
        for name in names & variables.keys():
            if not isinstance(value := variables[name], ModuleType):
                parts.append((variables, name, value))
            elif not is_trusted(value.__name__.partition(".")[0]) and all(vars(value) is not each for each in modules):
                modules.append(vars(value))
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            parts.append((cell, "cell_contents", cell.cell_contents))
    return [*parts, *((vars(function), name, value) for name, value in vars(function).items())]


@lru_cache(4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names that a function uses, and those of the functions in it."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def _put_back(holder: Any, parts: list[_Part]) -> None:
    """Gives a holder the parts that it had; nothing is written where they are still there."""
    places, values = [(id(owner), name) for owner, name, _ in parts], [value for *_, value in parts]
    now = {(id(owner), name): (owner, value) for owner, name, value in _parts(holder) or ()}
    changed = [
        part for place, part in zip(places, parts, strict=True) if place not in now or now[place][1] is not part[2]
    ]
    if isinstance(holder, np.ndarray):
        if bytes(holder) != values[0]:
            np.copyto(holder, np.frombuffer(values[0], holder.dtype).reshape(holder.shape))
    elif isinstance(holder, (dict, set, list, deque)):
        if changed or places != list(now):
            holder.clear()
            refill: Any = holder.update if isinstance(holder, (dict, set)) else holder.extend
            refill({name: value for _, name, value in parts} if isinstance(holder, dict) else values)
    else:
        for owner, name in [(now[place][0], place[1]) for place in now.keys() - set(places)]:
            owner.pop(name) if isinstance(owner, dict) else delattr(owner, name)
        for owner, name, value in changed:
            operator.setitem(owner, name, value) if isinstance(owner, dict) else setattr(owner, name, value)
