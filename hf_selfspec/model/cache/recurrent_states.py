"""Recurrent states of the layers of one text in our cache.

A model's file calls its recurrence, and its convolutions, by the name of a function. While a model speculates, that
name refers to a function that passes the call on to the state whose turn it is in this thread; if there is none, to the
original function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...errors import unsupported
from ..patching import InstanceForwards, PerThread, shared_change
from .recurrence import Convolution, GatedDelta, KimiDelta, Recurrence, SelectiveScan, StateSpace
from .timeline import StateLog, StateUpdate

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


@shared_change
def redirecting(forwards: InstanceForwards, file: Any, recurrence: type[Recurrence] | None) -> None:
    """Redirects calls of the functions of :class:`Kernels`, for all threads that use them."""
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


class StateLayer(LinearAttentionCacheLayerMixin):
    """Recurrent states of one layer, to be combined with a layer for keys and values."""

    _cache: Any  # whose `state_update` is that of the running forward

    def init_states(self, number_of_states: int, recurrence: type[Recurrence] | None, name: str) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)
        # Models call `update_conv_state` for single tokens too, and see no state: `has_previous_state` stays false.
        self.record_past = True
        self._recurrence = recurrence
        self._model_name = name
        self._convolutions: dict[int, StateLog] = {}
        # For each state and call of the function, of which there may be several for one state.
        self._recurrent: dict[tuple[int, int], StateLog] = {}
        self._calls = 0  # of the function in the running forward
        self._has_parts = False

    def logs(self) -> list[StateLog]:
        return [*self._convolutions.values(), *self._recurrent.values()]

    def _log(self, of: Any, state: torch.Tensor, *name: int) -> StateLog:
        """A new log of the layer."""
        whole = self._cache.layers.index(self), type(of).__name__, *name
        return StateLog(of, self._cache.timeline, whole, state)

    def take_states(self, source: Any) -> None:
        """Copies the states of a layer that an earlier ``generate`` returned, before the timeline's first slot."""
        for index, inputs in source.conv_states.items():
            if inputs is not None and source.has_previous_state[index]:
                width = source.conv_kernel_size[index] or inputs.shape[2]
                self._convolutions[index] = self._log(Convolution(width), inputs[:, :, -width:].clone(), index)
        for index, state in source.recurrent_states.items():
            if state is not None and source.has_previous_state[index]:
                assert self._recurrence is not None
                self._has_parts = state.dim() > self._recurrence().load(state, 0).dim()
                for part in range(state.shape[1] if self._has_parts else 1):
                    recurrence = self._recurrence()
                    loaded = recurrence.load(state.clone(), part)
                    self._recurrent[index, part] = self._log(recurrence, loaded, index, part)

    def hand_states(self, target: Any, slot: int) -> None:
        """Fills an empty layer with the states before a slot."""
        stored: dict[int, list[torch.Tensor]] = {}
        for index, log in self._convolutions.items():
            state = log.state_at(slot).clone()  # of memory that later calls write to
            target.update_conv_state(state, state_idx=index, conv_kernel_size=log.of.width)
        for (index, _), log in self._recurrent.items():
            stored.setdefault(index, []).append(log.of.store(log.state_at(slot).clone()))
        for index, parts in stored.items():
            whole = torch.stack(parts, 1) if self._has_parts else parts[0]
            target.update_recurrent_state(whole, state_idx=index)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Returns inputs of a convolution ``[b, c, s]`` with those before them; the recurrence follows."""
        turns, update, width = current_turns(), self._cache.state_update, conv_kernel_size or 0
        if self._recurrence is not None:
            turns[self._recurrence.kernel], self._calls = functools.partial(self._run, state_idx), 0
        if not width:
            raise unsupported(f"{self._model_name} keeps inputs of convolutions whose number is not known")
        if is_first := state_idx not in self._convolutions:
            state = conv_states.new_zeros(*conv_states.shape[:2], width)
            self._convolutions[state_idx] = self._log(Convolution(width), state, state_idx)
        log = self._convolutions[state_idx]
        state = log.before(update)
        update.add(log, (conv_states,))
        if is_first:
            return conv_states
        if update.nodes is not None:
            windows = log.of.windows(state, conv_states, update.nodes)
            check_convolution(turns)

            def run(original: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                # At the end of each window [b * t, c, width], as [b, c, t].
                return original(windows, *args, **kwargs)[:, :, -1].unflatten(0, (len(inputs), -1)).transpose(1, 2)

            turns[CONVOLUTION] = run
        return torch.cat([state, conv_states], 2)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Ignores a state that the model has computed, since it is known already."""
        parts = [log for (index, _), log in self._recurrent.items() if index == state_idx]
        if self._recurrence is not None:
            current_turns().pop(self._recurrence.kernel, None)
        if not parts or self._calls != len(parts):
            raise unsupported(
                f"{self._model_name} computes its recurrent states in a way that is not known here, such as a kernel "
                "of its own, so they cannot be rolled back"
            )
        self._has_parts = recurrent_states.dim() > parts[0].state.dim()
        return recurrent_states

    def _run(self, state_idx: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        update: StateUpdate = self._cache.state_update
        key = state_idx, self._calls
        log = self._recurrent.get(key)
        recurrence: Recurrence = self._recurrence() if log is None else log.of  # type: ignore[misc]  # a function that is replaced has one
        self._calls += 1
        arguments = dict(zip(recurrence.parameters, args, strict=False)) | kwargs
        recurrence.prepare(arguments)
        length = arguments[recurrence.parameters[0]].shape[recurrence.token_dim]
        state = None if log is None else log.before(update)
        if log is None or state is None or (update.is_prompt and recurrence.continues and length > 1):
            output, state = recurrence.prefill(original, state, arguments)
            if log is None:
                self._recurrent[key] = self._log(recurrence, state, *key)
            else:
                log.restart(state)
            return output, state
        output, entries = recurrence.step(state, update.nodes, arguments)
        update.add(log, entries)
        return output, state
