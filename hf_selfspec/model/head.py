"""Runs a model's own output head on states that do not come from its last layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .autocast import Autocast, within
from .forwards import InstanceForwards, states_of, with_states

_head_lock = threading.Lock()


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Makes ``module`` return ``output`` in this thread; only one thread at a time can replace its forward."""
    forwards, thread = InstanceForwards(), threading.get_ident()
    with _head_lock:
        original = module.forward
        forwards.replace(
            module, lambda *args, **kwargs: output if threading.get_ident() == thread else original(*args, **kwargs)
        )
        try:
            yield
        finally:
            forwards.restore()


class OwnHead:
    """Everything that the model does between its stack of layers and its logits: projections, head, scale, soft-cap.

    No architecture is reimplemented: the model's forward runs, and its stack of layers returns the given states
    directly. What a stack returns besides states is copied from an earlier forward that was observed.

    Args:
        model: a causal LM of transformers.
        anatomy: its parts.
    """

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy) -> None:
        self._model = model
        self._stack = anatomy.stack
        self._output: Any = None
        self._autocast: Autocast | None = None

    @property
    def has_seen(self) -> bool:
        """Whether a forward was observed, which shows the form of the stack's output."""
        return self._output is not None

    def see(self, output: Any) -> None:
        """Remembers the form of an output of the stack, and the autocast that is on."""
        self._output = output
        self._autocast = Autocast.around(states_of(output))

    @contextmanager
    def seeing(self) -> Iterator[list[torch.Tensor]]:
        """Observes the forwards of this thread; yields a list of what each sends to the head, ``[b, s, d]``."""
        found: list[torch.Tensor] = []
        thread = threading.get_ident()

        def see(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self.see(output)
                found.append(states_of(output))

        handle = self._stack.register_forward_hook(see)
        try:
            yield found
        finally:
            handle.remove()

    def forget(self) -> None:
        """Releases that output."""
        self._output = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Runs the head.

        Hooks that others have registered on the model's stack of layers run as well, with ids of zeros.

        Args:
            states: ``[n, d]`` or ``[b, s, d]``, as they leave the stack (after its final norm, if it has one).

        Returns:
            ``[n, v]`` or ``[b, s, v]`` logits, in the precision (autocast) of the observed forward.
        """
        output = self._output
        assert output is not None, "a forward has to be seen first"
        batch = (states[None] if states.dim() == 2 else states).to(states_of(output).device)
        replaced = with_states(output, batch)
        ids = torch.zeros(batch.shape[:2], dtype=torch.long, device=batch.device)
        # The forward of the class, without what others have wrapped around the instance's, except for its autocast.
        with within(self._autocast), _returning(self._stack, replaced):
            result = type(self._model).forward(self._model, input_ids=ids)
        logits: torch.Tensor = result[0] if isinstance(result, tuple) else result.logits
        logits = logits.to(states.device)
        return logits[0] if states.dim() == 2 else logits
